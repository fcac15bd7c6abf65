"""Goes through the steps of a formula for a few edges at a time, in registers that stay in cache. Compiled by numba.

One loop serves all formulas, so it is compiled once: it reads the steps as data, and all channels of the edges at hand
share the time that reading takes. A register holds one value of the formula, ``[edges * width]`` numbers.

[Note: vectorised loops]
Each index is that of a loop, or is read once for each row: numba asks of others whether they are negative, for each
number. What a choice may need is computed in any case, so that there is no branch. See also "no views of rows" in
`numba_loops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from shardpass.core.kernels.numba_float32 import log1p32, log32, tanh32, whole_exp32
from shardpass.core.kernels.numba_prefetch import prefetch

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]
ADD, SUB, MUL, DIV = range(4)
SELECT, POSITIVE, TIED, AT_LEAST, AT_MOST, SOFTPLUS = range(4, 10)
NEG, ABS, EXP, LOG, LOG1P, SQRT, TANH, SIGMOID = range(10, 18)
SUM, MAX, MIN = range(3)  # what becomes of a result
OF_SOURCE, OF_DESTINATION, OF_EDGE, OF_ALL = range(4)  # which row of a table an edge reads


@njit(nogil=True, cache=True, error_model="numpy")
def _exponentials(r: Array, x: int, to: int, n: int) -> None:
    if r.itemsize == 4:
        for k in range(n):
            r[to, k] = whole_exp32(r[x, k])
    else:
        for k in range(n):
            r[to, k] = np.exp(r[x, k])


@njit(nogil=True, cache=True, error_model="numpy")
def _sigmoids(r: Array, x: int, to: int, n: int) -> None:
    one = r.dtype.type(1)
    if r.itemsize == 4:
        for k in range(n):
            r[to, k] = one / (one + whole_exp32(-r[x, k]))
    else:
        for k in range(n):
            r[to, k] = one / (one + np.exp(-r[x, k]))


@njit(nogil=True, cache=True, error_model="numpy")
def _tanhs(r: Array, x: int, to: int, n: int) -> None:
    if r.itemsize == 4:
        for k in range(n):
            r[to, k] = tanh32(r[x, k])
    else:
        for k in range(n):
            r[to, k] = np.tanh(r[x, k])


@njit(nogil=True, cache=True, error_model="numpy")
def _logarithms(r: Array, x: int, to: int, n: int) -> None:
    if r.itemsize == 4:
        for k in range(n):
            r[to, k] = log32(r[x, k])
    else:
        for k in range(n):
            r[to, k] = np.log(r[x, k])


@njit(nogil=True, cache=True, error_model="numpy")
def _logarithms_above_one(r: Array, x: int, to: int, n: int) -> None:
    if r.itemsize == 4:
        for k in range(n):
            r[to, k] = log1p32(r[x, k])
    else:
        for k in range(n):
            r[to, k] = np.log1p(r[x, k])


@njit(nogil=True, cache=True, error_model="numpy")
def _function(op: int, r: Array, x: int, to: int, n: int) -> None:
    """A function of one value; see `Step`."""
    if op == NEG:
        for k in range(n):
            r[to, k] = -r[x, k]
    elif op == ABS:
        for k in range(n):
            r[to, k] = abs(r[x, k])
    elif op == EXP:
        _exponentials(r, x, to, n)
    elif op == SIGMOID:
        _sigmoids(r, x, to, n)
    elif op == TANH:
        _tanhs(r, x, to, n)
    elif op == SQRT:
        for k in range(n):
            r[to, k] = np.sqrt(r[x, k])
    elif op == LOG:
        _logarithms(r, x, to, n)
    elif op == LOG1P:
        _logarithms_above_one(r, x, to, n)


@njit(nogil=True, cache=True, error_model="numpy")
def _choice(op: int, r: Array, x: int, y: int, z: int, to: int, n: int) -> None:
    """One value or another; see `Step`. NaN spreads as in torch."""
    zero = r.dtype.type(0)
    if op == SELECT:
        for k in range(n):
            a, b, c = r[x, k], r[y, k], r[z, k]
            r[to, k] = c if a <= 0 else b
    elif op == POSITIVE:
        for k in range(n):
            a, b, c = r[x, k], r[y, k], r[z, k]
            r[to, k] = b if a > 0 else c
    elif op == TIED:
        for k in range(n):
            a, b, c = r[x, k], r[y, k], r[z, k]
            r[to, k] = c if a == b else zero
    elif op == AT_LEAST:
        for k in range(n):
            a, b = r[x, k], r[y, k]
            r[to, k] = b if a < b else a
    elif op == AT_MOST:
        for k in range(n):
            a, b = r[x, k], r[y, k]
            r[to, k] = b if a > b else a
    elif op == SOFTPLUS:
        for k in range(n):
            a, b = r[x, k], r[y, k]
            r[to, k] = a if a > 20 else b


@njit(nogil=True, cache=True, error_model="numpy")
def _step(op: int, r: Array, x: int, y: int, z: int, to: int, n: int) -> None:
    """One step on the first `n` numbers of the registers `r`; see `Step`."""
    if op == ADD:
        for k in range(n):
            r[to, k] = r[x, k] + r[y, k]
    elif op == SUB:
        for k in range(n):
            r[to, k] = r[x, k] - r[y, k]
    elif op == MUL:
        for k in range(n):
            r[to, k] = r[x, k] * r[y, k]
    elif op == DIV:
        for k in range(n):
            r[to, k] = r[x, k] / r[y, k]
    elif op < NEG:
        _choice(op, r, x, y, z, to, n)
    else:
        _function(op, r, x, to, n)


@njit(nogil=True, cache=True, error_model="numpy")
def _load(
    table: Array, index: Array, side: int, e: int, n: int, ahead: int, repeats: int, registers: Array, to: int
) -> None:
    """The row of each edge, each value `repeats` times. Starts to load what the next `ahead` edges read."""
    for k in range(n):
        j = index[side, e + k]
        if k < ahead:
            prefetch(table, index[side, e + n + k])
        if repeats == 1:
            for x in range(table.shape[1]):
                registers[to, k, x] = table[j, x]
        else:
            for x in range(table.shape[1]):
                for r in range(repeats):
                    registers[to, k, x * repeats + r] = table[j, x]


@njit(nogil=True, cache=True, error_model="numpy")
def _add(
    registers: Array, of: int, index: Array, side: int, e: int, n: int, ahead: int, repeats: int, out: Array
) -> None:
    """Add what `_load` would have read."""
    for k in range(n):
        j = index[side, e + k]
        if k < ahead:
            prefetch(out, index[side, e + n + k])
        if repeats == 1:
            for x in range(out.shape[1]):
                out[j, x] += registers[of, k, x]
        else:
            for x in range(out.shape[1]):
                for r in range(repeats):
                    out[j, x] += registers[of, k, x * repeats + r]


@njit(nogil=True, cache=True, error_model="numpy")
def _add_to_total(registers: Array, of: int, n: int, totals: Array, to: int) -> None:
    """Add the values of all edges, channel by channel."""
    for k in range(n):
        for x in range(registers.shape[2]):
            totals[to, x] += registers[of, k, x]


@njit(nogil=True, cache=True, error_model="numpy")
def _add_to_row(totals: Array, of: int, repeats: int, out: Array, row: int) -> None:
    """Add what `_add_to_total` has added up to one row."""
    for x in range(out.shape[1]):
        total = 0.0
        for r in range(repeats):
            total += totals[of, x * repeats + r]
        out[row, x] += total


@njit(nogil=True, cache=True, error_model="numpy")
def _take(
    registers: Array, of: int, index: Array, side: int, e: int, n: int, is_max: bool, best: Array, ties: Array
) -> None:
    """Take values into the largest or smallest so far, and the number of its ties. NaN wins."""
    for k in range(n):
        i = index[side, e + k]
        for x in range(best.shape[1]):
            value, old = registers[of, k, x], best[i, x]
            more, less = value > old, value < old
            alone, tied = np.int32(value == value), ties[i, x] + np.int32(value == old)
            wins = (more if is_max else less) | (value != value)
            best[i, x] = value if wins else old
            ties[i, x] = alone if wins else tied


@njit(nogil=True, cache=True, error_model="numpy")
def go_through(
    loads: Array, tables: Arrays, fixed: Array, constants: Array, steps: Array, stores: Array, outs: Arrays,
    ties: Arrays, index: Array, first: int, last: int, thread: int, at_once: int, num_registers: int,
) -> None:  # fmt: skip
    """Go through the steps for the edges ``[first, last)``, `at_once` at a time.

    Args:
        loads: ``(register, row of index, repeats)`` of each of `tables`, which have a row per node or edge.
        fixed: the registers of the rows of `constants`, ``[len(fixed), width]``.
        steps: ``(op, result, operand, operand, operand)``: the registers of each step.
        stores: ``(SUM, MAX or MIN, register, row of index, repeats)`` of each of `outs`; `ties` belong to extrema.
        index: ``[3, num_edges]``: the row of each edge's source, of its destination, and of the edge.
        thread: the row of results that are the same for all edges.
    """
    width = constants.shape[1]
    registers = np.empty((num_registers, at_once, width), constants.dtype)
    flat = registers.reshape(num_registers, at_once * width)
    totals = np.zeros((stores.shape[0], width))  # of all edges, in float64: float32 forgets small terms of long sums
    for f in range(fixed.size):
        for k in range(at_once):
            for x in range(width):
                registers[fixed[f], k, x] = constants[f, x]
    for e in range(first, last, at_once):
        n = min(at_once, last - e)
        ahead = min(at_once, last - e - n)  # edges of the next turn
        for t in range(loads.shape[0]):
            register, side, repeats = loads[t]
            _load(tables[t], index, side, e, n, ahead, repeats, registers, register)
        for s in range(steps.shape[0]):
            op, to, x, y, z = steps[s]
            _step(op, flat, x, y, z, to, n * width)
        for t in range(stores.shape[0]):
            what, register, side, repeats = stores[t]
            if side == OF_ALL:
                _add_to_total(registers, register, n, totals, t)
            elif what == SUM:
                _add(registers, register, index, side, e, n, ahead, repeats, outs[t])
            else:
                _take(registers, register, index, side, e, n, what == MAX, outs[t], ties[t])
    for t in range(stores.shape[0]):
        _, _, side, repeats = stores[t]
        if side == OF_ALL:
            _add_to_row(totals, t, repeats, outs[t], thread)
