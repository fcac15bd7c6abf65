"""Attention whose scores have a closed form: one loop of numba or Triton computes scores, softmax and weighted sum.

Tensors for which there is no such loop go in steps, with a tensor per step that has a row per edge.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.kernels import attention
from shardpass.core.kernels.cpu_loops import attention_loops, cut_rows, in_threads, numba_loops_for
from shardpass.core.kernels.gpu import triton_for
from shardpass.core.kernels.runs import ClosedScores, EdgeRun, Outer, RowRun, ScoreGradients, SoftmaxState
from shardpass.core.kernels.scores import edge_scores, edge_scores_adjoint
from shardpass.core.tracing import Score
from shardpass.errors import InternalError


def handles(form: Score, *tensors: Tensor | None) -> bool:
    """Whether there is a loop for a formula of tensors of these dtypes and devices."""
    given = [tensor for tensor in tensors if tensor is not None]
    triton = triton_for("attention", *given)
    if triton is not None:
        return form.kind in triton.KINDS
    is_alike = len({(t.dtype, t.device) for t in given}) == 1
    return is_alike and numba_loops_for(given[0]) is not None and form.kind in attention_loops().KINDS


def accumulate(state: SoftmaxState, run: RowRun, of: ClosedScores, values: Tensor) -> None:
    """Take a chunk of edges, ordered by destination, into `state`.

    Args:
        values: the rows that are summed, ``[block rows, heads, width]``.
    """
    if not handles(of.form, values, of.of_source, of.of_dst, of.mix):
        edges = run.by_destination()
        return attention.accumulate(state, edges, edge_scores(edges, of), values, of.kept)
    values, triton = values.contiguous(), triton_for("attention", values)
    if triton is not None:
        return triton.accumulate_closed(state, run, of, values)
    rows, into = values.numpy(), tuple(part.numpy() for part in state)
    loops, (edges, kept, nothing) = attention_loops(), _arrays_of(run, of, rows)
    scored = _scored(of, of.of_source, of.of_dst, nothing)
    in_threads(lambda low, high: loops.attend(edges, scored, rows, kept, low, high, into), cut_rows(run))


def adjoint(
    run: RowRun, of: ClosedScores, values: Tensor, outer: Outer, grad_values: Tensor, into: ScoreGradients
) -> bool:
    """Add the adjoint of attention over a chunk of edges, ordered by source, to `grad_values` and to `into`.

    Args:
        values: the rows that are summed, ``[block rows, heads, width]``.
        grad_values: in the shape of `values`.

    Returns:
        whether nothing was added to ``into.of_dst``, so that `adjoint_of_dst` has to go over the same edges. This is so
        where the programs of a GPU would have to add to the same rows, in any order.
    """
    if not handles(of.form, values, of.of_source, of.of_dst, of.mix):
        _adjoint_in_steps(run.by_source(), of, values, outer, grad_values, into)
        return False
    values, triton = values.contiguous(), triton_for("attention", values)
    if triton is not None:
        triton.adjoint_closed(run, of, values, outer, grad_values, into)
        return True
    rows, known = values.numpy(), tuple(part.numpy() for part in outer)
    loops, (edges, kept, nothing) = attention_loops(), _arrays_of(run, of, rows)
    scored = _scored(of, of.of_dst, of.of_source, nothing)
    # Several threads meet edges of one destination, so each has sums of its own, together no larger than the scores.
    most = 1 + run.columns.numel() * values.size(1) // max(1, of.of_dst.numel())
    ranges = cut_rows(run, most)
    sums = [into, *(_zeros_like(into) for _ in ranges[1:])]

    def work(low: int, high: int, own: ScoreGradients) -> None:
        to_mix = nothing if own.mix is None else own.mix.numpy()
        to = grad_values.numpy(), own.of_dst.numpy(), own.of_source.numpy(), to_mix
        loops.attend_adjoint(edges, scored, rows, kept, known, low, high, to)

    in_threads(work, [(*pair, own) for pair, own in zip(ranges, sums)])
    for own in sums[1:]:
        into.of_dst.add_(own.of_dst)
        if into.mix is not None and own.mix is not None:
            into.mix.add_(own.mix)
    return False


def adjoint_of_dst(run: RowRun, of: ClosedScores, values: Tensor, outer: Outer, to_dst: Tensor) -> None:
    """Add what `adjoint` left out, over a chunk of edges ordered by destination, to the gradients of ``of.of_dst``.

    Args:
        values: as in `adjoint`.
        to_dst: in the shape of ``of.of_dst``.
    """
    triton = triton_for("attention", values, of.of_source, of.of_dst, of.mix)
    if triton is None:
        raise InternalError("adjoint has added the gradients of destinations already")
    triton.adjoint_of_dst(run, of, values, outer, to_dst)


def _adjoint_in_steps(
    edges: EdgeRun, of: ClosedScores, values: Tensor, outer: Outer, grad_values: Tensor, into: ScoreGradients
) -> None:
    weights = attention.softmax_weights(edges, edge_scores(edges, of), outer.log_sum)
    relative = attention.adjoint(edges, weights, values, of.kept, outer, grad_values)
    edge_scores_adjoint(edges, of, weights, relative, into)


def _zeros_like(into: ScoreGradients) -> ScoreGradients:
    """Sums of a thread's own. Rows of sources are shared, since each thread has other sources."""
    mix = None if into.mix is None else torch.zeros_like(into.mix)
    return ScoreGradients(into.of_source, torch.zeros_like(into.of_dst), mix)


def _arrays_of(run: RowRun, of: ClosedScores, rows: Any) -> tuple[Any, Any, Any]:
    """The edges and dropout factors as numpy arrays, and an empty array, like `rows`, for a missing tensor."""
    nothing = np.empty((0, of.of_source.size(1)), rows.dtype)
    edges = run.indptr.numpy(), run.columns.numpy(), run.bounds.start, run.bounds.stop
    return edges, nothing if of.kept is None else of.kept.numpy(), nothing


def _scored(of: ClosedScores, other: Tensor, own: Tensor, nothing: Any) -> tuple[Any, ...]:
    """What numba's loops compute scores from; see `numba_attention`."""
    mix = nothing if of.mix is None else of.mix.numpy()
    return attention_loops().KINDS[of.form.kind], other.numpy(), own.numpy(), mix, mix.dtype.type(of.form.number)
