"""Attention over one order of a shard's edges for GPUs, forward and backward: kernels that Triton compiles.

A program has one row of `indptr` and one head, and takes the row's edges `BLOCK_E` at a time. Forward it has a
destination and computes an online softmax. Backward goes over the edges twice and computes every weight again from the
log-sum-exp: a program of the first pass has a source, a program of the second pass has a destination. Nothing has a row
per edge. As in `numba_attention`, `own` is of the rows of the loop and `other` of those gathered, since the formulas of
scores are symmetric in both.

[Note: two passes]
In a pass over sources alone many programs would add to one destination, in whatever order they come. With two passes
one program writes each row, so every run gives the same bits, for the price of gathering values once more. The gradient
of what mixes scores is one row for all edges, so each program of the first pass sums over several sources by itself.

[Note: dtypes]
Half precision is computed and summed in float32, and rounded when a row is written.

Source: as in `attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardpass.core.kernels.runs import ClosedScores, EdgeRun, Outer, RowRun, ScoreGradients, SoftmaxState
from shardpass.core.kernels.triton_scores import GIVEN, scores_adjoint, scores_of_tile
from shardpass.core.kernels.triton_scores import KINDS as KINDS
from shardpass.core.kernels.triton_sums import block_of, launch, packed, tile_of
from shardpass.core.kernels.triton_tiles import edges_of_row, numbers_at, row_at, rows_at, store_row, tile_from
from shardpass.core.tracing import accumulator_dtype

MOST_SUMS = 4096  # programs per head, each of which has a partial sum


def accumulate(state: SoftmaxState, run: EdgeRun, scores: Tensor, values: Tensor, kept: Tensor | None) -> None:
    """See `attention.accumulate`."""
    _attend(state, run, run.src_rows, (scores, scores, None, 1, 1.0, GIVEN), values, kept)


def accumulate_closed(state: SoftmaxState, run: RowRun, of: ClosedScores, values: Tensor) -> None:
    """See `fused.accumulate`."""
    scores = of.of_source, of.of_dst, of.mix, of.of_dst.size(2), of.form.number, of.form.kind
    _attend(state, run, run.columns, scores, values, of.kept)


def adjoint(
    run: EdgeRun, weights: Tensor, values: Tensor, kept: Tensor | None, outer: Outer, grad_values: Tensor
) -> Tensor:
    """See `attention.adjoint`."""
    relative, (_, heads, width) = torch.empty_like(weights, memory_format=torch.contiguous_format), values.shape
    start, stop, low, high = run.bounds
    given = packed(run.indptr, run.dst_rows, weights, values, kept)
    rows = *packed(outer.grad, outer.delta), grad_values.view(-1), relative
    if stop > start and heads:
        arguments = *given, start, stop, low, *rows, heads, width
        launch(_given_adjoint, (high - low, heads), tile_of(width), arguments, values, DROPS=kept is not None)
    return relative


def adjoint_closed(
    run: RowRun, of: ClosedScores, values: Tensor, outer: Outer, grad_values: Tensor, into: ScoreGradients
) -> None:
    """See `fused.adjoint`; adds nothing to ``into.of_dst``."""
    (start, stop, low, high), heads = run.bounds, values.size(1)
    if stop == start or heads == 0:
        return
    count = high - low if into.mix is None else min(high - low, MOST_SUMS)
    num_sums, wide = 0 if into.mix is None else count, accumulator_dtype(values.dtype)
    sums = values.new_empty((num_sums, heads, of.of_source.size(2)), dtype=wide)
    more = high, grad_values.view(-1), into.of_source.view(-1), sums
    same = into.of_source.data_ptr() == grad_values.data_ptr()
    _launch_adjoint(_source_adjoint, count, run, of, (of.of_dst, of.of_source), values, outer, more, SAME=same)
    if into.mix is not None:
        into.mix.add_(sums.sum(0))


def adjoint_of_dst(run: RowRun, of: ClosedScores, values: Tensor, outer: Outer, to_dst: Tensor) -> None:
    """See `fused.adjoint_of_dst`."""
    (start, stop, low, high), heads = run.bounds, values.size(1)
    if stop > start and heads:
        rows = of.of_source, of.of_dst
        _launch_adjoint(_destination_adjoint, high - low, run, of, rows, values, outer, (to_dst.view(-1),))


def _launch_adjoint(
    kernel: Any,
    count: int,
    run: RowRun,
    of: ClosedScores,
    rows: tuple[Tensor, Tensor],
    values: Tensor,
    outer: Outer,
    more: tuple[Any, ...],
    **constants: Any,
) -> None:
    """Run `count` programs per head of a kernel of backward.

    Args:
        rows: those that are gathered, and those of the loop.
        more: the arguments of this kernel alone.
    """
    (_, heads, width), channels = values.shape, of.of_source.size(2)
    given = *packed(run.indptr, run.columns, *rows, of.mix, values, of.kept), *run.bounds[:3]
    known = packed(outer.log_sum, outer.grad, outer.delta)
    launch(
        kernel,
        (count, heads),
        _tile(width, channels),
        (*given, *known, heads, channels, width, *more),
        values,
        NUMBER=of.form.number,
        KIND=of.form.kind,
        HAS_MIX=of.mix is not None,
        DROPS=of.kept is not None,
        BLOCK_S=block_of(channels),
        **constants,
    )


def _tile(width: int, channels: int) -> tuple[int, int, int]:
    """As `tile_of`, for kernels that gather rows of `width` values and rows of `channels` that make scores."""
    block_e, _, num_warps = tile_of(max(width, channels))
    return block_e, block_of(width), num_warps


def _attend(
    state: SoftmaxState,
    run: EdgeRun | RowRun,
    columns: Tensor,
    scores: tuple[Tensor, Tensor, Tensor | None, int, float, str],
    values: Tensor,
    kept: Tensor | None,
) -> None:
    other, own, mix, channels, number, kind = scores
    (start, stop, low, high), (_, heads, width) = run.bounds, values.shape
    if stop == start or heads == 0:
        return
    given = packed(run.indptr, columns, other, own, mix, values, kept)
    launch(
        _attend_rows,
        (high - low, heads),
        _tile(width, channels),
        (*given, start, stop, low, *(part.view(-1) for part in state), heads, channels, width),
        values,
        NUMBER=number,
        KIND=kind,
        HAS_MIX=mix is not None,
        DROPS=kept is not None,
        BLOCK_S=block_of(channels),
    )


@triton.jit(do_not_specialize=["start", "stop", "low"])
def _attend_rows(
    indptr: tl.tensor, columns: tl.tensor, other: tl.tensor, own: tl.tensor, mix: tl.tensor, values: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor, stop: tl.tensor, low: tl.tensor,
    top: tl.tensor, total: tl.tensor, out: tl.tensor,
    heads: tl.tensor, channels: tl.tensor, width: tl.tensor,
    NUMBER: tl.constexpr, KIND: tl.constexpr, HAS_MIX: tl.constexpr, DROPS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    i, h = low + tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = edges_of_row(indptr, i, start, stop)
    if first < last:
        at = i * heads + h
        best, weight = tl.load(top + at).to(ACC), tl.load(total + at).to(ACC)
        result = row_at(out, at, width, ACC, BLOCK_C)
        if KIND != "given":
            mine = row_at(own, at, channels, ACC, BLOCK_S)
            mixed = mine
            if HAS_MIX:
                mixed = row_at(mix, h, channels, ACC, BLOCK_S)
        for begin in range(first, last, BLOCK_E):
            edge, there, j = tile_from(begin, last, columns, heads, h, BLOCK_E)
            if KIND == "given":
                score = numbers_at(other, edge, there, ACC)
            else:
                score = scores_of_tile(rows_at(other, j, there, channels, ACC, BLOCK_S), mine, mixed, NUMBER, KIND)
            score = tl.where(there, score, float("-inf"))
            # Rounded as it will be stored: weights measured from it must fit those of the chunks that read it later.
            new = tl.maximum(best, tl.max(score, 0)).to(top.dtype.element_ty).to(ACC)
            base = tl.where(new == float("-inf"), 0.0, new)  # every score so far is -inf: their weights are 0
            weights, scale = tl.exp(score - base), tl.exp(best - base)
            best, weight = new, weight * scale + tl.sum(weights, 0)
            if DROPS:
                weights *= numbers_at(kept, edge, there, ACC)
            result = result * scale + tl.sum(weights[:, None] * rows_at(values, j, there, width, ACC, BLOCK_C), 0)
        tl.store(top + at, best)
        tl.store(total + at, weight)
        store_row(out, at, width, result, BLOCK_C)


@triton.jit(do_not_specialize=["start", "stop", "low"])
def _given_adjoint(
    indptr: tl.tensor, columns: tl.tensor, weights: tl.tensor, values: tl.tensor, kept: tl.tensor,
    start: tl.tensor, stop: tl.tensor, low: tl.tensor,
    grad: tl.tensor, delta: tl.tensor, grad_values: tl.tensor, relative: tl.tensor,
    heads: tl.tensor, width: tl.tensor,
    DROPS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    j, h = low + tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = edges_of_row(indptr, j, start, stop)
    if first < last:
        at = j * heads + h
        value, result = row_at(values, at, width, ACC, BLOCK_C), row_at(grad_values, at, width, ACC, BLOCK_C)
        for begin in range(first, last, BLOCK_E):
            edge, there, i = tile_from(begin, last, columns, heads, h, BLOCK_E)
            outer, used = rows_at(grad, i, there, width, ACC, BLOCK_C), numbers_at(weights, edge, there, ACC)
            dots = tl.sum(outer * value[None, :], 1)
            if DROPS:
                factor = numbers_at(kept, edge, there, ACC)
                used, dots = used * factor, dots * factor
            result += tl.sum(used[:, None] * outer, 0)
            tl.store(relative + edge, dots - numbers_at(delta, i, there, ACC), mask=there)
        store_row(grad_values, at, width, result, BLOCK_C)


@triton.jit(do_not_specialize=["start", "stop", "low", "high"])
def _source_adjoint(
    indptr: tl.tensor, columns: tl.tensor, other: tl.tensor, own: tl.tensor, mix: tl.tensor, values: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor, stop: tl.tensor, low: tl.tensor,
    log_sum: tl.tensor, grad: tl.tensor, delta: tl.tensor,
    heads: tl.tensor, channels: tl.tensor, width: tl.tensor,
    high: tl.tensor, grad_values: tl.tensor, grad_own: tl.tensor, mix_sums: tl.tensor,
    NUMBER: tl.constexpr, KIND: tl.constexpr, HAS_MIX: tl.constexpr, DROPS: tl.constexpr, SAME: tl.constexpr,
    ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    h, mixed, mix_sum = tl.program_id(1), tl.full([BLOCK_S], 1, ACC), tl.zeros([BLOCK_S], ACC)
    if HAS_MIX:
        mixed = row_at(mix, h, channels, ACC, BLOCK_S)
    lowest = low + tl.program_id(0).to(tl.int64)
    for more in range(0, high - lowest, tl.num_programs(0)):
        j = lowest + more  # int64, where the counter of a loop may be less
        first, last = edges_of_row(indptr, j, start, stop)
        if first < last:
            at = j * heads + h
            mine, value = row_at(own, at, channels, ACC, BLOCK_S), row_at(values, at, width, ACC, BLOCK_C)
            values_sum, own_sum = row_at(grad_values, at, width, ACC, BLOCK_C), tl.zeros([BLOCK_S], ACC)
            for begin in range(first, last, BLOCK_E):
                edge, there, i = tile_from(begin, last, columns, heads, h, BLOCK_E)
                theirs = rows_at(other, i, there, channels, ACC, BLOCK_S)
                score = scores_of_tile(theirs, mine, mixed, NUMBER, KIND)
                change = tl.where(there, tl.exp(score - numbers_at(log_sum, i, there, ACC)), 0.0)
                used, outer = change, rows_at(grad, i, there, width, ACC, BLOCK_C)
                dots = tl.sum(outer * value[None, :], 1)
                if DROPS:
                    factor = numbers_at(kept, edge, there, ACC)
                    used, dots = used * factor, dots * factor
                values_sum += tl.sum(used[:, None] * outer, 0)
                change *= dots - numbers_at(delta, i, there, ACC)
                to_own_row, to_mix = scores_adjoint(change, theirs, mine, mixed, NUMBER, KIND)
                own_sum, mix_sum = own_sum + to_own_row, mix_sum + to_mix
            if SAME:  # one tensor is scored and summed: its gradients meet in one
                values_sum += own_sum
            else:
                own_sum += row_at(grad_own, at, channels, ACC, BLOCK_S)
                store_row(grad_own, at, channels, own_sum, BLOCK_S)
            store_row(grad_values, at, width, values_sum, BLOCK_C)
    if HAS_MIX:
        store_row(mix_sums, tl.program_id(0).to(tl.int64) * heads + h, channels, mix_sum, BLOCK_S)


@triton.jit(do_not_specialize=["start", "stop", "low"])
def _destination_adjoint(
    indptr: tl.tensor, columns: tl.tensor, other: tl.tensor, own: tl.tensor, mix: tl.tensor, values: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor, stop: tl.tensor, low: tl.tensor,
    log_sum: tl.tensor, grad: tl.tensor, delta: tl.tensor,
    heads: tl.tensor, channels: tl.tensor, width: tl.tensor,
    grad_own: tl.tensor,
    NUMBER: tl.constexpr, KIND: tl.constexpr, HAS_MIX: tl.constexpr, DROPS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    i, h = low + tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = edges_of_row(indptr, i, start, stop)
    if first < last:
        at = i * heads + h
        mine, outer = row_at(own, at, channels, ACC, BLOCK_S), row_at(grad, at, width, ACC, BLOCK_C)
        base, mean = tl.load(log_sum + at).to(ACC), tl.load(delta + at).to(ACC)
        own_sum, mixed = row_at(grad_own, at, channels, ACC, BLOCK_S), tl.full([BLOCK_S], 1, ACC)
        if HAS_MIX:
            mixed = row_at(mix, h, channels, ACC, BLOCK_S)
        for begin in range(first, last, BLOCK_E):
            edge, there, j = tile_from(begin, last, columns, heads, h, BLOCK_E)
            theirs = rows_at(other, j, there, channels, ACC, BLOCK_S)
            dots = tl.sum(rows_at(values, j, there, width, ACC, BLOCK_C) * outer[None, :], 1)
            if DROPS:
                dots *= numbers_at(kept, edge, there, ACC)
            change = tl.exp(scores_of_tile(theirs, mine, mixed, NUMBER, KIND) - base) * (dots - mean)
            to_own_row, _ = scores_adjoint(tl.where(there, change, 0.0), theirs, mine, mixed, NUMBER, KIND)
            own_sum += to_own_row
        store_row(grad_own, at, channels, own_sum, BLOCK_S)
