"""Loops over edges compiled by numba, where torch has no fused operator. Imported only where numba is installed.

Compiled at the first call for each combination of types, kept on disk. They release the GIL and know nothing of
threads: whoever calls them cuts the rows. Exponentials are left to torch, which computes sixteen at a time.

[Note: the layout of edge values]
`indptr` counts all edges of a shard; everything else with a row per edge holds those of a chunk only: edge e of the
shard stands in row ``e - start``.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from shardpass.core.kernels.numba_prefetch import AHEAD, prefetch

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
        into, k, last = out[i], max(indptr[i], start) - start, min(indptr[i + 1], stop) - start
        while k + 4 <= last:  # four rows at a time: fewer reads and writes of the sum
            a, b = rows[src_rows[k]], rows[src_rows[k + 1]]
            c, d = rows[src_rows[k + 2]], rows[src_rows[k + 3]]
            for h in range(heads):
                wa, wb, wc, wd = weights[k, h], weights[k + 1, h], weights[k + 2, h], weights[k + 3, h]
                for x in range(width):
                    into[h, x] += (wa * a[h, x] + wb * b[h, x]) + (wc * c[h, x] + wd * d[h, x])
            k += 4
        while k < last:
            a = rows[src_rows[k]]
            for h in range(heads):
                weight = weights[k, h]
                for x in range(width):
                    into[h, x] += weight * a[h, x]
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
        row, into = values[j], grad_values[j]
        first, last = max(indptr[j], start) - start, min(indptr[j + 1], stop) - start
        k = first
        while k + 4 <= last:  # four rows at a time: fewer reads and writes of the sum
            g0, g1, g2, g3 = grad[dst_rows[k]], grad[dst_rows[k + 1]], grad[dst_rows[k + 2]], grad[dst_rows[k + 3]]
            for h in range(heads):
                w0, w1, w2, w3 = used[k, h], used[k + 1, h], used[k + 2, h], used[k + 3, h]
                d0, d1, d2, d3 = zero, zero, zero, zero
                for x in range(width):
                    r, a0, a1, a2, a3 = row[h, x], g0[h, x], g1[h, x], g2[h, x], g3[h, x]
                    into[h, x] += (w0 * a0 + w1 * a1) + (w2 * a2 + w3 * a3)
                    d0 += a0 * r
                    d1 += a1 * r
                    d2 += a2 * r
                    d3 += a3 * r
                relative[k, h] = d0
                relative[k + 1, h] = d1
                relative[k + 2, h] = d2
                relative[k + 3, h] = d3
            k += 4
        while k < last:
            g = grad[dst_rows[k]]
            for h in range(heads):
                w, dot = used[k, h], zero
                for x in range(width):
                    into[h, x] += w * g[h, x]
                    dot += g[h, x] * row[h, x]
                relative[k, h] = dot
            k += 1
        for k in range(first, last):
            for h in range(heads):
                dot = relative[k, h] * kept[k, h] if drops else relative[k, h]
                relative[k, h] = dot - delta[dst_rows[k], h]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def dot_scores(
    src_rows: Array, dst_rows: Array, keys: Array, queries: Array, factor: float, first: int, last: int, out: Array
) -> None:
    """``out[e, h] = factor * <queries[i, h], keys[j, h]>`` for edges ``[first, last)`` of the chunk."""
    times, zero = out.dtype.type(factor), out.dtype.type(0)
    for e in range(first, last):
        key, query = keys[src_rows[e]], queries[dst_rows[e]]
        for h in range(key.shape[0]):
            dot = zero
            for x in range(key.shape[1]):
                dot += key[h, x] * query[h, x]
            out[e, h] = times * dot


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
