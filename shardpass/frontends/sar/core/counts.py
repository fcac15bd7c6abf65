"""Counts of this rank's nodes and edges, with which scripts may compute: SAR's graphs count own nodes and edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardpass.frontends.dgl.counts import NodeCount


class OwnNodeCount(int):
    """How many nodes this rank has, an `int` in arithmetic.

    Whether there are any, or more than a number, is answered for all ranks together, as DGL's layers need it.
    """

    total: int

    def __new__(cls, own: int, total: int) -> OwnNodeCount:
        """`own` on this rank, `total` on all ranks."""
        count = super().__new__(cls, own)
        count.total = total
        return count

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.total)

    def _compared(self, operation: Callable[[Any, Any], bool], other: Any) -> bool:
        if isinstance(other, OwnNodeCount):
            return operation(int(self), int(other))
        return operation(self.total, other)

    __gt__, __ge__, __lt__, __le__ = NodeCount.__gt__, NodeCount.__ge__, NodeCount.__lt__, NodeCount.__le__
    __bool__ = NodeCount.__bool__


class OwnEdgeCount(OwnNodeCount):
    """How many edges this rank has. ``== 0`` asks for all ranks too, since loops skip empty edge types by it."""

    def __eq__(self, other: object) -> bool:
        return self.total == 0 if isinstance(other, int) and other == 0 else int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__
