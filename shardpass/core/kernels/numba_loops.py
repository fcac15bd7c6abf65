"""Loops over edges compiled by numba, where torch has no fused operator. Imported only where numba is installed.

Compiled at the first call for each combination of types, kept on disk. They release the GIL and know nothing of
threads: whoever calls them cuts the rows. Exponentials are left to torch, which computes sixteen at a time.

[Note: the layout of edge values]
`indptr` counts all edges of a shard; everything else with a row per edge holds those of a chunk only: edge e of the
shard stands in row ``e - start``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = Any


@njit(nogil=True, cache=True, error_model="numpy")
def shift_to_maximum(
    indptr: Array, scores: Array, start: int, stop: int, low: int, high: int, top: Array, total: Array, out: Array
) -> None:
    """Take the maxima of a chunk's scores into `top`, rescale `total` and `out`, and measure the scores from `top`."""
    heads, width = out.shape[1], out.shape[2]
    for i in range(low, high):
        first, last = max(indptr[i], start), min(indptr[i + 1], stop)
        for h in range(heads if first < last else 0):
            old = top[i, h]
            new = old
            for e in range(first - start, last - start):
                if scores[e, h] > new:
                    new = scores[e, h]
            if new == -np.inf:
                continue  # every score so far is -inf: their weights are 0
            for e in range(first - start, last - start):
                scores[e, h] -= new
            if new > old:
                scale = np.exp(old - new)
                top[i, h] = new
                total[i, h] *= scale
                for x in range(width):
                    out[i, h, x] *= scale


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


@njit(nogil=True, cache=True, error_model="numpy")
def add_weights(indptr: Array, weights: Array, start: int, stop: int, low: int, high: int, total: Array) -> None:
    """``total[i] += weight`` over a chunk."""
    for i in range(low, high):
        for k in range(max(indptr[i], start) - start, min(indptr[i + 1], stop) - start):
            for h in range(total.shape[1]):
                total[i, h] += weights[k, h]


@njit(nogil=True, cache=True, error_model="numpy")
def shift_by_row(scores: Array, rows: Array, shift: Array, first: int, last: int) -> None:
    """``scores[e] -= shift[rows[e]]`` for edges ``[first, last)`` of the chunk."""
    for e in range(first, last):
        for h in range(scores.shape[1]):
            scores[e, h] -= shift[rows[e], h]


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


@njit(nogil=True, cache=True, error_model="numpy")
def additive_scores(
    src_rows: Array, dst_rows: Array, of_source: Array, of_dst: Array, slope: float, first: int, last: int, out: Array
) -> None:
    """``out[e] = leaky_relu(of_source[j] + of_dst[i])`` for edges ``[first, last)`` of the chunk."""
    factor = out.dtype.type(slope)
    for e in range(first, last):
        left, right, into = of_source[src_rows[e]], of_dst[dst_rows[e]], out[e]
        for h in range(into.shape[0]):
            value = left[h] + right[h]
            into[h] = max(value, value * factor) if factor <= 1 else (value if value >= 0 else value * factor)


@njit(nogil=True, cache=True, error_model="numpy")
def additive_adjoint(
    src_rows: Array,
    dst_rows: Array,
    of_source: Array,
    of_dst: Array,
    slope: float,
    weights: Array,
    relative: Array,
    grad_source: Array,
    grad_dst: Array,
) -> None:
    """The adjoint of `additive_scores` for ``weights * relative``, in place. Not to be cut: edges of a row meet."""
    factor = weights.dtype.type(slope)
    for e in range(weights.shape[0]):
        j, i = src_rows[e], dst_rows[e]
        for h in range(weights.shape[1]):
            value = weights[e, h] * relative[e, h]
            if not of_source[j, h] + of_dst[i, h] > 0:  # at 0 too, as torch has it
                value *= factor
            grad_source[j, h] += value
            grad_dst[i, h] += value


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


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def dot_adjoint(
    src_rows: Array,
    dst_rows: Array,
    keys: Array,
    queries: Array,
    factor: float,
    weights: Array,
    relative: Array,
    grad_keys: Array,
    grad_queries: Array,
) -> None:
    """The adjoint of `dot_scores` for ``weights * relative``, in place. Not to be cut: edges of a row meet."""
    times = weights.dtype.type(factor)
    for e in range(weights.shape[0]):
        j, i = src_rows[e], dst_rows[e]
        key, query, into_key, into_query = keys[j], queries[i], grad_keys[j], grad_queries[i]
        for h in range(key.shape[0]):
            grad = times * weights[e, h] * relative[e, h]
            for x in range(key.shape[1]):
                into_key[h, x] += grad * query[h, x]
                into_query[h, x] += grad * key[h, x]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def mixed_scores(
    src_rows: Array,
    dst_rows: Array,
    of_source: Array,
    of_dst: Array,
    mix: Array,
    slope: float,
    first: int,
    last: int,
    out: Array,
) -> None:
    """``out[e, h] = <mix[h], leaky_relu(of_source[j, h] + of_dst[i, h])>`` for edges ``[first, last)``."""
    factor, zero = out.dtype.type(slope), out.dtype.type(0)
    for e in range(first, last):
        left, right = of_source[src_rows[e]], of_dst[dst_rows[e]]
        for h in range(left.shape[0]):
            dot = zero
            for x in range(left.shape[1]):
                value = left[h, x] + right[h, x]
                dot += mix[h, x] * (value if value >= 0 else value * factor)
            out[e, h] = dot


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def mixed_adjoint(
    src_rows: Array,
    dst_rows: Array,
    of_source: Array,
    of_dst: Array,
    mix: Array,
    slope: float,
    weights: Array,
    relative: Array,
    grad_source: Array,
    grad_dst: Array,
    grad_mix: Array,
) -> None:
    """The adjoint of `mixed_scores` for ``weights * relative``, in place. Not to be cut: edges of a row meet."""
    factor = weights.dtype.type(slope)
    for e in range(weights.shape[0]):
        j, i = src_rows[e], dst_rows[e]
        left, right, into_left, into_right = of_source[j], of_dst[i], grad_source[j], grad_dst[i]
        for h in range(left.shape[0]):
            grad = weights[e, h] * relative[e, h]
            for x in range(left.shape[1]):
                value = left[h, x] + right[h, x]
                slanted = value if value >= 0 else value * factor
                grad_mix[h, x] += grad * slanted
                part = grad * mix[h, x]
                part = part if value > 0 else part * factor  # at 0 the slope, as torch has it
                into_left[h, x] += part
                into_right[h, x] += part
