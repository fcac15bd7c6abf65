"""Attention over one order of a shard's edges in one loop: scores, softmax and weighted sum, and all their gradients.

Compiled by numba at the first call for each combination of types, kept on disk. A row's edges are taken a block of
`BLOCK` at a time, so that scores and weights stay in the first-level cache. The formulas of scores are symmetric in
source and destination: forward walks rows of destinations and gathers sources, backward walks rows of sources and
gathers destinations, with the same functions. `own` is of the rows walked, `other` of the rows gathered.

[Note: the layout of edge values]
`indptr` counts all edges of a shard; everything else with a row per edge holds those of a chunk only: edge e of the
shard stands in row ``e - start``. Helpers get the row, and the number of edges from there on.

[Note: constant numbers of heads]
Helpers are called with `heads` or `width` as a constant where it is a common one: LLVM then unrolls the inner loop,
which halves their time. The code is the same for every other number.

[Note: no views of rows]
``a = rows[j]`` counts references, atomically, in every turn of the loop; ``rows[j, h, x]`` does not.

Source: the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867) and the identities of FlashAttention
(Dao et al. 2022, arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from shardpass.core.kernels.numba_exp import exponentials
from shardpass.core.kernels.numba_prefetch import AHEAD, prefetch, prefetch_four

Array = Any
BLOCK = 32  # edges of a row at a time; a multiple of the lanes of a vector
GIVEN, ADDITIVE, DOT, MIXED = 0, 1, 2, 3  # where scores come from
_SUMS = {"contract", "reassoc", "nsz"}  # not "nnan" nor "ninf": NaN must spread, and -inf is a score


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _additive(
    columns: Array, e: int, n: int, other: Array, own: Array, i: int, slope: float, heads: int, to: Array
) -> None:
    for k in range(n):
        j = columns[e + k]
        for h in range(heads):
            value = other[j, h, 0] + own[i, h, 0]
            to[h, k] = value if value >= 0 else value * slope


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _scores(
    kind: int, columns: Array, e: int, n: int, other: Array, own: Array, i: int, mix: Array, number: float, to: Array
) -> None:
    """The scores of edges ``[e, e + n)`` of row i, ``to[h, k]``."""
    heads, width = own.shape[1], own.shape[2]
    if kind == ADDITIVE:
        if heads == 4:
            _additive(columns, e, n, other, own, i, number, 4, to)
        else:
            _additive(columns, e, n, other, own, i, number, heads, to)
    for k in range(n if kind >= DOT else 0):
        j = columns[e + k]
        if e + k + AHEAD < columns.size:
            prefetch(other, columns[e + k + AHEAD])
        for h in range(heads):
            dot = to.dtype.type(0)
            if kind == DOT:
                for x in range(width):
                    dot += other[j, h, x] * own[i, h, x]
                dot *= number
            else:
                for x in range(width):
                    value = other[j, h, x] + own[i, h, x]
                    dot += mix[h, x] * (value if value >= 0 else value * number)
            to[h, k] = dot


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _rescale(numbers: Array, n: int, i: int, top: Array, total: Array, out: Array) -> None:
    """Take the maxima of a block's scores into `top`, rescale `total` and `out`, and measure the scores from `top`."""
    for h in range(numbers.shape[0]):
        new = top[i, h]
        for k in range(n):
            new = numbers[h, k] if numbers[h, k] > new else new
        if new == -np.inf:
            continue  # every score so far is -inf: their weights are 0
        for k in range(n):
            numbers[h, k] -= new
        if new > top[i, h]:
            scale = np.exp(top[i, h] - new)
            top[i, h] = new
            total[i, h] *= scale
            for x in range(out.shape[2]):
                out[i, h, x] *= scale


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _add_rows(columns: Array, e: int, n: int, rows: Array, weights: Array, i: int, out: Array, width: int) -> None:
    """``out[i, h] += weights[h, k] * rows[columns[e + k], h]`` over a block."""
    k = 0
    while k + 4 <= n:  # four rows at a time: fewer reads and writes of the sum
        prefetch_four(columns, e + k + AHEAD, rows)
        a, b, c, d = columns[e + k], columns[e + k + 1], columns[e + k + 2], columns[e + k + 3]
        for h in range(out.shape[1]):
            u, v, w, z = weights[h, k], weights[h, k + 1], weights[h, k + 2], weights[h, k + 3]
            for x in range(width):
                out[i, h, x] += (u * rows[a, h, x] + v * rows[b, h, x]) + (w * rows[c, h, x] + z * rows[d, h, x])
        k += 4
    while k < n:
        a = columns[e + k]
        for h in range(out.shape[1]):
            for x in range(width):
                out[i, h, x] += weights[h, k] * rows[a, h, x]
        k += 1


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def attend(
    kind: int,
    indptr: Array,
    columns: Array,
    other: Array,
    own: Array,
    mix: Array,
    number: float,
    values: Array,
    kept: Array,
    start: int,
    stop: int,
    low: int,
    high: int,
    top: Array,
    total: Array,
    out: Array,
) -> None:
    """Take edges ``[start, stop)`` of rows ``[low, high)`` of destinations into a softmax's state.

    Args:
        other: of sources, ``[block rows, heads, channels]``; of `GIVEN` scores, ``[stop - start, heads, 1]``.
        own: of destinations, in that shape.
        kept: what dropout multiplies the weights with, ``[stop - start, heads]``; no rows: nothing is dropped.
    """
    heads, width = out.shape[1], out.shape[2]
    factor, numbers = out.dtype.type(number), np.zeros((heads, BLOCK), out.dtype)
    for i in range(low, high):
        e, last = max(indptr[i], start) - start, min(indptr[i + 1], stop) - start
        while e < last:
            n = min(BLOCK, last - e)
            if kind == GIVEN:
                for k in range(n):
                    for h in range(heads):
                        numbers[h, k] = other[e + k, h, 0]
            else:
                _scores(kind, columns, e, n, other, own, i, mix, factor, numbers)
            _rescale(numbers, n, i, top, total, out)
            exponentials(numbers, n)
            for h in range(heads):
                part = out.dtype.type(0)
                for k in range(n):
                    part += numbers[h, k]
                total[i, h] += part
            if kept.shape[0] > 0:
                for k in range(n):
                    for h in range(heads):
                        numbers[h, k] *= kept[e + k, h]
            if width == 32:
                _add_rows(columns, e, n, values, numbers, i, out, 32)
            else:
                _add_rows(columns, e, n, values, numbers, i, out, width)
            e += n


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _outer_rows(
    columns: Array,
    e: int,
    n: int,
    rows: Array,
    weights: Array,
    own: Array,
    j: int,
    out: Array,
    dots: Array,
    width: int,
) -> None:
    """``out[j, h] += weights[h, k] * rows[i, h]`` and ``dots[h, k] = <rows[i, h], own[j, h]>`` over a block."""
    k, zero = 0, out.dtype.type(0)
    while k + 4 <= n:  # four rows at a time: fewer reads and writes of the sum
        prefetch_four(columns, e + k + AHEAD, rows)
        a, b, c, d = columns[e + k], columns[e + k + 1], columns[e + k + 2], columns[e + k + 3]
        for h in range(out.shape[1]):
            u, v, w, z = weights[h, k], weights[h, k + 1], weights[h, k + 2], weights[h, k + 3]
            p, q, r, s = zero, zero, zero, zero
            for x in range(width):
                y, ya, yb, yc, yd = own[j, h, x], rows[a, h, x], rows[b, h, x], rows[c, h, x], rows[d, h, x]
                out[j, h, x] += (u * ya + v * yb) + (w * yc + z * yd)
                p += ya * y
                q += yb * y
                r += yc * y
                s += yd * y
            dots[h, k], dots[h, k + 1], dots[h, k + 2], dots[h, k + 3] = p, q, r, s
        k += 4
    while k < n:
        a = columns[e + k]
        for h in range(out.shape[1]):
            p = zero
            for x in range(width):
                out[j, h, x] += weights[h, k] * rows[a, h, x]
                p += rows[a, h, x] * own[j, h, x]
            dots[h, k] = p
        k += 1


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _scatter(columns: Array, e: int, n: int, grads: Array, j: int, to_other: Array, to_own: Array, heads: int) -> None:
    """Add the gradients of sums of two node values to both."""
    for k in range(n):
        i = columns[e + k]
        for h in range(heads):
            to_other[i, h, 0] += grads[h, k]
    for h in range(heads):
        part = grads.dtype.type(0)
        for k in range(n):
            part += grads[h, k]
        to_own[j, h, 0] += part


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _scores_adjoint(
    kind: int,
    columns: Array,
    e: int,
    n: int,
    other: Array,
    own: Array,
    j: int,
    mix: Array,
    number: float,
    grads: Array,
    grad_other: Array,
    grad_own: Array,
    grad_mix: Array,
) -> None:
    """The adjoint of `_scores` for the gradients ``grads[h, k]``, in place."""
    heads, width = own.shape[1], own.shape[2]
    if kind == ADDITIVE:
        if heads == 4:
            _scatter(columns, e, n, grads, j, grad_other, grad_own, 4)
        else:
            _scatter(columns, e, n, grads, j, grad_other, grad_own, heads)
    for k in range(n if kind >= DOT else 0):
        i = columns[e + k]
        for h in range(heads):
            if kind == DOT:
                grad = grads[h, k] * number
                for x in range(width):
                    grad_own[j, h, x] += grad * other[i, h, x]
                    grad_other[i, h, x] += grad * own[j, h, x]
            else:
                grad = grads[h, k]
                for x in range(width):
                    value = other[i, h, x] + own[j, h, x]
                    grad_mix[h, x] += grad * (value if value >= 0 else value * number)
                    part = grad * mix[h, x]
                    part = part if value > 0 else part * number  # at 0 the slope, as torch has it
                    grad_own[j, h, x] += part
                    grad_other[i, h, x] += part


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _additive_weights(
    columns: Array,
    e: int,
    n: int,
    other: Array,
    own: Array,
    j: int,
    slope: float,
    log_sum: Array,
    to: Array,
    slopes: Array,
    heads: int,
) -> None:
    one = to.dtype.type(1)
    for k in range(n):
        i = columns[e + k]
        for h in range(heads):
            value = other[i, h, 0] + own[j, h, 0]
            factor = one if value > 0 else slope  # at 0 the slope, as torch has it
            to[h, k] = value * factor - log_sum[i, h]
            slopes[h, k] = factor


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _subtract(columns: Array, e: int, n: int, log_sum: Array, to: Array) -> None:
    for k in range(n):
        i = columns[e + k]
        for h in range(log_sum.shape[1]):
            to[h, k] -= log_sum[i, h]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def _relative(
    columns: Array, e: int, n: int, delta: Array, weights: Array, slopes: Array, dots: Array, heads: int
) -> None:
    for k in range(n):
        i = columns[e + k]
        for h in range(heads):
            dots[h, k] = weights[h, k] * slopes[h, k] * (dots[h, k] - delta[i, h])


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def attend_adjoint(
    kind: int,
    indptr: Array,
    columns: Array,
    other: Array,
    own: Array,
    mix: Array,
    number: float,
    log_sum: Array,
    values: Array,
    kept: Array,
    start: int,
    stop: int,
    low: int,
    high: int,
    grad: Array,
    delta: Array,
    grad_values: Array,
    grad_other: Array,
    grad_own: Array,
    grad_mix: Array,
) -> None:
    """The adjoint of `attend` over edges ``[start, stop)`` of rows ``[low, high)`` of sources, added in place.

    Args:
        other: of destinations; gradients of several threads' rows meet in `grad_other` and `grad_mix`.
        own: of sources.
        log_sum, grad, delta: of destinations; see `kernels.attention.adjoint`.
    """
    heads, width = values.shape[1], values.shape[2]
    kinds, drops = values.dtype, kept.shape[0] > 0
    factor = kinds.type(number)
    weights, used = np.zeros((heads, BLOCK), kinds), np.zeros((heads, BLOCK), kinds)
    dots, slopes = np.zeros((heads, BLOCK), kinds), np.ones((heads, BLOCK), kinds)
    for j in range(low, high):
        e, last = max(indptr[j], start) - start, min(indptr[j + 1], stop) - start
        while e < last:
            n = min(BLOCK, last - e)
            if kind == ADDITIVE and heads == 4:
                _additive_weights(columns, e, n, other, own, j, factor, log_sum, weights, slopes, 4)
            elif kind == ADDITIVE:
                _additive_weights(columns, e, n, other, own, j, factor, log_sum, weights, slopes, heads)
            else:
                _scores(kind, columns, e, n, other, own, j, mix, factor, weights)
                _subtract(columns, e, n, log_sum, weights)
            exponentials(weights, n)
            for k in range(n if drops else 0):
                for h in range(heads):
                    used[h, k] = weights[h, k] * kept[e + k, h]
            if width == 32:
                _outer_rows(columns, e, n, grad, used if drops else weights, values, j, grad_values, dots, 32)
            else:
                _outer_rows(columns, e, n, grad, used if drops else weights, values, j, grad_values, dots, width)
            for k in range(n if drops else 0):
                for h in range(heads):
                    dots[h, k] *= kept[e + k, h]
            if heads == 4:
                _relative(columns, e, n, delta, weights, slopes, dots, 4)
            else:
                _relative(columns, e, n, delta, weights, slopes, dots, heads)
            _scores_adjoint(kind, columns, e, n, other, own, j, mix, factor, dots, grad_other, grad_own, grad_mix)
            e += n
