"""The size of a row dimension while rows are followed: it may be a size again, but nothing may be computed from it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import RowSet
from shardpass.errors import RefusedError


class OwnCount(int):
    """A number that a rank has a part of. It may be a size; sums, differences and multiples are such numbers again."""

    def refuse(self) -> NoReturn:
        """Raise: something else is computed from this rank's number."""
        raise NotImplementedError

    def computed(self, operation: Callable[..., int], *others: int) -> Any:
        """What `operation` makes of this number and others, plain or of this rank."""
        raise NotImplementedError

    def _refused(self, *_: Any) -> NoReturn:
        self.refuse()

    def _combined(self, operation: Callable[..., int], other: Any) -> Any:
        if isinstance(other, float):
            self.refuse()
        return self.computed(operation, other) if isinstance(other, int) else NotImplemented

    def __add__(self, other: Any) -> Any:
        return self._combined(operator.add, other)

    def __sub__(self, other: Any) -> Any:
        return self._combined(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._combined(lambda mine, theirs: theirs - mine, other)

    def __mul__(self, other: Any) -> Any:
        return self._combined(operator.mul, other)

    def __neg__(self) -> Any:
        return self.computed(operator.neg)

    __radd__, __rmul__ = __add__, __mul__

    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refused
    __float__ = __divmod__ = __rdivmod__ = bit_length = _refused


class RowCount(OwnCount):
    """How many rows of a set this rank has, as ``x.size(0)`` gives it.

    Models use it as a size, and compare it with other sizes. A branch on it, or a quotient, would differ from that on
    the whole graph.
    """

    of: RowSet

    @classmethod
    def make(cls, count: int, of: RowSet) -> RowCount:
        """`count`, the number of rows of a set that this rank has."""
        made = cls(count)
        made.of = of
        return made

    def refuse(self) -> NoReturn:
        """Raise: something is computed from this rank's number of rows."""
        raise RefusedError(
            f"{user_line()}: computes with {int(self)}, the number of {self.of.name} that this rank holds, which "
            f"differs from that of the whole graph. Use the numbers of the whole graph (graph.total_nodes, "
            f"graph.total_edges), or int(...) where you do mean the rows of this rank"
        )

    def computed(self, operation: Callable[..., int], *others: int) -> Any:
        return RowCount.make(operation(int(self), *map(int, others)), self.of)

    def _compared(self, other: Any) -> int:
        if isinstance(other, int) and not isinstance(other, RowCount) and other == 0 and self.of.total is not None:
            return self.of.total  # a rank without rows takes the branch that the others take
        return int(self) if isinstance(other, RowCount) or other == 0 else self.refuse()

    def __eq__(self, other: object) -> bool:
        if type(other) is int and other == self.of.total != self.of.count:
            self.refuse()  # on the whole graph it is
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self._compared(other) < other

    def __le__(self, other: Any) -> bool:
        return self._compared(other) <= other

    def __gt__(self, other: Any) -> bool:
        return self._compared(other) > other

    def __ge__(self, other: Any) -> bool:
        return self._compared(other) >= other

    __hash__ = int.__hash__
