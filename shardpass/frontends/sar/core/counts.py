"""Counts of this rank's nodes and edges, with which scripts may compute: SAR's graphs count own nodes and edges."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from shardpass.frontends.dgl.counts import EdgeCount, NodeCount


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.int64) else value


def _plainly(operation: Callable[..., Any]) -> Any:
    return lambda mine, *others: operation(_plain(mine), *map(_plain, others))


def _reflected(operation: Callable[[Any, Any], Any]) -> Any:
    return lambda mine, other: operation(_plain(other), _plain(mine))


class _Computes:
    """A number that is this rank's own in arithmetic, as an `int` is: NumPy divides by zero, and overflows.

    Comparing it with 0 still asks for all ranks, as DGL's layers need it.
    """

    __truediv__, __rtruediv__ = _plainly(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _plainly(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _plainly(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _plainly(operator.pow), _reflected(operator.pow)
    __mul__, __rmul__ = _plainly(operator.mul), _reflected(operator.mul)
    __divmod__, __rdivmod__ = _plainly(divmod), _reflected(divmod)
    __rshift__, __lshift__ = _plainly(operator.rshift), _plainly(operator.lshift)
    __and__, __or__, __xor__ = _plainly(operator.and_), _plainly(operator.or_), _plainly(operator.xor)
    __float__, __round__, item = _plainly(float), _plainly(round), _plainly(int)
    __array__: Any = np.int64.__array__
    __array_ufunc__: Any = None


class OwnNodeCount(_Computes, NodeCount):
    """How many nodes this rank has."""


class OwnEdgeCount(_Computes, EdgeCount):
    """How many edges this rank has."""
