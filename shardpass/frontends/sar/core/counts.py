"""Counts of this rank's nodes and edges, with which scripts may compute: SAR's graphs count own nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardpass.frontends.dgl.counts import EdgeCount, NodeCount


class _Computes:
    """A number that is this rank's own in arithmetic."""

    __truediv__: Any = np.int64.__truediv__
    __rtruediv__: Any = np.int64.__rtruediv__
    __floordiv__: Any = np.int64.__floordiv__
    __rfloordiv__: Any = np.int64.__rfloordiv__
    __mod__: Any = np.int64.__mod__
    __rmod__: Any = np.int64.__rmod__
    __pow__: Any = np.int64.__pow__
    __rpow__: Any = np.int64.__rpow__
    __mul__: Any = np.int64.__mul__
    __rmul__: Any = np.int64.__rmul__
    __float__: Any = np.int64.__float__
    __array__: Any = np.int64.__array__
    __array_ufunc__: Any = None


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
