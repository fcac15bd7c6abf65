"""What reductions, products, norms and the like make of rows: a rule for each kind. A rule raises nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from shardpass.core.following.call import Call, Found, Made, aligned, dims_of
from shardpass.core.following.rows import Rows

SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


def reduction(call: Call) -> Found:
    """It works along `dim`, or along all dimensions."""
    (_, rows), dims = call.rows()[0], dims_of(call, call.given.get("dim"), call.tensors[0])
    if rows.dim in dims:
        return Made.SUM if call.name in ("sum", "nansum", "count_nonzero") else Made.MIXED
    gone = 0 if call.given.get("keepdim") else sum(dim < rows.dim for dim in dims)
    return replace(rows, dim=rows.dim - gone, points_to=None)


def along(call: Call) -> Found:
    """It works along some dimensions, and every result keeps the others."""
    named = [call.given[name] for name in ("dim", "dims") if name in call.given] or [None]
    operand, rows = call.rows()[0]
    dims = {operand.dim() - 1} if call.name == "_sample_dirichlet" else dims_of(call, named[0], operand)
    if rows.dim in dims:
        return Made.MIXED
    found = aligned(call, call.outs[0]) if len(call.tensors) > 1 else rows
    return replace(found, points_to=None) if isinstance(found, Rows) else found


def matrices(call: Call) -> Found:
    """It works on the matrices in the last two dimensions."""
    rows = call.rows()
    if len({found.dim for _, found in rows}) > 1 or any(found.dim >= one.dim() - 2 for one, found in rows):
        return Made.MIXED
    for one in call.tensors:
        if call.of(one) is None and one.dim() > 2:
            return Made.MIXED
    return replace(rows[0][1], points_to=None)


def renorm(call: Call) -> Found:
    """Each slice along `dim` is scaled by its own norm."""
    rows = call.rows()[0][1]
    is_each = dims_of(call, call["dim"], call["self"]) == {rows.dim} and rows.outer == rows.inner == 1
    return rows if is_each else Made.MIXED


def product(call: Call) -> Found:
    """A product of matrices; rows stay apart in the first of the left, in the last of the right, or in the batch."""
    added = call["self"] if call.name.startswith(("add", "_addmm", "badd")) else None
    factors = [one for one in call.tensors if one is not added]
    left, right = factors
    mine, theirs, out = call.row_of(left), call.row_of(right), call.outs[0]
    if isinstance(call.of(left), Made) or isinstance(call.of(right), Made):
        return Made.MIXED
    batch = 1 if left.dim() == 3 else 0
    if call.name in ("outer", "ger", "addr", "addr_"):
        one = mine or theirs
        assert one is not None
        found: Found = Made.MIXED if mine and theirs else replace(one, dim=0 if mine else 1)
    elif mine and theirs and mine.dim == left.dim() - 1 and theirs.dim == batch:
        same = (mine.outer, mine.inner) == (theirs.outer, theirs.inner)
        found = Made.SUM if same and added is None else Made.MIXED
    elif mine and theirs:
        found = mine if batch and mine.dim == theirs.dim == 0 and mine == theirs else Made.MIXED
    elif mine is not None:
        if batch and mine.dim == 0:
            call.plain.append((right, 0))
        found = mine if mine.dim < left.dim() - 1 else Made.MIXED
    else:
        assert theirs is not None
        if batch and theirs.dim == 0:
            call.plain.append((left, 0))
        at = theirs.dim if batch and theirs.dim == 0 else out.dim() - 1
        found = replace(theirs, dim=at) if theirs.dim != batch or (batch and theirs.dim == 0) else Made.MIXED
        if right.dim() == 1:
            found = Made.MIXED
    if isinstance(found, Rows) and isinstance(added, Tensor):
        beside = call.of(added)
        if isinstance(beside, Made) or (isinstance(beside, Rows) and beside.dim - added.dim() != found.dim - out.dim()):
            return Made.MIXED
        at = added.dim() + found.dim - out.dim()
        if beside is None and at >= 0 and added.size(at) != 1:
            call.plain.append((added, at))
    return replace(found, points_to=None) if isinstance(found, Rows) else found


def convolution(call: Call) -> Found:
    """Rows are the batch of the input, or lie where the kernel has one place only."""
    rows, weight = call.row_of(call.tensors[0]), call.tensors[1]
    if rows is None or len(call.rows()) > 1 or rows.dim == 1:
        return Made.MIXED
    at = rows.dim - 2
    is_alone = at < 0 or (
        weight.size(rows.dim) == call["stride"][at] == 1
        and not call["padding"][at]
        and not call.given.get("transposed")
    )
    return rows if is_alone else Made.MIXED


def three_factors(call: Call) -> Found:
    """A product of three tensors, each with new dimensions, summed along some."""
    places = []
    for name, new in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        rows = call.row_of(call[name])
        if rows is not None:
            kept = [dim for dim in range(call[name].dim() + len(call[new])) if dim not in call[new]]
            places.append(kept[rows.dim])
    if len({*places}) > 1 or places[0] in call["sumdim"]:
        return Made.MIXED
    return replace(call.rows()[0][1], dim=places[0] - sum(dim < places[0] for dim in call["sumdim"]), points_to=None)


def distances(call: Call) -> Found:
    """Distances of the rows of `x1` and those of `x2`, matrix by matrix."""
    mine, theirs, first = call.row_of(call["x1"]), call.row_of(call["x2"]), call["x1"]
    if mine and theirs:
        return mine if mine == theirs and mine.dim < first.dim() - 2 else Made.MIXED
    found = mine or theirs
    assert found is not None
    operand, other = (first, call["x2"]) if mine else (call["x2"], first)
    if found.dim == operand.dim() - 2:
        return replace(found, dim=call.outs[0].dim() - (2 if mine else 1))
    if found.dim < operand.dim() - 2 and other.dim() == operand.dim():
        call.plain.append((other, found.dim))
        return found
    return Made.MIXED


def loss(call: Call) -> Found:
    """A loss of each entry, which may then be reduced over all."""
    if call["reduction"] == 0:
        return aligned(call, call.outs[0])
    return Made.SUM if call["reduction"] == 2 else Made.MIXED


def layer_norm(call: Call) -> Found:
    rows = call.row_of(call["input"])
    kept = call["input"].dim() - len(call["normalized_shape"])
    alone = len(call.rows()) == 1 and rows is not None and rows.dim < kept
    return rows if alone else Made.MIXED


def rms_norm(call: Call) -> Found:
    return layer_norm(call)


def group_norm(call: Call) -> Found:
    rows = call.row_of(call["input"])
    return rows if len(call.rows()) == 1 and rows is not None and rows.dim == 0 else Made.MIXED


def batch_norm(call: Call) -> Any:
    """In training it takes the moments of all rows; in evaluation each entry is scaled by numbers of its channel."""
    rows, is_training = call.row_of(call["input"]), call.given.get("training", "update" in call.name)
    if "no_" in call.name:
        is_training = False
    if len(call.rows()) > 1 or rows is None:
        return Made.MIXED
    if rows.dim == 1 and call["weight"] is None and call.given.get("running_mean") is None:  # each row has its moments
        return [rows, *(replace(rows, dim=0) if out.numel() else None for out in call.outs[1:])]
    if is_training or rows.dim == 1:
        return Made.MIXED
    return [rows] + [None] * (len(call.outs) - 1)


def drawn(call: Call) -> Found:
    rows = call.rows()[0][1]
    return rows if rows.dim == 0 and call["self"].dim() == 2 else Made.MIXED


def nll_loss(call: Call) -> Any:
    rows = call.rows()
    alone = all(found.dim == 0 for _, found in rows) and call.row_of(call["self"]) is not None
    if call["reduction"] or not alone or call.row_of(call.given.get("weight")) is not None:
        return Made.MIXED
    if call.of(call["target"]) is None:
        call.plain.append((call["target"], 0))
    return [rows[0][1], None]


def attention(call: Call) -> Any:
    """Rows are in the batch: each attends within itself."""
    rows = call.rows()
    if len({found.dim for _, found in rows}) > 1 or any(found.dim >= one.dim() - 2 for one, found in rows):
        return Made.MIXED
    call.plain += [(one, rows[0][1].dim) for one in call.tensors if call.of(one) is None]
    at = rows[0][1].dim
    return [rows[0][1] if out.dim() > at and out.size(at) == call.outs[0].size(at) else None for out in call.outs]


def recurrent(call: Call) -> Any:
    """Layers over time of ``[time, batch, channels]``."""
    rows = call.row_of(call.tensors[0])
    if rows is None or rows.dim != 1:
        return Made.MIXED
    return [replace(rows, dim=out.dim() - 2) if out.dim() > 1 and out.numel() else None for out in call.outs]


def together(call: Call) -> Found:
    """It puts rows together whatever it is given."""
    return Made.MIXED


def shuffled(call: Call) -> Found:
    """Channels become places of a picture, or the other way: the last three dimensions."""
    operand, rows = call.rows()[0]
    return rows if rows.dim < operand.dim() - 3 else Made.MIXED


def spatial(call: Call) -> Found:
    """It works on the last one, two or three dimensions, and each of the others by itself."""
    rows = call.rows()
    width = next(size for ending, size in SPATIAL.items() if ending in call.name)
    alone = len(rows) == 1 and rows[0][1].dim < rows[0][0].dim() - width
    return replace(rows[0][1], points_to=None) if alone else Made.MIXED
