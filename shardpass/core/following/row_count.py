"""The size of a row dimension while rows are followed: it may be a size again, but nothing may be computed from it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import RowSet
from shardpass.errors import RefusedError

_Number: Any = np.int64  # whose methods are typed too narrowly for ours


class OwnCount(_Number):
    """A number that a rank has a part of. It may be a size; sums, differences and multiples are such numbers again.

    It is no `int`, since ``1.0 / n`` and ``math.log(n)`` do not ask a subclass of `int` what it makes of that. torch
    takes NumPy's numbers wherever it takes an `int`. `isinstance` calls it one, as it does the plain number that a call
    which nobody follows gets.
    """

    __class__ = property(lambda self: int)  # type: ignore[assignment]

    def __new__(cls, count: int, *_: Any) -> Any:
        return super().__new__(cls, count)

    def refuse(self) -> NoReturn:
        """Raise: something else is computed from this rank's number."""
        raise NotImplementedError

    def computed(self, operation: Callable[..., int], *others: Any) -> Any:
        """What `operation` makes of this number and others, plain or of this rank."""
        raise NotImplementedError

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse()

    def _combined(self, operation: Callable[..., int], other: Any) -> Any:
        if isinstance(other, float):
            self.refuse()
        return self.computed(operation, other) if isinstance(other, (int, OwnCount)) else NotImplemented

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

    def __abs__(self) -> Any:
        return self.computed(abs)

    __radd__, __rmul__ = __add__, __mul__

    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refused
    __divmod__ = __rdivmod__ = __float__ = __complex__ = __array__ = __array_ufunc__ = _refused
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refused
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __round__ = _refused
    item = tolist = clip = astype = _refused  # of NumPy's numbers

    def __bool__(self) -> bool:
        return self > 0

    def __eq__(self, other: object) -> Any:
        return int(self) == (int(other) if isinstance(other, OwnCount) else other)

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return str(int(self))

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __format__(self, how: str) -> str:
        return format(int(self), how)


class RowCount(OwnCount):
    """How many rows of a set this rank has, as ``x.size(0)`` gives it.

    Models use it as a size, and compare it with other sizes. A branch on it, or a quotient, would differ from that on
    the whole graph.

    Args:
        count: the number.
        of: the set.
    """

    def __init__(self, count: int, of: RowSet) -> None:
        self.of = of

    def refuse(self) -> NoReturn:
        """Raise: something is computed from this rank's number of rows."""
        raise RefusedError(
            f"{user_line()}: computes with {int(self)}, the number of {self.of.name} that this rank holds, which "
            f"differs from that of the whole graph. Use the numbers of the whole graph (graph.total_nodes, "
            f"graph.total_edges)"
        )

    def computed(self, operation: Callable[..., int], *others: Any) -> Any:
        return RowCount(operation(int(self), *map(int, others)), self.of)

    def __floordiv__(self, other: Any) -> Any:
        """The number of rows times a divisor of what each has, as ``h.numel() // h.size(1)`` is."""
        each, rest = divmod(int(self), max(1, self.of.count))
        if type(other) is not int or other < 1 or rest or each % other:
            self.refuse()
        return self.computed(operator.floordiv, other)

    def _compared(self, operation: Callable[[int, int], bool], other: Any) -> bool:
        if isinstance(other, OwnCount):
            return operation(int(self), int(other))
        if isinstance(other, int) and other in (0, 1) and self.of.total is not None:
            return operation(self.of.total, other)  # a rank without rows takes the branch that the others take
        if other in (0, int(self)):  # such as ``edge_index.max() + 1``, which is the number of own rows too
            return operation(int(self), other)
        self.refuse()

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, OwnCount) and isinstance(other, int) and other == self.of.total != self.of.count:
            self.refuse()  # on the whole graph it is
        return super().__eq__(other)

    __hash__ = OwnCount.__hash__

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)


class OwnShape(tuple):  # type: ignore[type-arg]
    """The shape of a tensor with rows: a tuple, since `torch.Size` makes each of its numbers an `int`."""

    __class__ = property(lambda self: torch.Size)  # type: ignore[assignment]

    @staticmethod
    def of(sizes: Iterable[Any]) -> Any:
        """The shape of these sizes: a `torch.Size` if none of them is an own count."""
        sizes = tuple(sizes)
        return OwnShape(sizes) if any(isinstance(size, OwnCount) for size in sizes) else torch.Size(sizes)

    def numel(self) -> Any:
        """The product of the sizes."""
        return math.prod(self)

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return OwnShape.of(found) if isinstance(place, slice) else found

    def __add__(self, other: Any) -> Any:
        return OwnShape.of((*self, *other))

    def __radd__(self, other: Any) -> Any:
        return OwnShape.of((*other, *self))


def plain_sizes(value: Any) -> Any:
    """`value` with an `int` in place of each own count in it, in tuples, lists and slices too."""
    if isinstance(value, OwnCount):
        return int(value)
    if type(value) in (tuple, list, OwnShape) and any(isinstance(v, (OwnCount, tuple, list, slice)) for v in value):
        return list(map(plain_sizes, value)) if isinstance(value, list) else tuple(map(plain_sizes, value))
    if isinstance(value, slice):
        return slice(*map(plain_sizes, (value.start, value.stop, value.step)))
    return value


def leaves_of(value: Any) -> Iterator[Any]:
    """What `value` holds that is no tuple and no list."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves_of(one)
    else:
        yield value
