"""Sums of source rows over a shard's edges, and dot products of edges, for GPUs: kernels that Triton compiles.

A program has one row of `indptr` and one block of channels (sums), or one row and one head (dot products). It takes the
row's edges `BLOCK_E` at a time, so that many gathers are under way at once. No other program writes its result, so
there are no atomic additions and every run gives the same bits. Half precision is summed in float32.

[Note: 64-bit offsets]
Rows and edges become int64 before they are multiplied with a width: a table may hold more than 2**31 numbers. What
CUDA or Triton cannot launch or hold at once is refused by `launch`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardpass.core.kernels.gpu import DTYPES, SWITCH
from shardpass.core.ranks import torch_private
from shardpass.core.sharding import Shard, Transposes
from shardpass.errors import RefusedError

TILE = 1024  # numbers that a program of one warp gathers at a time
MOST_EDGES, MOST_CHANNELS = 32, 128
MOST_ROWS, MOST_COLUMNS, MOST_NUMBERS = 2**31 - 1, 2**16 - 1, 2**20  # the grid of CUDA, and a tile of Triton


def gather_sum(out: Tensor, shard: Shard, rows: Tensor, weight: Tensor | None, fresh: bool = False) -> None:
    """See `kernels.gather_sum`. Weights may have heads."""
    _accumulate(out, shard.indptr, shard.src_rows, None, rows, weight, fresh)


def gather_sum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, grad: Tensor, weight: Tensor | None, fresh: bool = False
) -> None:
    """See `kernels.gather_sum_transposed`. Weights may have heads."""
    indptr, columns, order = transposes.of(shard, with_order=weight is not None)
    _accumulate(out, indptr, columns, None if weight is None else order, grad, weight, fresh)


def edge_dot(shard: Shard, rows: Tensor, grad: Tensor, heads: int) -> Tensor:
    """``<rows[src, h], grad[dst, h]>`` of each edge and head, ``[num_edges, heads]``."""
    result, width = rows.new_empty((shard.num_edges, heads)), rows.shape[1:].numel() // heads
    if shard.num_edges == 0 or width == 0:
        return result.zero_()
    given = *packed(shard.indptr, shard.src_rows, rows, grad), heads, width
    launch(_edge_dots, (shard.num_dst, heads), tile_of(min(width, MOST_CHANNELS)), (result, *given), rows)
    return result


def tile_of(width: int) -> tuple[int, int, int]:
    """Edges and channels of a tile, both powers of two, and the number of warps that hold it."""
    block_c = block_of(width)
    block_e = max(4, min(MOST_EDGES, TILE // block_c))
    return block_e, block_c, max(1, min(16, block_e * block_c // TILE))


def packed(first: Tensor, *others: Tensor | None) -> list[Tensor]:
    """What kernels read, without gaps; `first` for what they will not read. What they write must be a view instead."""
    return [(first if tensor is None else tensor).contiguous() for tensor in (first, *others)]


def block_of(width: int) -> int:
    """The smallest power of two that holds `width` channels; 1 for no channel, and masks then leave that one out."""
    return int(triton.next_power_of_2(max(1, width)))


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tile: tuple[int, int, int],
    arguments: tuple[Any, ...],
    *summed: Tensor,
    **constants: Any,
) -> None:
    """Run a kernel of Triton on the device of its tensors, under its name for a profiler.

    Args:
        tile: as `tile_of` gives it.
        summed: the tensors whose dtypes decide in which type sums are made: float64 if any is, else float32.
        constants: what the kernel is compiled for.

    Raises:
        RefusedError: there are more rows, heads or channels than a launch takes.
    """
    held = tile[0] * max(tile[1], constants.get("BLOCK_S", 1))
    if grid[0] > MOST_ROWS or grid[1] > MOST_COLUMNS or held > MOST_NUMBERS:
        raise RefusedError(
            f"{grid[0]} rows of {grid[1]} heads or blocks of channels, in tiles of {held} numbers: a kernel for GPUs "
            f"takes at most {MOST_ROWS} rows, {MOST_COLUMNS} heads or blocks and {MOST_NUMBERS} numbers. Use more "
            f"ranks or narrower rows, or set {SWITCH}=0 in the environment for torch's own operators"
        )
    wide = tl.float64 if any(tensor.dtype == torch.float64 for tensor in summed) else tl.float32
    block_e, block_c, num_warps = tile
    with torch_private.span(f"shardpass::{kernel.__name__.lstrip('_')}"), torch.cuda.device_of(summed[0]):
        kernel[grid](*arguments, ACC=wide, BLOCK_E=block_e, BLOCK_C=block_c, num_warps=num_warps, **constants)


def launch_by_channels(
    kernel: Any, num_rows: int, num_channels: int, arguments: tuple[Any, ...], *summed: Tensor, **constants: Any
) -> None:
    """`launch` with a program for each row and each block of channels."""
    tile = tile_of(min(num_channels, MOST_CHANNELS))
    launch(kernel, (num_rows, triton.cdiv(num_channels, tile[1])), tile, arguments, *summed, **constants)


def _accumulate(
    out: Tensor, indptr: Tensor, columns: Tensor, order: Tensor | None, rows: Tensor, weight: Tensor | None, fresh: bool
) -> None:
    target, num_channels = out.view(-1), out.shape[1:].numel()  # a view that cannot be made is an error, not a copy
    if target.numel() == 0:
        return
    heads = 1 if weight is None or weight.dim() == 1 else weight.size(1)
    scales = rows if weight is None else weight if weight.dtype in DTYPES else weight.to(rows.dtype)
    given = packed(indptr, columns, order, rows, scales)
    arguments = target, *given, num_channels, heads, num_channels // heads
    constants = {"FRESH": fresh, "WEIGHTED": weight is not None, "ORDERED": order is not None}
    launch_by_channels(_sum_rows, out.size(0), num_channels, arguments, rows, out, **constants)


@triton.jit
def _sum_rows(
    out: tl.tensor,
    indptr: tl.tensor,
    columns: tl.tensor,
    order: tl.tensor,
    rows: tl.tensor,
    weight: tl.tensor,
    num_channels: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    FRESH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ORDERED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, last = tl.load(indptr + i).to(tl.int64), tl.load(indptr + i + 1).to(tl.int64)
    inside = c < num_channels
    total = tl.zeros([BLOCK_C], ACC)
    for start in range(first, last, BLOCK_E):
        e = tl.arange(0, BLOCK_E).to(tl.int64) + start
        there = e < last
        j = tl.load(columns + e, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & inside[None, :]
        tile = tl.load(rows + j[:, None] * num_channels + c[None, :], mask=mask, other=0).to(ACC)
        if WEIGHTED:
            if ORDERED:
                e = tl.load(order + e, mask=there, other=0).to(tl.int64)
            tile *= tl.load(weight + e[:, None] * heads + (c // width)[None, :], mask=mask, other=0).to(ACC)
        total += tl.sum(tile, 0)
    to = out + i * num_channels + c
    if FRESH:
        tl.store(to, total, mask=inside)
    else:
        changes = inside & (first < last)
        tl.store(to, tl.load(to, mask=changes, other=0).to(ACC) + total, mask=changes)


@triton.jit
def _edge_dots(
    out: tl.tensor,
    indptr: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    grad: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = tl.load(indptr + i).to(tl.int64), tl.load(indptr + i + 1).to(tl.int64)
    for start in range(first, last, BLOCK_E):
        e = tl.arange(0, BLOCK_E).to(tl.int64) + start
        there = e < last
        j = tl.load(columns + e, mask=there, other=0).to(tl.int64)
        dots = tl.zeros([BLOCK_E], ACC)
        for low in range(0, width, BLOCK_C):
            c = low + tl.arange(0, BLOCK_C)
            inside = c < width
            mask = there[:, None] & inside[None, :]
            left = tl.load(rows + (j[:, None] * heads + h) * width + c[None, :], mask=mask, other=0).to(ACC)
            right = tl.load(grad + (i * heads + h) * width + c, mask=inside, other=0).to(ACC)
            dots += tl.sum(left * right[None, :], 1)
        tl.store(out + e * heads + h, dots, mask=there)
