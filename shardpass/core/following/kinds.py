"""What reductions, products, norms and the like make of rows: a rule for each kind. A rule raises nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from shardpass.core.following.call import Call, Found, Made, aligned, dims_of
from shardpass.core.following.rows import Rows


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


_SOLVES = {"_linalg_solve_ex": "B", "linalg_solve_triangular": "B", "cholesky_solve": "self", "linalg_lu_solve": "B"}
"""Operations that solve systems for the columns of this argument."""


def matrices(call: Call) -> Found:
    """It works on the matrices in the last two dimensions."""
    rows = call.rows()
    right = _SOLVES.get(call.name)
    if right and len(rows) == 1 and rows[0][0] is call[right] and rows[0][1].dim == call[right].dim() - 1:
        return replace(rows[0][1], points_to=None) if call.given.get("left", True) else Made.MIXED  # column by column
    if call.name == "_linalg_solve_ex" and call["B"].dim() == call["A"].dim() - 1 and len(rows) == 2:
        return rows[0][1] if rows[0][1].dim == rows[1][1].dim < call["B"].dim() - 1 else Made.MIXED  # of vectors
    if len({found.dim for _, found in rows}) > 1 or any(found.dim >= one.dim() - 2 for one, found in rows):
        return Made.MIXED
    for one in call.tensors:  # one dimension less than a batch of matrices, and it may be a batch of vectors
        if call.of(one) is None and (one.dim() > 2 or any(one.dim() == row.dim() - 1 for row, _ in rows)):
            return Made.MIXED
    return replace(rows[0][1], points_to=None)


def renorm(call: Call) -> Found:
    """Each slice along `dim` is scaled by its own norm."""
    rows = call.rows()[0][1]
    is_each = dims_of(call, call["dim"], call["self"]) == {rows.dim} and rows.outer == rows.inner == 1
    return rows if is_each else Made.MIXED


def product(call: Call) -> Found:
    """A product of matrices, to which another may be added."""
    left, right = call.tensors[-2:]
    added = call["self"] if len(call.tensors) == 3 else None
    mine, theirs, out = call.row_of(left), call.row_of(right), call.outs[0]
    if call.name in ("outer", "ger", "addr", "addr_"):
        one = mine or theirs
        found: Found = Made.MIXED if one is None or (mine and theirs) else replace(one, dim=0 if mine else 1)
    else:
        found = _multiplied(call, left, right)
    if added is None:
        return found
    if not isinstance(found, Rows):
        return Made.MIXED  # every rank would add it
    beside, from_end = call.row_of(added), found.dim - out.dim()
    call.is_alike(added, added.dim() + from_end)
    return found if beside is None or beside.dim - added.dim() == from_end else Made.MIXED


def _multiplied(call: Call, left: Tensor, right: Tensor) -> Found:
    """Rows stay apart in the first dimension of the left, in the last of the right, or in the batch of both."""
    mine, theirs, out = call.row_of(left), call.row_of(right), call.outs[0]
    batch = left.dim() == 3
    contracted = left.dim() - 1, int(batch)
    if mine and theirs:
        layouts = {(one.outer, one.inner) for one in (mine, theirs)}
        if (mine.dim, theirs.dim) == contracted and len(layouts) == 1:
            return Made.SUM
        is_batch = batch and mine.dim == theirs.dim == 0 and len(layouts) == 1
        return replace(mine, points_to=None) if is_batch else Made.MIXED
    one = mine or theirs
    if one is None or one.dim == contracted[mine is None]:
        is_of_rows = one is not None and call.is_of_script and one.outer == one.inner == 1
        return Made.SUM if is_of_rows else Made.MIXED
    if batch and one.dim == 0:
        call.is_alike(right if mine else left, 0)
        return replace(one, points_to=None)
    return replace(one, dim=one.dim if mine else out.dim() - 1, points_to=None)


def convolution(call: Call) -> Found:
    """Rows are the batch of the input, or lie where the kernel has one place only."""
    rows, weight = call.row_of(call.tensors[0]), call.tensors[1]
    if rows is None or len(call.rows()) > 1 or rows.dim == 1:
        return Made.MIXED
    at = rows.dim - 2
    if at >= 0 and (call.given.get("transposed") or weight.size(rows.dim) != 1):
        return Made.MIXED
    return rows if at < 0 or (call["stride"][at], call["padding"][at]) == (1, 0) else Made.MIXED


def patches(call: Call) -> Found:
    """Rows are the batch: the input has one dimension more than without it."""
    rows, dims = call.row_of(call["self"]), 4 if call.name == "im2col" else 3
    return rows if rows is not None and rows.dim == 0 and call["self"].dim() == dims else Made.MIXED


def three_factors(call: Call) -> Found:
    """A product of three tensors, each with new dimensions, summed along some."""
    kept = {}
    for name, new in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        kept[name] = [dim for dim in range(call[name].dim() + len(call[new])) if dim not in call[new]]
    places = {kept[name][rows.dim] for name in kept if (rows := call.row_of(call[name])) is not None}
    place = places.pop()
    if places or place in call["sumdim"]:
        return Made.MIXED
    for name, dims in kept.items():
        call.is_alike(call[name], dims.index(place) if place in dims else -1)
    return replace(call.rows()[0][1], dim=place - sum(dim < place for dim in call["sumdim"]), points_to=None)


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
        call.is_alike(other, found.dim)
        return found
    return Made.MIXED


def loss(call: Call) -> Found:
    """A loss of each entry, which may then be reduced over all."""
    found = aligned(call, call["self"])
    if call["reduction"] == 0 or not isinstance(found, Rows):
        return found
    return Made.SUM if call["reduction"] == 2 else Made.MIXED


def of_each(call: Call) -> Found:
    """It works on each entry of the first dimension by itself, which alone may hold rows."""
    rows = call.rows()
    for one in call.tensors:
        call.is_alike(one, 0)
    return replace(rows[0][1], points_to=None) if {found.dim for _, found in rows} == {0} else Made.MIXED


def by_channel(call: Call) -> Found:
    """It works on each entry by itself, with numbers for each channel, which stand along `axis`."""
    rows = call.row_of(call["self"])
    alone = len(call.rows()) == 1 and rows is not None and rows.dim != call["axis"] % call["self"].dim()
    return rows if alone else Made.MIXED


def layer_norm(call: Call) -> Found:
    """It takes the moments of the last dimensions."""
    rows = call.row_of(call["input"])
    kept = call["input"].dim() - len(call["normalized_shape"])
    alone = len(call.rows()) == 1 and rows is not None and rows.dim < kept
    return rows if alone else Made.MIXED


def group_norm(call: Call) -> Found:
    """It takes the moments of groups of channels, of each entry of the batch by itself."""
    rows = call.row_of(call["input"])
    return rows if len(call.rows()) == 1 and rows is not None and rows.dim == 0 else Made.MIXED


def batch_norm(call: Call) -> Any:
    """In training it takes the moments of all rows; in evaluation each entry is scaled by numbers of its channel."""
    rows, is_training = call.row_of(call["input"]), call.given.get("training", "update" in call.name)
    if "no_" in call.name:
        is_training = False
    if len(call.rows()) > 1 or rows is None:
        return Made.MIXED
    if rows.dim == 1 and call.given.get("running_mean") is None:  # each row has its moments
        for name in ("weight", "bias"):
            call.is_alike(call[name], 0)
        return [rows, *(replace(rows, dim=0) if out.numel() else None for out in call.outs[1:])]
    if is_training or rows.dim == 1:
        return Made.MIXED
    return [rows] + [None] * (len(call.outs) - 1)


def drawn(call: Call) -> Found:
    """Numbers are drawn for each row of a matrix of weights."""
    rows = call.rows()[0][1]
    return rows if rows.dim == 0 and call["self"].dim() == 2 else Made.MIXED


def nll_loss(call: Call) -> Any:
    """The loss of each row by its class; beside it stands the sum of their weights, 0 without a reduction."""
    rows = call.rows(call["self"], call["target"])
    is_apart = call["reduction"] != 1 and len(rows) == len(call.rows()) and all(found.dim == 0 for _, found in rows)
    if not is_apart or call.row_of(call["self"]) is None:
        return Made.MIXED
    call.is_alike(call["target"], 0)
    return [rows[0][1], None] if call["reduction"] == 0 else [Made.SUM, Made.SUM]


def attention(call: Call) -> Any:
    """Rows are in the batch: each attends within itself. A mask may have fewer dimensions."""
    query = call["query"]
    from_end = {found.dim - one.dim() for one, found in call.rows()}
    at = from_end.pop()
    if from_end or at >= -2:
        return Made.MIXED
    for one in call.tensors:
        call.is_alike(one, one.dim() + at)
    rows = replace(call.rows()[0][1], dim=query.dim() + at)
    return [rows if out.dim() >= query.dim() - 1 else None for out in call.outs]


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
    width = next(size for size in (1, 2, 3) if f"{size}d" in call.name)
    is_alone = len(rows) == 1 and rows[0][1].dim < rows[0][0].dim() - width
    return replace(rows[0][1], points_to=None) if is_alone else Made.MIXED
