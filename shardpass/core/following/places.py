"""What indexing, joins and views make of rows: a rule for each kind."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import torch

from shardpass.core.following.call import Call, Found, Made, aligned, dims_of
from shardpass.core.following.rows import Rows, reshaped


def look_up(call: Call) -> Found:
    table, index = call.row_of(call["weight"]), call.row_of(call["indices"])
    if table and index:
        return Made.MIXED
    if index is not None:
        return replace(index, points_to=None)
    assert table is not None
    return replace(table, dim=call["indices"].dim() + table.dim - 1) if table.dim else Made.MIXED


def select_entries(call: Call) -> Found:
    operand, dim = call["self"], dims_of(call, call["dim"], call["self"]).pop()
    rows, index = call.row_of(operand), call.row_of(call["index"])
    if rows is not None:
        return replace(rows, points_to=rows.points_to) if index is None and rows.dim != dim else Made.MIXED
    assert index is not None
    return Rows(dim, index.of, index.outer, index.inner)


def at_own_places(call: Call) -> Found:
    """Entries move along `dim` only, within what is the same in all other dimensions."""
    rows, dim = call.rows(), dims_of(call, call["dim"], call["self"]).pop()
    if call.name.startswith("index_fill"):
        mine = call.row_of(call["self"])
        return mine if len(rows) == 1 and mine is not None and mine.dim != dim else Made.MIXED
    if len({(found.dim, found.outer, found.inner) for _, found in rows}) > 1 or rows[0][1].dim == dim:
        adds = call.name.startswith("scatter_add") and call.of(call["self"]) is None and call.is_zero(call["self"])
        return Made.SUM if adds else Made.MIXED
    at = rows[0][1].dim
    for one in call.tensors:
        if call.of(one) is None and one.dim():
            call.plain.append((one, at))
    return replace(rows[0][1], points_to=None)


def added_along(call: Call) -> Found:
    """Slices of `source` go to places along `dim`; rows lie in another dimension."""
    dim = dims_of(call, call["dim"], call["self"]).pop()
    if call.of(call["index"]) is not None:
        adds = call.name.startswith("index_add") and call.of(call["self"]) is None and call.is_zero(call["self"])
        return Made.SUM if adds else Made.MIXED
    found = aligned(call, call.outs[0], call["self"], call["source"])
    return Made.MIXED if isinstance(found, Rows) and found.dim == dim else found


def indexed(call: Call) -> Found:
    """``table[indices]`` in dimensions without rows; or of a table without rows, by numbers that each row brings."""
    table, indices = call["self"], [*call["indices"]]
    rows = call.row_of(table)
    at = [dim for dim, index in enumerate(indices) if index is not None]
    given = [indices[dim] for dim in at]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in given)
    width = max(index.dim() for index in given)
    adjacent = all(b == a + 1 for a, b in pairwise(at))
    start = at[0] if adjacent else 0
    beside = [(index, found) for index in given if (found := call.row_of(index)) is not None]
    if rows is not None:
        if beside or rows.dim in at or (masks and any(dim <= rows.dim < dim + i.dim() for dim, i in zip(at, given))):
            return Made.MIXED
        if masks:
            return Made.MIXED if len(given) > 1 else replace(
                rows, dim=rows.dim if rows.dim < at[0] else rows.dim - given[0].dim() + 1)  # fmt: skip
        before = sum(dim < rows.dim for dim in range(table.dim()) if dim not in at and dim < rows.dim)
        return replace(rows, dim=before if adjacent and rows.dim < start else before + width)
    if masks or len({found.dim - index.dim() for index, found in beside}) > 1:
        return Made.MIXED
    index, found = beside[0]
    for other in given:
        place = other.dim() + found.dim - index.dim()
        if call.of(other) is None and place >= 0 and other.size(place) != 1:
            call.plain.append((other, place))
    return replace(found, dim=start + width - index.dim() + found.dim, points_to=None)


def put(call: Call) -> Found:
    """Written at places in dimensions without rows, the same in every row."""
    table, indices, values = call["self"], [*call["indices"]], call["values"]
    rows, at = call.row_of(table), [dim for dim, index in enumerate(indices) if index is not None]
    if rows is None or rows.dim in at or any(call.of(indices[dim]) is not None for dim in at):
        return Made.MIXED
    if any(indices[dim].dtype in (torch.bool, torch.uint8) for dim in at) or call.of(values) is not None:
        return Made.MIXED if values.numel() != 1 or call.of(values) is not None else rows
    return rows if values.numel() == 1 else Made.MIXED


def joined(call: Call) -> Found:
    pieces = [one for one in call["tensors"] if one.dim() > 1 or one.numel() or call.of(one) is not None]
    dim, rows = dims_of(call, call["dim"], call.outs[0]).pop(), call.rows(*pieces)
    if len({found.dim for _, found in rows}) > 1:
        return Made.MIXED
    if rows[0][1].dim != dim:
        if len({(found.outer, found.inner) for _, found in rows}) > 1:
            return Made.MIXED
        call.plain += [(one, rows[0][1].dim) for one in pieces if call.of(one) is None]
        return rows[0][1]
    alike = len(rows) == len(pieces) and len({(found.of, found.inner) for _, found in rows}) == 1
    return replace(rows[0][1], outer=sum(found.outer for _, found in rows)) if alike else Made.MIXED


def stacked(call: Call) -> Found:
    pieces, rows = call["tensors"], call.rows()
    dim = call["dim"] % call.outs[0].dim()
    if len({(found.dim, found.outer, found.inner) for _, found in rows}) > 1:
        return Made.MIXED
    call.plain += [(one, rows[0][1].dim) for one in pieces if call.of(one) is None]
    return replace(rows[0][1], dim=rows[0][1].dim + (dim <= rows[0][1].dim))


def repeated(call: Call) -> Found:
    rows, repeats = call.row_of(call["self"]), call["repeats"]
    assert rows is not None
    at = rows.dim + len(repeats) - call["self"].dim()
    return replace(rows, dim=at, outer=rows.outer * int(repeats[at]))


def padded(call: Call) -> Found:
    operand, rows = call["self"], call.row_of(call["self"])
    touched = {operand.dim() - 1 - k // 2 for k, size in enumerate(call["pad"]) if size}
    return Made.MIXED if rows is None or rows.dim in touched else replace(rows, points_to=None)


def is_in(call: Call) -> Found:
    rows = call.row_of(call["elements"]) if "elements" in call.given else None
    return rows if rows is not None and len(call.rows()) == 1 else Made.MIXED


def searched(call: Call) -> Found:
    bounds, values = call["sorted_sequence"], call["self"]
    rows = call.row_of(values)
    if call.of(bounds) is None and bounds.dim() == 1 and rows is not None:
        return replace(rows, points_to=None)
    both = call.rows(bounds, values)
    same = len(both) == 2 and both[0][1].dim == both[1][1].dim < bounds.dim() - 1
    return both[0][1] if same else Made.MIXED


def seen(call: Call) -> Found:
    """A view in which dimensions change their places."""
    operand, rows = call.rows()[0]
    if call.name in ("diagonal", "unfold"):
        dims = {call["dim1"] % operand.dim(), call["dim2"] % operand.dim()} if call.name == "diagonal" else {
            call["dimension"] % operand.dim()}  # fmt: skip
        return Made.MIXED if rows.dim in dims else replace(rows, dim=rows.dim - (
            sum(dim < rows.dim for dim in dims) if call.name == "diagonal" else 0))  # fmt: skip
    places = list(range(operand.dim()))
    if call.name == "permute":
        places = [int(dim) % operand.dim() for dim in call["dims"]]
    elif call.name in ("transpose", "swapaxes") or (call.name == "t" and operand.dim() == 2):
        one, other = (call["dim0"] % operand.dim(), call["dim1"] % operand.dim()) if call.name != "t" else (0, 1)
        places[one], places[other] = other, one
    elif call.name == "unsqueeze":
        places.insert(call["dim"] % (operand.dim() + 1), -1)
    elif call.name == "squeeze":
        dims = dims_of(call, call.given.get("dim"), operand)
        places = [dim for dim in places if dim == rows.dim or dim not in dims or operand.size(dim) != 1]
    elif call.name == "expand":
        places = [-1] * (call.outs[0].dim() - operand.dim()) + places
    return replace(rows, dim=places.index(rows.dim))


def viewed(call: Call) -> Found:
    """The same entries in the same order, in other dimensions."""
    operand, rows = call.rows()[0]
    return reshaped(rows, operand.shape, call.outs[0].shape) or Made.MIXED


def part(call: Call) -> Found:
    """A part along one dimension, which takes rows by their position unless it is all of them."""
    operand, rows = call.rows()[0]
    dim = call["dim"] % operand.dim()
    if dim != rows.dim:
        return replace(rows, dim=rows.dim - (call.name in ("select", "unbind") and dim < rows.dim))
    is_whole = call.name == "slice" and call["start"] in (None, 0) and call["end"] in (None, sys.maxsize)
    return rows if is_whole and call["step"] == 1 else Made.MIXED
