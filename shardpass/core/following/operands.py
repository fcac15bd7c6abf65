"""What the operands of one operation hold: rows of which sets, and what was made of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.call import Found, Made
from shardpass.core.following.judge import verdict_of
from shardpass.core.following.kinds import distances, product
from shardpass.core.following.marks import Marks
from shardpass.core.following.places import added_along, at_own_places, indexed, look_up, searched, select_entries
from shardpass.core.following.refusals import Mixture
from shardpass.core.following.rows import Rows
from shardpass.core.following.table import is_pointwise, rule_of
from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import torch_private

_COMPARES = (product, distances, searched)
"""Kinds of operations that put each row of one operand beside all of another."""
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.clone)
_TAKES, _ADDS = (look_up, select_entries, indexed), (at_own_places, added_along)
_INTEGERS = (torch.int32, torch.int64)


def rows_of_operands(marks: Marks, func: Any, leaves: Sequence[Any], are_known: bool) -> dict[int, Rows]:
    """Where operands hold rows, by their position.

    Args:
        marks: what is known of tensors.
        func: the operation.
        leaves: what it is given.
        are_known: nobody has given these from outside, so that what is not marked is made of plain numbers.
    """
    tells = is_pointwise(func) or rule_of(func) in _COMPARES or _index_tells(marks, func, leaves)
    is_of_script = marks.is_around and tells
    if is_of_script:  # what stands beside rows there tells where a tensor of a script's own has rows
        marks.recognise_told(leaves)
    elif are_known and not marks.is_around:
        marks.adopt(leaves)
    else:
        marks.recognise(leaves)
    found = marked_rows(marks, leaves)
    return _without_candidates(func, leaves, found) if is_of_script else found


def marked_rows(marks: Marks, leaves: Sequence[Any]) -> dict[int, Rows]:
    """Where those of `leaves` hold rows that are marked, by their position."""
    found = {i: marks.rows_of(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {i: rows for i, rows in found.items() if rows is not None}


def _index_tells(marks: Marks, func: Any, leaves: Sequence[Any]) -> bool:
    """Whether values of rows, such as labels, take entries of a table, or numbers of rows say where it is added to."""
    takes, adds = rule_of(func) in _TAKES, rule_of(func) in _ADDS
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] if takes or adds else []
    rows = [found for leaf in tensors[1:] if leaf.dtype in _INTEGERS and (found := marks.rows_of(leaf)) is not None]
    return any((found.points_to is None) == takes for found in rows)


def _without_candidates(func: Any, leaves: Sequence[Any], found: dict[int, Rows]) -> dict[int, Rows]:
    """The operands with rows, but for rows fetched by their ids that all own rows are compared with."""
    own = {i: rows for i, rows in found.items() if rows.of.root is not None}
    fetched = [i for i, rows in found.items() if rows.of.is_fetched]
    if not own or not fetched:
        return found
    places = {i: rows.dim - leaves[i].dim() for i, rows in found.items()}
    if not is_pointwise(func):
        right = max(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        # A product puts columns of the left beside rows of the right; 0 is a place where no rows are.
        beside_left = {-2: -1, -1: 0} if rule_of(func) is product else {-2: 0}
        if leaves[right].dim() > 1 and right in places:
            places[right] = beside_left.get(places[right], places[right])
    beside = {places[i] for i in own}
    return {i: rows for i, rows in found.items() if i not in fetched or places[i] in beside}


def mixture_of(marks: Marks, leaves: Sequence[Any]) -> Mixture | None:
    """What operands are made of several rows by: the first that is no sum, or else the first."""
    found = [marks.mixtures.get(leaf) for leaf in leaves if isinstance(leaf, Tensor)] if marks.mixtures else []
    mixed = [mixture for mixture in found if mixture is not None]
    return next((mixture for mixture in mixed if not mixture.is_sum), mixed[0] if mixed else None)


def mix(
    marks: Marks, mixture: Mixture, func: Any, leaves: Sequence[Any], structure: Any, outs: list[Tensor],
    may_be_sum: bool,
) -> None:  # fmt: skip
    """Note that results are made of a mixture, and are sums over rows if it is and the operation is linear.

    A sum times a zero that stands in the code is zero on every rank: so models tie what they differentiate to rows.
    """
    is_product = func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_)
    if (
        not marks.is_around
        and mixture.is_sum
        and is_product
        and any(type(leaf) in (int, float) and leaf == 0 for leaf in leaves)
    ):
        return
    kinds: dict[int, Found] = {}
    for i, leaf in enumerate(leaves):
        one = marks.mixtures.get(leaf) if isinstance(leaf, Tensor) else None
        if one is not None:
            kinds[i] = Made.SUM if one.is_sum else Made.MIXED
    is_sum = mixture.is_sum and may_be_sum
    found = verdict_of(func, leaves, structure, kinds, outs).found if is_sum else [Made.MIXED] * len(outs)
    for out, kind in zip(outs, found):
        if mixture.is_sum and kind is not Made.SUM:
            name = func.overloadpacket.__name__.strip("_")
            marks.mixtures.add(out, replace(mixture, name=name, line=user_line(), is_sum=False))
        else:
            is_alike = torch_private.is_view(func) or func.overloadpacket in _COPIES
            is_again = func.overloadpacket.__name__.removeprefix("a") == mixture.name.removeprefix("a")
            marks.mixtures.add(out, replace(mixture, is_direct=mixture.is_direct and (is_alike or is_again)))
