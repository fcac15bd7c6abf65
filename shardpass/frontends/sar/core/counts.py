"""Counts of this rank's nodes and edges, with which scripts may compute: SAR's graphs count own nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardpass.frontends.dgl.counts import EdgeCount, NodeCount


class _Computes:
    """A number that is this rank's own in arithmetic."""

    __truediv__: Any = int.__truediv__
    __rtruediv__: Any = int.__rtruediv__
    __floordiv__: Any = int.__floordiv__
    __rfloordiv__: Any = int.__rfloordiv__
    __mod__: Any = int.__mod__
    __rmod__: Any = int.__rmod__
    __pow__: Any = int.__pow__
    __rpow__: Any = int.__rpow__
    __mul__: Any = int.__mul__
    __float__: Any = int.__float__


class PlainNodeCount(_Computes, NodeCount):
    """How many nodes this rank has."""


class PlainEdgeCount(_Computes, EdgeCount):
    """How many edges this rank has."""


def plain(count: Any) -> int:
    """`count`, with which may be computed. Comparing it with 0 still asks for all ranks, as DGL's layers need it."""
    kind = PlainEdgeCount if isinstance(count, EdgeCount) else PlainNodeCount
    found: int = kind.of(int(count), count.total)
    return found


def total(counts: Mapping[Any, int], kind: Any) -> int:
    """The count of a type, or the sum of all if `kind` is `None`."""
    if kind is not None and kind not in counts:
        raise KeyError(f"no type {kind!r}; there are: {list(counts)}")
    return sum(counts.values()) if kind is None else counts[kind]
