"""Counts of this rank's nodes and edges, with which scripts may compute: SAR's graphs count own nodes and edges."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardpass.frontends.dgl.counts import EdgeCount, NodeCount


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.int64) else value


def _plainly(operation: Callable[[Any, Any], Any]) -> Any:
    return lambda mine, other: operation(_plain(mine), _plain(other))


def _reflected(operation: Callable[[Any, Any], Any]) -> Any:
    return lambda mine, other: operation(_plain(other), _plain(mine))


def _alone(operation: Callable[..., Any]) -> Any:
    return lambda mine, *others: operation(_plain(mine), *others)


class _Computes:
    """A number that is this rank's own in arithmetic, as an `int` is: NumPy divides by zero, and overflows."""

    __truediv__, __rtruediv__ = _plainly(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _plainly(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _plainly(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _plainly(operator.pow), _reflected(operator.pow)
    __mul__, __rmul__ = _plainly(operator.mul), _reflected(operator.mul)
    __divmod__, __rdivmod__ = _plainly(divmod), _reflected(divmod)
    __rshift__, __lshift__ = _plainly(operator.rshift), _plainly(operator.lshift)
    __and__, __or__, __xor__ = _plainly(operator.and_), _plainly(operator.or_), _plainly(operator.xor)
    __float__: Any = _alone(float)
    __round__: Any = _alone(round)
    item: Any = _alone(int)
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
