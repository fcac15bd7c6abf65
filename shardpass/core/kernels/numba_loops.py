"""Loops over edges compiled by numba, where torch has no fused operator. Imported only where numba is installed.

Compiled at the first call for each combination of types, kept on disk. They release the GIL and know nothing of
threads: whoever calls them cuts the rows. Exponentials are left to torch, which computes sixteen at a time.

[Note: the layout of edge values]
`indptr` counts all edges of a shard; everything else with a row per edge holds those of a chunk only: edge e of the
shard stands in row ``e - start``.

[Note: no views of rows]
``a = rows[j]`` counts references, atomically, in every turn of the loop; ``rows[j, h, x]`` does not.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from shardpass.core.kernels.numba_prefetch import AHEAD, prefetch, prefetch_four

Array = Any


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def add_scaled(
    indptr: Array,
    src_rows: Array,
    rows: Array,
    weights: Array,
    start: int,
    stop: int,
    low: int,
    high: int,
    out: Array,
) -> None:
    """``out[i, h] += weights[h] * rows[j, h]`` over a chunk."""
    heads, width = out.shape[1], out.shape[2]
    for i in range(low, high):
        k, last = max(indptr[i], start) - start, min(indptr[i + 1], stop) - start
        while k + 4 <= last:  # four rows at a time: fewer reads and writes of the sum
            prefetch_four(src_rows, k + AHEAD, rows)
            a, b, c, d = src_rows[k], src_rows[k + 1], src_rows[k + 2], src_rows[k + 3]
            for h in range(heads):
                u, v, w, z = weights[k, h], weights[k + 1, h], weights[k + 2, h], weights[k + 3, h]
                for x in range(width):
                    out[i, h, x] += (u * rows[a, h, x] + v * rows[b, h, x]) + (w * rows[c, h, x] + z * rows[d, h, x])
            k += 4
        while k < last:
            a = src_rows[k]
            for h in range(heads):
                for x in range(width):
                    out[i, h, x] += weights[k, h] * rows[a, h, x]
            k += 1


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def weighted_adjoint(
    indptr: Array,
    dst_rows: Array,
    values: Array,
    used: Array,
    kept: Array,
    start: int,
    stop: int,
    low: int,
    high: int,
    grad: Array,
    delta: Array,
    grad_values: Array,
    relative: Array,
) -> None:
    """The adjoint of a softmax-weighted sum over a chunk of the edges in order of their source.

    ``grad_values[j] += used * grad[i]``, and `relative`, the gradient of a score over its weight, becomes
    ``kept * <grad[i], values[j]> - delta[i]``. `kept` may have no rows: nothing is dropped.
    """
    heads, width = values.shape[1], values.shape[2]
    drops, zero = kept.shape[0] > 0, values.dtype.type(0)
    for j in range(low, high):
        first, last = max(indptr[j], start) - start, min(indptr[j + 1], stop) - start
        k = first
        while k + 4 <= last:  # four rows at a time: fewer reads and writes of the sum
            prefetch_four(dst_rows, k + AHEAD, grad)
            a, b, c, d = dst_rows[k], dst_rows[k + 1], dst_rows[k + 2], dst_rows[k + 3]
            for h in range(heads):
                u, v, w, z = used[k, h], used[k + 1, h], used[k + 2, h], used[k + 3, h]
                p, q, r, s = zero, zero, zero, zero
                for x in range(width):
                    y, ya, yb, yc, yd = values[j, h, x], grad[a, h, x], grad[b, h, x], grad[c, h, x], grad[d, h, x]
                    grad_values[j, h, x] += (u * ya + v * yb) + (w * yc + z * yd)
                    p += ya * y
                    q += yb * y
                    r += yc * y
                    s += yd * y
                relative[k, h], relative[k + 1, h], relative[k + 2, h], relative[k + 3, h] = p, q, r, s
            k += 4
        while k < last:
            a = dst_rows[k]
            for h in range(heads):
                p = zero
                for x in range(width):
                    grad_values[j, h, x] += used[k, h] * grad[a, h, x]
                    p += grad[a, h, x] * values[j, h, x]
                relative[k, h] = p
            k += 1
        for k in range(first, last):
            for h in range(heads):
                dot = relative[k, h] * kept[k, h] if drops else relative[k, h]
                relative[k, h] = dot - delta[dst_rows[k], h]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def edge_dots(indptr: Array, src_rows: Array, rows: Array, grad: Array, low: int, high: int, out: Array) -> None:
    """``out[e, h] = <rows[j, h], grad[i, h]>`` over all edges of rows ``[low, high)`` of destinations."""
    heads, width, zero = rows.shape[1], rows.shape[2], out.dtype.type(0)
    for i in range(low, high):
        for e in range(indptr[i], indptr[i + 1]):
            j = src_rows[e]
            if e + AHEAD < src_rows.size:
                prefetch(rows, src_rows[e + AHEAD])
            for h in range(heads):
                dot = zero
                for x in range(width):
                    dot += rows[j, h, x] * grad[i, h, x]
                out[e, h] = dot


@njit(nogil=True, cache=True, error_model="numpy")
def extremum(
    indptr: Array, columns: Array, rows: Array, is_max: bool, low: int, high: int, best: Array, ties: Array
) -> None:
    """Take ``rows[columns]`` into the largest (or smallest) value so far and how many there are of it; NaN wins."""
    for i in range(low, high):
        for e in range(indptr[i], indptr[i + 1]):
            j = columns[e]
            if e + AHEAD < columns.size:
                prefetch(rows, columns[e + AHEAD])
            for x in range(rows.shape[1]):
                value, old, count = rows[j, x], best[i, x], ties[i, x]
                is_nan = value != value
                wins = is_nan or (value > old if is_max else value < old)
                best[i, x] = value if wins else old
                ties[i, x] = (0 if is_nan else 1) if wins else (count + 1 if value == old else count)


@njit(nogil=True, cache=True, error_model="numpy")
def extremum_adjoint(
    indptr: Array,
    columns: Array,
    rows: Array,
    value: Array,
    share: Array,
    low: int,
    high: int,
    out: Array,
) -> None:
    """``out[j] += (rows[j] == value[i]) * share[i]`` over edges in order of their source."""
    one, zero = rows.dtype.type(1), rows.dtype.type(0)
    for j in range(low, high):
        for e in range(indptr[j], indptr[j + 1]):
            i = columns[e]
            if e + AHEAD < columns.size:
                prefetch(value, columns[e + AHEAD])
                prefetch(share, columns[e + AHEAD])
            for x in range(rows.shape[1]):
                out[j, x] += (one if rows[j, x] == value[i, x] else zero) * share[i, x]
