"""Places in the code of a model: which rows a plain number means depends on how many rows this rank has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.refusals import ALL_ROWS, refusal
from shardpass.core.following.row_count import leaves_of
from shardpass.core.following.rows import Rows

PLACES = frozenset("__getitem__ __setitem__ narrow slice_scatter split split_with_sizes".split())
"""Functions of a tensor and of places in it."""


def check_places(bounds: Iterable[tuple[int, Any]], table: Tensor, rows: Rows, counts: set[float]) -> None:
    """Refuse a plain number past the rows of this rank as a bound of rows: torch would take it for their end.

    Args:
        bounds: what `bounds_of` gives.
        table: a tensor with rows.
        rows: where it holds them.
        counts: plain numbers that are the number of own rows, which ``len`` gave away.
    """
    for dim, bound in bounds:
        if type(bound) is not int or dim % max(1, table.dim()) != rows.dim or abs(bound) == sys.maxsize:
            continue
        is_all = bound in counts or bound == rows.size == rows.of.total
        if abs(bound) >= rows.size and not is_all:
            raise refusal(f"the number {bound} stands for a place among the {rows.of.name}", ALL_ROWS)


def bounds_of(name: str, args: Any, kwargs: Any) -> Iterator[tuple[int, Any]]:
    """The numbers by which a function of `PLACES` cuts its first argument, each with its dimension."""
    if name in ("__getitem__", "__setitem__"):
        yield from _bounds_of_key(args[0], args[1])
        return
    names = {"narrow": ("dim", "start", "length"), "slice_scatter": ("src", "dim", "start", "end", "step")}
    given = dict(zip(names.get(name, ("sizes", "dim")), args[1:])) | kwargs
    dim = given.pop("dim", 0)
    yield from ((dim, one) for one in leaves_of([*given.values()]) if not isinstance(one, Tensor))


def _bounds_of_key(table: Tensor, key: Any) -> Iterator[tuple[int, Any]]:
    parts, dim = key if isinstance(key, tuple) else (key,), 0
    for number, part in enumerate(parts):
        if part is Ellipsis:
            dim = table.dim() - sum(map(_dims_taken, parts[number + 1 :]))
        elif isinstance(part, slice):
            yield from ((dim, bound) for bound in (part.start, part.stop))
        dim += _dims_taken(part)


def _dims_taken(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if is_mask else 1
