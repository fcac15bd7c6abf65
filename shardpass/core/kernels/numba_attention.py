"""Attention over one order of a shard's edges in one loop: scores, softmax and weighted sum, and all their gradients.

numba compiles the loops at the first call for each combination of types and keeps them on disk. A row's edges are taken
`BLOCK` at a time, so that their scores and weights stay in the first-level cache. The formulas of scores are symmetric
in source and destination, so one set of functions serves both directions: forward loops over rows of destinations and
gathers sources, backward loops over rows of sources and gathers destinations. `own` is of the rows of the loop, `other`
of the rows gathered. For the layout of edge values and for rows without views, see the notes in `numba_loops`; helpers
get the first row of their edges, `e`, and the number of edges from there on, `n`.

[Note: constant numbers of heads]
Helpers are called with `heads` or `width` as a constant where it is a common one: LLVM then unrolls the inner loop,
which halves their time. The code is the same for every other number.

Source: the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867) and the identities of FlashAttention
(Dao et al. 2022, arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shardpass.core.kernels.numba_exp import exponentials
from shardpass.core.kernels.numba_loops import SUMS, Array, Edges, add_rows, add_rows_and_dots
from shardpass.core.kernels.numba_prefetch import AHEAD, prefetch

GIVEN, ADDITIVE, DOT, MIXED = 0, 1, 2, 3  # where scores come from
KINDS = {"additive": ADDITIVE, "dot": DOT, "mixed": MIXED}  # by `Score.kind`
BLOCK = 32  # edges of a row that are taken at a time; a multiple of the lanes of a vector
Scored = tuple[int, Array, Array, Array, float]  # kind, other, own, mix, factor or slope


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def _additive(
    columns: Array, e: int, n: int, other: Array, own: Array, i: int, slope: float, heads: int, to: Array
) -> None:
    for k in range(n):
        j = columns[e + k]
        for h in range(heads):
            value = other[j, h, 0] + own[i, h, 0]
            to[h, k] = value if value >= 0 else value * slope


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def attend(
    edges: Edges, scored: Scored, values: Array, kept: Array, low: int, high: int, state: tuple[Array, Array, Array]
) -> None:
    """Take the edges of rows ``[low, high)`` of destinations into the state of a softmax.

    Args:
        scored: `other` is of sources, ``[block rows, heads, channels]``, and `own` of destinations, in that shape. If
            scores are `GIVEN`, `other` holds them, ``[edges, heads, 1]``, and `own` is not read.
        kept: the factors by which dropout multiplies the weights, ``[edges, heads]``. Without rows, nothing is dropped.
        state: top, total and out, as in `SoftmaxState`.
    """
    (indptr, columns, start, stop), (kind, other, own, mix, factor) = edges, scored
    top, total, out = state
    heads, width = out.shape[1], out.shape[2]
    numbers = np.zeros((heads, BLOCK), out.dtype)
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
            _times_kept(numbers, kept, e, n, numbers)
            if width == 32:
                add_rows(columns, e, n, values, numbers, 0, i, out, 32)
            else:
                add_rows(columns, e, n, values, numbers, 0, i, out, width)
            e += n


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def _subtract(columns: Array, e: int, n: int, log_sum: Array, to: Array) -> None:
    for k in range(n):
        i = columns[e + k]
        for h in range(log_sum.shape[1]):
            to[h, k] -= log_sum[i, h]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def _times_kept(numbers: Array, kept: Array, e: int, n: int, to: Array) -> None:
    """``to = numbers * kept`` over a block; nothing where `kept` has no rows."""
    for k in range(n if kept.shape[0] > 0 else 0):
        for h in range(numbers.shape[0]):
            to[h, k] = numbers[h, k] * kept[e + k, h]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def _relative(
    columns: Array, e: int, n: int, delta: Array, weights: Array, slopes: Array, dots: Array, heads: int
) -> None:
    for k in range(n):
        i = columns[e + k]
        for h in range(heads):
            dots[h, k] = weights[h, k] * slopes[h, k] * (dots[h, k] - delta[i, h])


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def attend_adjoint(
    edges: Edges,
    scored: Scored,
    values: Array,
    kept: Array,
    outer: tuple[Array, Array, Array],
    low: int,
    high: int,
    into: tuple[Array, Array, Array, Array],
) -> None:
    """Add the adjoint of `attend` over the edges of rows ``[low, high)`` of sources to `into`.

    Args:
        scored: `other` is of destinations, `own` of sources.
        outer: grad, delta and log_sum, as in `runs.Outer`.
        into: gradients of values, `other`, `own` and `mix`. Rows of `other` and `mix` get sums from several threads.
    """
    (indptr, columns, start, stop), (kind, other, own, mix, factor) = edges, scored
    (grad, delta, log_sum), (grad_values, grad_other, grad_own, grad_mix) = outer, into
    (_, heads, width), kinds, drops = values.shape, values.dtype, kept.shape[0] > 0
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
            _times_kept(weights, kept, e, n, used)
            factors = used if drops else weights
            if width == 32:
                add_rows_and_dots(columns, e, n, grad, factors, values, 0, j, grad_values, dots, 32)
            else:
                add_rows_and_dots(columns, e, n, grad, factors, values, 0, j, grad_values, dots, width)
            _times_kept(dots, kept, e, n, dots)
            if heads == 4:
                _relative(columns, e, n, delta, weights, slopes, dots, 4)
            else:
                _relative(columns, e, n, delta, weights, slopes, dots, heads)
            _scores_adjoint(kind, columns, e, n, other, own, j, mix, factor, dots, grad_other, grad_own, grad_mix)
            e += n
