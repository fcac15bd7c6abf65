"""Attention over one order of a shard's edges for GPUs, forward and backward: kernels that Triton compiles.

A program has one row of `indptr` and one head, and takes the row's edges `BLOCK_E` at a time. Forward it has a
destination and computes an online softmax. Backward it has a source and computes every weight again from the
log-sum-exp. Nothing has a row per edge. As in `numba_attention`, `own` is of the rows of the loop and `other` of those
gathered, since the formulas of scores are symmetric in both. `_attend_rows` and `_attend_adjoint` are longer than 50
lines because a tile must stay in registers from its first load to its last store.

[Note: gradients of destinations]
Backward loops over sources, so many programs add to the same destination. They do it by atomic additions, as torch's
`index_add_` does on GPUs. A second loop by destination would need none, but it would gather everything twice and would
need the edges in both orders, which out-edges do not have. The gradient of what scores are mixed with is one row for
all edges, so each program takes several sources and writes a partial sum of its own.

[Note: dtypes]
Half precision is computed in float32 and added to destinations in float32.

Source: as in `attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardpass.core.kernels.runs import ClosedScores, EdgeRun, Outer, RowRun, ScoreGradients, SoftmaxState
from shardpass.core.kernels.triton_sums import block_of, launch, tile_of
from shardpass.core.tracing import DotScore, accumulator_dtype

MOST_SUMS = 4096  # programs per head, each of which has a partial sum
GIVEN, DOT, SLANTED, MIXED = "given", "dot", "slanted", "mixed"  # where scores come from


def accumulate(state: SoftmaxState, run: EdgeRun, scores: Tensor, values: Tensor, kept: Tensor | None) -> None:
    """See `attention.accumulate`."""
    _attend(state, run, run.src_rows, (scores, scores, scores, 1, 1.0, GIVEN), values, kept)


def accumulate_closed(state: SoftmaxState, run: RowRun, of: ClosedScores, values: Tensor) -> None:
    """See `fused.accumulate`."""
    mix, channels = of.of_dst if of.mix is None else of.mix, of.of_dst.size(2)
    _attend(state, run, run.columns, (of.of_source, of.of_dst, mix, channels, of.number, _kind(of)), values, of.kept)


def adjoint(
    run: EdgeRun, weights: Tensor, values: Tensor, kept: Tensor | None, outer: Outer, grad_values: Tensor
) -> Tensor:
    """See `attention.adjoint`."""
    relative, (_, heads, width) = torch.empty_like(weights, memory_format=torch.contiguous_format), values.shape
    start, stop, low, high = run.bounds
    given = _packed(run.indptr, run.dst_rows, weights, values, weights if kept is None else kept)
    rows = *_packed(outer.grad, outer.delta), grad_values.view(-1), relative
    if stop > start and heads:
        grid, tile = (high - low, heads), tile_of(width)
        arguments = *given, start, stop, low, *rows, heads, width
        launch(_given_adjoint, grid, tile, arguments, values, DROPS=kept is not None)
    return relative


def adjoint_closed(
    run: RowRun, of: ClosedScores, values: Tensor, outer: Outer, grad_values: Tensor, into: ScoreGradients
) -> None:
    """See `fused.adjoint`."""
    (start, stop, low, high), (_, heads, width) = run.bounds, values.shape
    channels = of.of_source.size(2)
    if stop == start or heads == 0:
        return
    mix, kept = (of.of_source if t is None else t for t in (of.mix, of.kept))
    given = _packed(run.indptr, run.columns, of.of_dst, of.of_source, mix, values, kept)
    count = high - low if into.mix is None else min(high - low, MOST_SUMS)
    wide = accumulator_dtype(values.dtype)
    sums = None if into.mix is None else into.mix.new_empty((count, *into.mix.shape), dtype=wide)
    to_dst = into.of_dst if wide == values.dtype else torch.zeros_like(into.of_dst, dtype=wide)
    known = _packed(outer.log_sum, outer.grad, outer.delta)
    targets = grad_values.view(-1), into.of_source.view(-1), to_dst.view(-1), to_dst if sums is None else sums
    launch(
        _attend_adjoint,
        (count, heads),
        _tile(width, channels),
        (*given, start, stop, low, high, *known, *targets, heads, channels, width),
        values,
        NUMBER=of.number,
        KIND=_kind(of),
        DROPS=of.kept is not None,
        SAME=into.of_source.data_ptr() == grad_values.data_ptr(),
        BLOCK_S=block_of(channels),
    )
    if to_dst is not into.of_dst:
        into.of_dst.add_(to_dst)
    if into.mix is not None and sums is not None:
        into.mix.add_(sums.sum(0))


def _packed(*tensors: Tensor) -> list[Tensor]:
    """What kernels read, without gaps. What they write must be a view, since writes to a copy would be lost."""
    return [tensor.contiguous() for tensor in tensors]


def _kind(of: ClosedScores) -> str:
    return DOT if isinstance(of.form, DotScore) else SLANTED if of.mix is None else MIXED


def _tile(width: int, channels: int) -> tuple[int, int, int]:
    """As `tile_of`, for kernels that gather rows of `width` values and rows of `channels` that make scores."""
    block_e, _, num_warps = tile_of(max(width, channels))
    return block_e, block_of(width), num_warps


def _attend(
    state: SoftmaxState,
    run: EdgeRun | RowRun,
    columns: Tensor,
    scores: tuple[Tensor, Tensor, Tensor, int, float, str],
    values: Tensor,
    kept: Tensor | None,
) -> None:
    other, own, mix, channels, number, kind = scores
    (start, stop, low, high), (_, heads, width) = run.bounds, values.shape
    if stop == start or heads == 0:
        return
    given = _packed(run.indptr, columns, other, own, mix, values, values if kept is None else kept)
    launch(
        _attend_rows,
        (high - low, heads),
        _tile(width, channels),
        (*given, start, stop, low, *(part.view(-1) for part in state), heads, channels, width),
        values,
        NUMBER=number,
        KIND=kind,
        DROPS=kept is not None,
        BLOCK_S=block_of(channels),
    )


@triton.jit
def _terms(other: tl.tensor, own: tl.tensor, NUMBER: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """The terms that a score sums over its channels, before they are mixed; 0 where both rows are 0."""
    if KIND == "dot":
        terms = other * own
    else:
        terms = tl.where(other + own >= 0, other + own, (other + own) * NUMBER)
    return terms


@triton.jit
def _scores(other: tl.tensor, own: tl.tensor, mix: tl.tensor, NUMBER: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """The scores of a tile of edges, ``[BLOCK_E]``, of rows ``[BLOCK_E, BLOCK_S]`` and one row ``[BLOCK_S]``."""
    terms = _terms(other, own[None, :], NUMBER, KIND)
    if KIND == "mixed":
        terms *= mix[None, :]
    score = tl.sum(terms, 1)
    if KIND == "dot":
        score *= NUMBER
    return score


@triton.jit
def _scores_adjoint(
    change: tl.tensor, other: tl.tensor, own: tl.tensor, mix: tl.tensor, NUMBER: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    """The gradients of `own`, `other` and `mix` for the gradients `change` of the scores, ``[BLOCK_E]``."""
    if KIND == "dot":
        change *= NUMBER
        to_own, to_other = tl.sum(change[:, None] * other, 0), change[:, None] * own[None, :]
        to_mix = tl.zeros_like(to_own)
    else:
        to_mix = tl.sum(change[:, None] * _terms(other, own[None, :], NUMBER, KIND), 0)
        to_other = change[:, None] * mix[None, :]
        to_other = tl.where(other + own[None, :] > 0, to_other, to_other * NUMBER)  # at 0 the slope, as torch has it
        to_own = tl.sum(to_other, 0)
    return to_own, to_other, to_mix


@triton.jit(do_not_specialize=["start", "stop", "low"])
def _attend_rows(
    indptr: tl.tensor,
    columns: tl.tensor,
    other: tl.tensor,
    own: tl.tensor,
    mix: tl.tensor,
    values: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    NUMBER: tl.constexpr,
    KIND: tl.constexpr,
    DROPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    i, h = low + tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.maximum(tl.load(indptr + i).to(tl.int64), start) - start
    last = tl.minimum(tl.load(indptr + i + 1).to(tl.int64), stop) - start
    if first < last:
        s, c, at = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_C), i * heads + h
        of_scores, of_values = s < channels, c < width
        best, weight, row = tl.load(top + at).to(ACC), tl.load(total + at).to(ACC), out + at * width + c
        result = tl.load(row, mask=of_values, other=0).to(ACC)
        if KIND != "given":
            mine = tl.load(own + at * channels + s, mask=of_scores, other=0).to(ACC)
            mixed = mine
            if KIND == "mixed":
                mixed = tl.load(mix + h * channels + s, mask=of_scores, other=0).to(ACC)
        for begin in range(first, last, BLOCK_E):
            e = tl.arange(0, BLOCK_E).to(tl.int64) + begin
            there = e < last
            j = tl.load(columns + e, mask=there, other=0).to(tl.int64) * heads + h
            if KIND == "given":
                score = tl.load(other + e * heads + h, mask=there, other=0).to(ACC)
            else:
                mask = there[:, None] & of_scores[None, :]
                theirs = tl.load(other + j[:, None] * channels + s[None, :], mask=mask, other=0).to(ACC)
                score = _scores(theirs, mine, mixed, NUMBER, KIND)
            score = tl.where(there, score, float("-inf"))
            # Rounded as it will be stored: weights measured from it must fit those of the chunks that read it later.
            new = tl.maximum(best, tl.max(score, 0)).to(top.dtype.element_ty).to(ACC)
            base = tl.where(new == float("-inf"), 0.0, new)  # every score so far is -inf: their weights are 0
            weights, scale = tl.exp(score - base), tl.exp(best - base)
            best, weight = new, weight * scale + tl.sum(weights, 0)
            if DROPS:
                weights *= tl.load(kept + e * heads + h, mask=there, other=0).to(ACC)
            mask = there[:, None] & of_values[None, :]
            theirs = tl.load(values + j[:, None] * width + c[None, :], mask=mask, other=0).to(ACC)
            result = result * scale + tl.sum(weights[:, None] * theirs, 0)
        tl.store(top + at, best)
        tl.store(total + at, weight)
        tl.store(row, result, mask=of_values)


@triton.jit(do_not_specialize=["start", "stop", "low"])
def _given_adjoint(
    indptr: tl.tensor,
    columns: tl.tensor,
    weights: tl.tensor,
    values: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    grad: tl.tensor,
    delta: tl.tensor,
    grad_values: tl.tensor,
    relative: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    DROPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    j, h = low + tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.maximum(tl.load(indptr + j).to(tl.int64), start) - start
    last = tl.minimum(tl.load(indptr + j + 1).to(tl.int64), stop) - start
    if first < last:
        c, row = tl.arange(0, BLOCK_C), (j * heads + h) * width
        inside = c < width
        value = tl.load(values + row + c, mask=inside, other=0).to(ACC)
        result = tl.load(grad_values + row + c, mask=inside, other=0).to(ACC)
        for begin in range(first, last, BLOCK_E):
            e = tl.arange(0, BLOCK_E).to(tl.int64) + begin
            there = e < last
            i = tl.load(columns + e, mask=there, other=0).to(tl.int64) * heads + h
            mask = there[:, None] & inside[None, :]
            outer = tl.load(grad + i[:, None] * width + c[None, :], mask=mask, other=0).to(ACC)
            used = tl.load(weights + e * heads + h, mask=there, other=0).to(ACC)
            dots = tl.sum(outer * value[None, :], 1)
            if DROPS:
                factor = tl.load(kept + e * heads + h, mask=there, other=0).to(ACC)
                used, dots = used * factor, dots * factor
            result += tl.sum(used[:, None] * outer, 0)
            tl.store(relative + e * heads + h, dots - tl.load(delta + i, mask=there, other=0).to(ACC), mask=there)
        tl.store(grad_values + row + c, result, mask=inside)


@triton.jit(do_not_specialize=["start", "stop", "low", "high"])
def _attend_adjoint(
    indptr: tl.tensor,
    columns: tl.tensor,
    other: tl.tensor,
    own: tl.tensor,
    mix: tl.tensor,
    values: tl.tensor,
    kept: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    log_sum: tl.tensor,
    grad: tl.tensor,
    delta: tl.tensor,
    grad_values: tl.tensor,
    grad_own: tl.tensor,
    grad_other: tl.tensor,
    mix_sums: tl.tensor,
    heads: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    NUMBER: tl.constexpr,
    KIND: tl.constexpr,
    DROPS: tl.constexpr,
    SAME: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    h, s, c = tl.program_id(1), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_C)
    of_scores, of_values = s < channels, c < width
    mixed, mix_sum = tl.full([BLOCK_S], 1, ACC), tl.zeros([BLOCK_S], ACC)
    if KIND == "mixed":
        mixed = tl.load(mix + h * channels + s, mask=of_scores, other=0).to(ACC)
    for j in range(low + tl.program_id(0).to(tl.int64), high, tl.num_programs(0)):
        first = tl.maximum(tl.load(indptr + j).to(tl.int64), start) - start
        last = tl.minimum(tl.load(indptr + j + 1).to(tl.int64), stop) - start
        if first < last:
            at = j * heads + h
            to_values, to_own = grad_values + at * width + c, grad_own + at * channels + s
            mine = tl.load(own + at * channels + s, mask=of_scores, other=0).to(ACC)
            value = tl.load(values + at * width + c, mask=of_values, other=0).to(ACC)
            values_sum = tl.load(to_values, mask=of_values, other=0).to(ACC)
            own_sum = tl.zeros([BLOCK_S], ACC)
            for begin in range(first, last, BLOCK_E):
                e = tl.arange(0, BLOCK_E).to(tl.int64) + begin
                there = e < last
                i = tl.load(columns + e, mask=there, other=0).to(tl.int64) * heads + h
                mask = there[:, None] & of_scores[None, :]
                to_other = i[:, None] * channels + s[None, :]
                theirs = tl.load(other + to_other, mask=mask, other=0).to(ACC)
                score = _scores(theirs, mine, mixed, NUMBER, KIND)
                change = tl.exp(score - tl.load(log_sum + i, mask=there, other=0).to(ACC))
                change = tl.where(there, change, 0.0)
                used = change
                inner = there[:, None] & of_values[None, :]
                outer = tl.load(grad + i[:, None] * width + c[None, :], mask=inner, other=0).to(ACC)
                dots = tl.sum(outer * value[None, :], 1)
                if DROPS:
                    factor = tl.load(kept + e * heads + h, mask=there, other=0).to(ACC)
                    used, dots = used * factor, dots * factor
                values_sum += tl.sum(used[:, None] * outer, 0)
                change *= dots - tl.load(delta + i, mask=there, other=0).to(ACC)
                to_own_row, to_other_rows, to_mix = _scores_adjoint(change, theirs, mine, mixed, NUMBER, KIND)
                own_sum, mix_sum = own_sum + to_own_row, mix_sum + to_mix
                tl.atomic_add(grad_other + to_other, to_other_rows, mask=mask, sem="relaxed")
            if SAME:  # one tensor is scored and summed: its gradients meet in one
                values_sum += own_sum
            else:
                own_sum += tl.load(to_own, mask=of_scores, other=0).to(ACC)
                tl.store(to_own, own_sum, mask=of_scores)
            tl.store(to_values, values_sum, mask=of_values)
    if KIND == "mixed":
        tl.store(mix_sums + (tl.program_id(0).to(tl.int64) * heads + h) * channels + s, mix_sum, mask=of_scores)
