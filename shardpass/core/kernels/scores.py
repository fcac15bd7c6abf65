"""Closed forms of attention scores and their adjoints in plain torch, a chunk of edges at a time.

`fused` has them inside its loops; this is the definition of right, and what runs without numba.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.kernels.runs import EdgeRun
from shardpass.core.tracing import DotScore, Score


def edge_scores(form: Score, run: EdgeRun, of_source: Tensor, of_dst: Tensor, mix: Tensor | None) -> Tensor:
    """The score of each edge and head, ``[edges of the chunk, heads]``.

    Args:
        of_source: rows of the block, ``[block rows, heads]``, with the channels of a head behind unless it is a sum.
        of_dst: rows of all destinations, in the same shape.
        mix: of a `MixedScore`, ``[heads, channels]``.
    """
    left, right = of_source.index_select(0, run.src_rows), of_dst.index_select(0, run.dst_rows)
    return _formula(form, left, right, mix)


def edge_scores_adjoint(
    form: Score,
    run: EdgeRun,
    of_source: Tensor,
    of_dst: Tensor,
    mix: Tensor | None,
    weights: Tensor,
    relative: Tensor,
    grad_source: Tensor,
    grad_dst: Tensor,
    grad_mix: Tensor | None,
) -> None:
    """Adjoint of `edge_scores` for the gradient ``weights * relative``, added to `grad_source` and so on in place."""
    with torch.enable_grad():
        left = of_source.index_select(0, run.src_rows).requires_grad_()
        right = of_dst.index_select(0, run.dst_rows).requires_grad_()
        leaves = [left, right] + ([] if mix is None else [mix.detach().requires_grad_()])
        found = torch.autograd.grad(_formula(form, left, right, *leaves[2:]), leaves, weights * relative)
    grad_source.index_add_(0, run.src_rows, found[0])
    grad_dst.index_add_(0, run.dst_rows, found[1])
    if grad_mix is not None:
        grad_mix += found[2]


def _formula(form: Score, left: Tensor, right: Tensor, mix: Tensor | None = None) -> Tensor:
    if isinstance(form, DotScore):
        return form.factor * (left * right).sum(-1)
    slanted = torch.nn.functional.leaky_relu(left + right, form.slope)
    return slanted if mix is None else (slanted * mix).sum(-1)
