"""What indexing, joins and views make of rows: a rule for each kind."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from shardpass.core.following.call import Call, Found, Made, aligned, dims_of
from shardpass.core.following.rows import Rows, reshaped


def look_up(call: Call) -> Found:
    """A row of a table for each number, or columns that are rows for all numbers."""
    table, index = call.row_of(call["weight"]), call.row_of(call["indices"])
    if table and index:
        return Made.MIXED
    if index is not None:
        return replace(index, points_to=None)
    assert table is not None
    return replace(table, dim=call["indices"].dim() + table.dim - 1) if table.dim else Made.MIXED


def select_entries(call: Call) -> Found:
    """Entries along a dimension without rows; or of a table without rows, by numbers that each row brings."""
    dim = dims_of(call, call["dim"], call["self"]).pop()
    rows, index = call.row_of(call["self"]), call.row_of(call["index"])
    if rows is not None:
        return rows if index is None and rows.dim != dim else Made.MIXED
    return Made.MIXED if index is None else Rows(dim, index.of, index.outer, index.inner)


def at_own_places(call: Call) -> Found:
    """Entries move along `dim` only, within what is the same in all other dimensions; or rows are added to zeros."""
    rows, dim = call.rows(), dims_of(call, call["dim"], call["self"]).pop()
    if len({(found.dim, found.outer, found.inner) for _, found in rows}) > 1:
        return Made.MIXED
    at = rows[0][1].dim
    adds = at == dim and call.name.startswith("scatter_add") and call.is_zero(call["self"])
    if at == dim and not adds:
        return Made.MIXED
    for one in call.tensors:
        if not (adds and one is call["self"]):
            call.is_alike(one, at)
    return Made.SUM if adds else replace(rows[0][1], points_to=None)


def filled(call: Call) -> Found:
    """A number is written at places along `dim`, the same in every row."""
    rows, dim = call.row_of(call["self"]), dims_of(call, call["dim"], call["self"]).pop()
    return rows if rows is not None and len(call.rows()) == 1 and rows.dim != dim else Made.MIXED


def added_along(call: Call) -> Found:
    """Slices of `source` go to places along `dim`; rows lie in another dimension, or are added to zeros."""
    dim, index = dims_of(call, call["dim"], call["self"]).pop(), call.row_of(call["index"])
    if index is None:
        found = aligned(call, call["self"], call["self"], call["source"])
        return Made.MIXED if isinstance(found, Rows) and found.dim == dim else found
    source = call.row_of(call["source"])
    if not (call.name.startswith("index_add") and call.is_zero(call["self"])):
        return Made.MIXED
    call.is_alike(call["source"], dim)
    return Made.SUM if source is None or (source.dim == dim and source.of.goes_with(index.of)) else Made.MIXED


def indexed(call: Call) -> Found:
    """``table[indices]`` in dimensions without rows; or of a table without rows, by numbers that each row brings."""
    table, indices = call["self"], [*call["indices"]]
    rows = call.row_of(table)
    at = [dim for dim, index in enumerate(indices) if index is not None]
    given = [indices[dim] for dim in at]
    beside = [(index, found) for index in given if (found := call.row_of(index)) is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        if rows is None or beside or len(given) > 1 or at[0] <= rows.dim < at[0] + given[0].dim():
            return Made.MIXED
        return replace(rows, dim=rows.dim if rows.dim < at[0] else rows.dim - given[0].dim() + 1)
    width = max(index.dim() for index in given)
    if rows is not None:
        return Made.MIXED if beside or rows.dim in at else replace(rows, dim=_kept_place(rows.dim, at, width))
    index, found = beside[0]
    if len({one.dim - other.dim() for other, one in beside}) > 1:
        return Made.MIXED
    for other in given:
        call.is_alike(other, other.dim() + found.dim - index.dim())
    start = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    return replace(found, dim=start + width - index.dim() + found.dim, points_to=None)


def put(call: Call) -> Found:
    """Written at places in dimensions without rows, the same in every row."""
    table, indices, values = call["self"], [*call["indices"]], call["values"]
    rows, at = call.row_of(table), [dim for dim, index in enumerate(indices) if index is not None]
    given = [indices[dim] for dim in at]
    if rows is None or rows.dim in at or call.rows(*given):
        return Made.MIXED
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return rows if values.numel() == 1 and call.row_of(values) is None else Made.MIXED
    width = max(index.dim() for index in given)
    from_end = _kept_place(rows.dim, at, width) - (table.dim() - len(at) + width)
    call.is_alike(values, values.dim() + from_end)
    beside = call.row_of(values)
    if beside is None:
        return rows
    at_theirs = beside.dim - values.dim(), beside.outer, beside.inner, beside.points_to
    return rows if at_theirs == (from_end, rows.outer, rows.inner, rows.points_to) else Made.MIXED


def _kept_place(dim: int, at: list[int], width: int) -> int:
    """Where a dimension stands when those `at` have been indexed by tensors that give `width` dimensions."""
    before = sum(other < dim for other in range(dim) if other not in at)
    is_adjacent = all(b == a + 1 for a, b in pairwise(at))
    return before if is_adjacent and dim < at[0] else before + width


def joined(call: Call) -> Found:
    """Beside each other in another dimension, or all rows of one set several times."""
    pieces = [one for one in call["tensors"] if one.dim() > 1 or one.numel() or call.of(one) is not None]
    dim, rows = dims_of(call, call["dim"], call.outs[0]).pop(), call.rows(*pieces)
    if len({found.dim for _, found in rows}) > 1:
        return Made.MIXED
    if rows[0][1].dim != dim:
        if len({(found.outer, found.inner) for _, found in rows}) > 1:
            return Made.MIXED
        for one in pieces:
            call.is_alike(one, rows[0][1].dim)
        return rows[0][1]
    alike = len(rows) == len(pieces) and len({(found.of, found.inner) for _, found in rows}) == 1
    return replace(rows[0][1], outer=sum(found.outer for _, found in rows)) if alike else Made.MIXED


def stacked(call: Call) -> Found:
    """Along a new dimension."""
    pieces, rows = call["tensors"], call.rows()
    dim = call["dim"] % call.outs[0].dim()
    if len({(found.dim, found.outer, found.inner) for _, found in rows}) > 1:
        return Made.MIXED
    for one in pieces:
        call.is_alike(one, rows[0][1].dim)
    return replace(rows[0][1], dim=rows[0][1].dim + (dim <= rows[0][1].dim))


def repeated(call: Call) -> Found:
    """All rows several times, one copy after the other; or each by itself in other dimensions."""
    rows, repeats = call.row_of(call["self"]), call["repeats"]
    assert rows is not None
    at = rows.dim + len(repeats) - call["self"].dim()
    return replace(rows, dim=at, outer=rows.outer * int(repeats[at]))


def padded(call: Call) -> Found:
    """Entries of one value are added at the ends of some dimensions."""
    operand, rows = call["self"], call.row_of(call["self"])
    touched = {operand.dim() - 1 - k // 2 for k, size in enumerate(call["pad"]) if size}
    return Made.MIXED if rows is None or rows.dim in touched else replace(rows, points_to=None)


def is_in(call: Call) -> Found:
    """Whether each entry is among values that are the same for all."""
    rows = call.row_of(call["elements"]) if "elements" in call.given else None
    return rows if rows is not None and len(call.rows()) == 1 else Made.MIXED


def searched(call: Call) -> Found:
    """Where each value stands in a list of bounds that is the same for all, or in that of its own row."""
    bounds, values = call["boundaries" if call.name == "bucketize" else "sorted_sequence"], call["self"]
    rows = call.row_of(values) if isinstance(values, Tensor) else None
    if rows is not None and call.of(bounds) is None and bounds.dim() == 1:
        return replace(rows, points_to=None)
    both = call.rows(bounds, values)
    same = len(both) == 2 and both[0][1].dim == both[1][1].dim < bounds.dim() - 1
    return both[0][1] if same else Made.MIXED


def seen(call: Call) -> Found:
    """A view in which dimensions change their places."""
    operand, rows = call.rows()[0]
    if call.name == "unfold":
        return Made.MIXED if rows.dim == call["dimension"] % operand.dim() else rows
    places, name = list(range(operand.dim())), call.name.removesuffix("_")
    if name == "diagonal":
        places = [dim for dim in places if dim not in (call["dim1"] % operand.dim(), call["dim2"] % operand.dim())]
    elif name == "permute":
        places = [int(dim) % operand.dim() for dim in call["dims"]]
    elif name in ("transpose", "t"):
        one, other = (call["dim0"], call["dim1"]) if name == "transpose" else (0, -1)
        places[one], places[other] = places[other], places[one]
    elif name == "unsqueeze":
        places.insert(call["dim"] % (operand.dim() + 1), -1)
    elif name == "squeeze":
        dims = dims_of(call, call.given.get("dim"), operand)
        places = [dim for dim in places if dim == rows.dim or dim not in dims or operand.size(dim) != 1]
    elif name == "expand":
        places = [-1] * (call.outs[0].dim() - operand.dim()) + places
    return replace(rows, dim=places.index(rows.dim)) if rows.dim in places else Made.MIXED


def viewed(call: Call) -> Found:
    """The same entries in the same order, in other dimensions. A symbol says which of them holds rows."""
    (operand, rows), shape = call.rows()[0], call.outs[0].shape
    if "dtype" in call.given:  # which divides or joins entries of the last dimension
        return rows if rows.dim < operand.dim() - 1 or operand.shape == shape else Made.MIXED
    symbols = [dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]
    if not symbols:
        return reshaped(rows, operand.shape, shape) or Made.MIXED
    before, after = prod(operand.shape[: rows.dim]) * rows.outer, prod(operand.shape[rows.dim + 1 :]) * rows.inner
    if len(symbols) != 1 or before % prod(shape[: symbols[0]]) or after % prod(shape[symbols[0] + 1 :]):
        return Made.MIXED
    outer, inner = before // prod(shape[: symbols[0]]), after // prod(shape[symbols[0] + 1 :])
    return replace(rows, dim=symbols[0], outer=outer, inner=inner)


def part(call: Call) -> Found:
    """A part along one dimension, which takes rows by their position unless it is all of them."""
    operand, rows = call.rows()[0]
    dim = call["dim"] % operand.dim()
    if dim != rows.dim:
        return replace(rows, dim=rows.dim - (call.name in ("select", "unbind") and dim < rows.dim))
    if call.name == "slice":
        start, end, step = call["start"] or 0, call["end"], call["step"]
        if isinstance(operand.size(dim), torch.SymInt):
            return rows if (start, step) == (0, 1) and end in (None, sys.maxsize) else Made.MIXED
        is_whole = slice(start, end).indices(operand.size(dim))[:2] == (0, operand.size(dim))
        return rows if is_whole and step == 1 else Made.MIXED
    is_one = call.name not in ("select", "unbind") and len(call.outs) == 1 and call.outs[0].shape == operand.shape
    return rows if is_one else Made.MIXED
