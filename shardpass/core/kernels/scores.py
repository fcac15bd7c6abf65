"""Closed forms of attention scores and their adjoints, a chunk of edges at a time: numba's loops, or plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.kernels.attention import EdgeRun, by_edges, numba_loops_for
from shardpass.core.program import AdditiveScore, DotScore, Score


def scores(form: Score, run: EdgeRun, of_source: Tensor, of_dst: Tensor, mix: Tensor | None) -> Tensor:
    """The score of each edge and head, ``[edges of the chunk, heads]``.

    Args:
        of_source: rows of the block, ``[block rows, heads]``, with the channels of a head behind unless it is a sum.
        of_dst: rows of all destinations, in the same shape.
        mix: of a `MixedScore`, ``[heads, channels]``.
    """
    loops = numba_loops_for(of_source)
    if loops is None:
        left, right = of_source.index_select(0, run.src_rows), of_dst.index_select(0, run.dst_rows)
        return _formula(form, left, right, mix)
    out = of_source.new_empty((run.src_rows.numel(), of_source.size(1)))
    loop = getattr(loops, _name(form) + "_scores")
    given = [*_numpy(run.src_rows, run.dst_rows, of_source, of_dst, mix), _number(form)]
    numbers = out.numpy()
    by_edges(run, lambda first, last: loop(*given, first, last, numbers))
    return out


def adjoint(
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
    """The adjoint of `scores` for the gradient ``weights * relative``, added to `grad_source` and so on in place."""
    loops = numba_loops_for(of_source)
    if loops is not None:
        loop = getattr(loops, _name(form) + "_adjoint")
        given = [*_numpy(run.src_rows, run.dst_rows, of_source, of_dst, mix), _number(form)]
        loop(*given, *_numpy(weights, relative, grad_source, grad_dst, grad_mix))
        return
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


def _name(form: Score) -> str:
    return "additive" if isinstance(form, AdditiveScore) else "dot" if isinstance(form, DotScore) else "mixed"


def _number(form: Score) -> float:
    return form.factor if isinstance(form, DotScore) else form.slope


def _numpy(*tensors: Tensor | None) -> list[Any]:
    return [tensor.numpy() for tensor in tensors if tensor is not None]
