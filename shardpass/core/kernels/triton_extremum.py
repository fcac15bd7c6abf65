"""Max and min of source rows with their number of ties, and the adjoint, for GPUs: kernels that Triton compiles.

Programs are as in `triton_sums`. A min is the max of the negated numbers. NaN wins, and then nothing ties.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardpass.core.kernels.triton_sums import launch_by_channels, packed
from shardpass.core.sharding import Shard, Transposes
from shardpass.core.tracing import State


def gather_extremum(op: str, state: State, shard: Shard, rows: Tensor) -> None:
    """See `kernels.gather_extremum`."""
    best, ties = (part.view(-1) for part in state)  # a view that cannot be made is an error, not a copy
    given = packed(shard.indptr, shard.src_rows, rows)
    if best.numel() == 0:
        return
    num_channels, sign = rows.shape[1:].numel(), 1 if op == "max" else -1
    launch_by_channels(_extremum, shard.num_dst, num_channels, (best, ties, *given, num_channels), rows, SIGN=sign)


def gather_extremum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, rows: Tensor, value: Tensor, share: Tensor
) -> None:
    """See `kernels.gather_extremum_transposed`."""
    target, num_channels = out.view(-1), rows.shape[1:].numel()
    given = packed(*transposes.of(shard)[:2], rows, value, share)
    if target.numel() == 0:
        return
    arguments = target, *given, num_channels
    launch_by_channels(_extremum_adjoint, rows.size(0), num_channels, arguments, rows, out)


@triton.jit
def _extremum(
    best: tl.tensor,
    ties: tl.tensor,
    indptr: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    num_channels: tl.tensor,
    SIGN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, last = tl.load(indptr + i).to(tl.int64), tl.load(indptr + i + 1).to(tl.int64)
    if first < last:
        inside, at = c < num_channels, i * num_channels + c
        top = SIGN * tl.load(best + at, mask=inside, other=0).to(ACC)
        count = tl.load(ties + at, mask=inside, other=0)
        for start in range(first, last, BLOCK_E):
            e = tl.arange(0, BLOCK_E).to(tl.int64) + start
            there = e < last
            j = tl.load(columns + e, mask=there, other=0).to(tl.int64)
            mask = there[:, None] & inside[None, :]
            tile = SIGN * tl.load(rows + j[:, None] * num_channels + c[None, :], mask=mask, other=0).to(ACC)
            known = mask & (tile == tile)  # not NaN
            part = tl.max(tl.where(known, tile, float("-inf")), 0)
            equal = tl.sum((known & (tile == part[None, :])).to(tl.int32), 0)
            lost = (top != top) | (tl.sum((tile != tile).to(tl.int32), 0) > 0)
            new = tl.where(lost, float("nan"), tl.maximum(top, part))
            count = tl.where(top == new, count, 0) + tl.where(part == new, equal, 0)
            top = new
        tl.store(best + at, SIGN * top, mask=inside)
        tl.store(ties + at, count, mask=inside)


@triton.jit
def _extremum_adjoint(
    out: tl.tensor,
    indptr: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    value: tl.tensor,
    share: tl.tensor,
    num_channels: tl.tensor,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    j = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, last = tl.load(indptr + j).to(tl.int64), tl.load(indptr + j + 1).to(tl.int64)
    if first < last:
        inside, at = c < num_channels, j * num_channels + c
        own = tl.load(rows + at, mask=inside, other=0).to(ACC)
        total = tl.load(out + at, mask=inside, other=0).to(ACC)
        for start in range(first, last, BLOCK_E):
            e = tl.arange(0, BLOCK_E).to(tl.int64) + start
            there = e < last
            i = tl.load(columns + e, mask=there, other=0).to(tl.int64)
            mask, to = there[:, None] & inside[None, :], i[:, None] * num_channels + c[None, :]
            won = own[None, :] == tl.load(value + to, mask=mask, other=0).to(ACC)
            total += tl.sum(won.to(ACC) * tl.load(share + to, mask=mask, other=0).to(ACC), 0)
        tl.store(out + at, total, mask=inside)
