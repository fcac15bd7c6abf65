"""What the kernels of `triton_attention` read and write: rows, and the edges of a row in tiles.

Tables are read as ``[rows, width]`` in the dtype of sums, where `BLOCK` is a power of two that holds `width` numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def edges_of_row(indptr: tl.tensor, row: tl.tensor, start: tl.tensor, stop: tl.tensor) -> tuple[tl.tensor, ...]:
    """The first edge of a row and the one after its last, within ``[start, stop)`` and counted from `start`."""
    first = tl.maximum(tl.load(indptr + row).to(tl.int64), start) - start
    last = tl.minimum(tl.load(indptr + row + 1).to(tl.int64), stop) - start
    return first, last


@triton.jit
def tile_from(
    begin: tl.tensor, last: tl.tensor, columns: tl.tensor, heads: tl.tensor, h: tl.tensor, BLOCK_E: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Of a tile of edges: the positions of their weights, which of them are there, and the rows that they gather."""
    e = tl.arange(0, BLOCK_E).to(tl.int64) + begin
    there = e < last
    return e * heads + h, there, tl.load(columns + e, mask=there, other=0).to(tl.int64) * heads + h


@triton.jit
def row_at(rows: tl.tensor, at: tl.tensor, width: tl.tensor, ACC: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The row `at`, ``[BLOCK]``, with zeros behind its `width` numbers."""
    c = tl.arange(0, BLOCK)
    return tl.load(rows + at * width + c, mask=c < width, other=0).to(ACC)


@triton.jit
def rows_at(
    rows: tl.tensor, at: tl.tensor, there: tl.tensor, width: tl.tensor, ACC: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The rows `at`, ``[BLOCK_E, BLOCK]``, with zeros for edges that are not there."""
    c = tl.arange(0, BLOCK)
    mask = there[:, None] & (c < width)[None, :]
    return tl.load(rows + at[:, None] * width + c[None, :], mask=mask, other=0).to(ACC)


@triton.jit
def numbers_at(numbers: tl.tensor, at: tl.tensor, there: tl.tensor, ACC: tl.constexpr) -> tl.tensor:
    """One number for each edge of a tile, ``[BLOCK_E]``."""
    return tl.load(numbers + at, mask=there, other=0).to(ACC)


@triton.jit
def store_row(rows: tl.tensor, at: tl.tensor, width: tl.tensor, row: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Write the row `at`."""
    c = tl.arange(0, BLOCK)
    tl.store(rows + at * width + c, row, mask=c < width)
