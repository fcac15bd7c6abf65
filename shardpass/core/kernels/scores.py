"""Attention scores in closed form and their adjoints in plain torch, one chunk of edges at a time.

This defines what is right, and it runs where `fused` has no loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.kernels.runs import ClosedScores, EdgeRun, ScoreGradients


def edge_scores(run: EdgeRun, of: ClosedScores) -> Tensor:
    """The score of each edge and head, ``[edges of the chunk, heads]``."""
    left, right = of.of_source.index_select(0, run.src_rows), of.of_dst.index_select(0, run.dst_rows)
    return of.form.formula(left, right, of.mix)


def edge_scores_adjoint(
    run: EdgeRun, of: ClosedScores, weights: Tensor, relative: Tensor, into: ScoreGradients
) -> None:
    """Add the adjoint of `edge_scores`, for the gradient ``weights * relative`` of the scores, to `into`."""
    with torch.enable_grad():
        left = of.of_source.index_select(0, run.src_rows).requires_grad_()
        right = of.of_dst.index_select(0, run.dst_rows).requires_grad_()
        mix = None if of.mix is None else of.mix.detach().requires_grad_()
        leaves = [left, right] + ([] if mix is None else [mix])
        found = torch.autograd.grad(of.form.formula(left, right, mix), leaves, weights * relative)
    # torch takes four times as long with an int32 index
    into.of_source.index_add_(0, run.src_rows.long(), found[0])
    into.of_dst.index_add_(0, run.dst_rows.long(), found[1])
    if into.mix is not None:
        into.mix.add_(found[2])
