"""Places in the code of a model: which rows a plain number means depends on how many rows this rank has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.refusals import ALL_ROWS, refusal
from shardpass.core.following.row_count import OwnCount, leaves_of
from shardpass.core.following.rows import Rows

_CUTS = frozenset("__getitem__ narrow slice_scatter split tensor_split".split())


def check_places(name: str, args: Any, kwargs: Any, rows: Rows, counts: set[float]) -> None:
    """Refuse a slice or a split of rows whose bound is a plain number past the rows of this rank: it takes all of them.

    Args:
        name: of the function.
        args, kwargs: what it was given; the first argument is a tensor with rows.
        rows: where that tensor holds them.
        counts: plain numbers that are the number of own rows, which ``len`` gave away.
    """
    for dim, bound in _bounds(name, args, kwargs):
        is_all = bound == rows.size == rows.of.total  # on one rank
        is_plain = type(bound) is int and bound not in counts and abs(bound) < sys.maxsize and not is_all
        if dim % max(1, args[0].dim()) == rows.dim and is_plain and abs(bound) >= max(1, rows.size):
            raise refusal(f"`{name.strip('_')}` takes the {rows.of.name} up to number {bound}", ALL_ROWS)


def is_cut_by_count(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function cuts a tensor at the number of own rows."""
    return name in _CUTS and any(isinstance(bound, OwnCount) for _, bound in _bounds(name, args, kwargs))


def _bounds(name: str, args: Any, kwargs: Any) -> Iterator[tuple[int, Any]]:
    """The bounds of a function of places, each with its dimension."""
    if name in ("__getitem__", "__setitem__"):
        yield from _bounds_of_key(args[0], args[1])
    elif name in ("split", "split_with_sizes", "narrow", "slice_scatter"):
        at = {"split": 2, "split_with_sizes": 2, "narrow": 1, "slice_scatter": 2}[name]
        dim = kwargs.get("dim", args[at] if len(args) > at else 0)
        first = {"narrow": 2, "slice_scatter": 3}.get(name, 1)
        given = (*args[first : at if at > first else None], *(one for key, one in kwargs.items() if key != "dim"))
        yield from ((dim, one) for one in leaves_of(given) if not isinstance(one, Tensor))


def _bounds_of_key(table: Tensor, key: Any) -> Iterator[tuple[int, Any]]:
    parts, dim = key if isinstance(key, tuple) else (key,), 0
    taken = sum(1 for part in parts if part is not None and part is not Ellipsis and not isinstance(part, bool))
    for part in parts:
        if part is Ellipsis:
            dim = table.dim() - (taken - dim)
        elif isinstance(part, slice):
            yield from ((dim, bound) for bound in (part.start, part.stop))
            dim += 1
        elif part is not None:
            is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
            dim += part.dim() if is_mask else 1
