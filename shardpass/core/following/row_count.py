"""The size of a row dimension while rows are followed: it may be a size again, but nothing may be computed from it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from shardpass.core.following.user_line import is_asked_by, user_line
from shardpass.core.ranks import RowSet, torch_private
from shardpass.errors import RefusedError

_READ_BY = torch_private.VMAP_SIZES, "torch_geometric.edge_index"
_LIBRARIES = ("shardpass.", "torch_geometric.", "torch.", "dgl.", "numpy.")


class OwnCount:
    """A number that a rank has a part of. It may be a size; sums, differences and multiples are such numbers again.

    `isinstance` calls it an `int`, as the plain number is that a call which nobody follows gets. A class of a number
    that torch or NumPy takes for a size derives from it.
    """

    __class__ = property(lambda self: int)  # type: ignore[assignment]
    own: int
    """What it is on this rank."""

    def refuse(self) -> NoReturn:
        """Raise: something else is computed from this rank's number."""
        raise NotImplementedError

    def computed(self, operation: Callable[..., int], *others: Any) -> Any:
        """What `operation` makes of this number and others, plain or of this rank."""
        raise NotImplementedError

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse()

    def _share(self, operation: Callable[..., Any], other: Any) -> Any:
        self.refuse()

    def _combined(self, operation: Callable[..., int], other: Any) -> Any:
        if isinstance(other, (float, np.floating)):
            return self._share(operation, other)
        return self.computed(operation, other) if isinstance(other, (int, np.integer, OwnCount)) else NotImplemented

    def __add__(self, other: Any) -> Any:
        return self._combined(operator.add, other)

    def __sub__(self, other: Any) -> Any:
        return self._combined(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._combined(lambda mine, theirs: theirs - mine, other)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, (list, tuple, str, bytes)):
            self.refuse()
        return self._combined(operator.mul, other)

    def __neg__(self) -> Any:
        return self.computed(operator.neg)

    def __abs__(self) -> Any:
        return self.computed(abs)

    def __pos__(self) -> Any:
        return self

    __radd__, __rmul__ = __add__, __mul__

    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refused
    __divmod__ = __rdivmod__ = __float__ = __complex__ = __array__ = _refused
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refused
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refused
    __array_ufunc__ = _refused
    item = tolist = clip = astype = _refused  # of NumPy's numbers
    bit_length = bit_count = to_bytes = as_integer_ratio = is_integer = conjugate = _refused  # of Python's
    numerator = denominator = real = imag = property(_refused)

    def __bool__(self) -> bool:
        return self > 0  # type: ignore[operator, no-any-return]

    def __eq__(self, other: object) -> Any:
        return self.own == own_of(other)

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.own)

    def __repr__(self) -> str:
        return str(self.own)

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return int, (self.own,)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __format__(self, how: str) -> str:
        return format(self.own, how)


def over_numpy(kind: type) -> type:
    """A class, decorated, with the methods of its last base before those of its first, which is a number of NumPy's.

    NumPy and torch look at the first base, and end the process where that is no number.
    """
    for name, value in vars(kind.__mro__[-2]).items():
        if name not in vars(kind) and name not in ("__dict__", "__weakref__", "__class__"):
            setattr(kind, name, value)
    return kind


def own_of(number: Any) -> Any:
    """A number as it is on this rank, whether all ranks have it alike or not."""
    return number.own if isinstance(number, OwnCount) else number


class RowCount(OwnCount, torch.SymInt):
    """How many rows of a set this rank has, as ``x.size(0)`` gives it.

    Models use it as a size, and compare it with other sizes. A branch on it, or a quotient, would differ from that on
    the whole graph. torch takes a `SymInt` wherever it takes a size, and NumPy, `range`, lists, dicts and `math` ask it
    for a plain number, which is refused.

    Args:
        count: the number.
        of: the set.
        given: plain numbers that are the number of own rows, which ``len`` gave away.
        total: what it is on the whole graph, if that is known; for the number itself, that of the set.

    Attributes:
        is_of_tensor: it is the size of a tensor, which a call that is not followed tells as a plain number.
    """

    is_of_tensor = False

    def __init__(self, count: int, of: RowSet, given: set[float] | None = None, total: int | None = None) -> None:
        self.own, self.of, self.given = int(count), of, set() if given is None else given
        self.total = of.total if total is None and self.own == of.count else total

    def refuse(self) -> NoReturn:
        """Raise: something is computed from this rank's number of rows."""
        raise RefusedError(
            f"{user_line()}: computes with {self.own}, the number of {self.of.name} that this rank holds, which "
            f"differs from that of the whole graph. Use the numbers of the whole graph (graph.total_nodes, "
            f"graph.total_edges)"
        )

    _refused = OwnCount._refused
    __index__ = __int__ = _refused  # type: ignore[assignment]

    def __hash__(self) -> int:  # noqa: PLE0309  it raises
        """None, as of a symbol: einops then computes with it, and does not look up what it has computed for others."""
        if is_asked_by("einops."):
            raise TypeError("a number of own rows has no hash")
        self.refuse()

    @property
    def node(self) -> Any:
        """What C++ reads of a size where no function mode sees it, as vmap does, and PyG's class of edges."""
        return torch_private.PlainSize(self.own) if is_asked_by(*_READ_BY) else self.refuse()

    def __repr__(self) -> str:
        """No plain number, which code might read from the text."""
        return f"{self.own} of {self.total or 'all'}"

    __str__ = __repr__

    def __format__(self, how: str) -> str:
        return format(repr(self), how.strip("dn,_"))

    def _share(self, operation: Callable[..., Any], other: float) -> Any:
        """A share of the edges, such as edge dropout keeps of those of each rank. It is a size and nothing else."""
        if operation is not operator.mul or not self.of.is_of_edges or not 0 <= other <= 1:
            self.refuse()
        share = int(self.own * other)
        self.given.add(share)
        return share

    def computed(self, operation: Callable[..., int], *others: Any) -> Any:
        totals = [other.total if isinstance(other, RowCount) else other for other in (self, *others)]
        total = None if None in totals else operation(*totals)
        out = RowCount(operation(self.own, *map(own_of, others)), self.of, self.given, total)
        out.is_of_tensor = self.is_of_tensor
        return out

    def __floordiv__(self, other: Any) -> Any:
        """The number of rows times a divisor of what each has, as ``h.numel() // h.size(1)`` is; or how many times."""
        if isinstance(other, RowCount) and self.of == other.of and self.total and other.total:
            times, rest = divmod(self.total, other.total)
            return self.refuse() if rest or self.own != times * other.own else times
        is_told = other in self.given or self.of.count == self.of.total
        if is_told and other == self.of.count and self.own % max(1, other) == 0:
            return self.own // other  # as `len` has told it
        each, rest = divmod(self.own, max(1, self.of.count))
        if type(other) is not int or other < 1 or rest or each % other:
            self.refuse()
        return self.computed(operator.floordiv, other)

    def __mod__(self, other: Any) -> Any:
        """The rest, which is 0 for a divisor of what each row has, as for 1. einops asks whether it may divide."""
        each, rest = divmod(self.own, max(1, self.of.count))
        if type(other) is not int or other < 1 or rest or each % other or (self.total or 0) % other:
            self.refuse()
        return 0

    def _compared(self, operation: Callable[[Any, Any], bool], other: Any) -> bool:
        if isinstance(other, RowCount):
            if None in (self.total, other.total) and self.of != other.of:
                self.refuse()
            return operation(self.own, other.own) if self.of == other.of else operation(self.total, other.total)
        if other == self.own and other in self.given:
            return operation(self.own, other)
        if self.total is not None:  # every rank takes the branch that the whole graph takes, or would in later calls
            return operation(self.total, other) if self._is_alike(operation, other) else self.refuse()
        if other in (0, self.own) or is_asked_by(*_LIBRARIES):  # as ``edge_index.max() + 1`` is the number of own rows
            return operation(self.own, other)
        self.refuse()

    def __eq__(self, other: object) -> Any:
        if isinstance(other, RowCount) and self.of != other.of and None not in (self.total, other.total):
            return self.total == other.total
        if isinstance(other, OwnCount) or self.total is None or other in self.given or is_asked_by(*_LIBRARIES):
            return self.own == own_of(other)  # of the shapes of two tensors
        if (other == self.own != self.total) or not self._is_alike(operator.eq, other):
            self.refuse()  # which the other ranks would not find
        return other == self.total

    def _is_alike(self, operation: Callable[[Any, Any], bool], other: Any) -> bool:
        """Whether a call that is not followed decides as the whole graph does. Where there are no rows, nothing is."""
        answers_later = not self.is_of_tensor or not self.own
        return answers_later or operation(self.own, other) == operation(self.total, other)

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
        return value.own
    is_list = type(value) in (tuple, list, OwnShape, torch.Size)
    if is_list and any(isinstance(one, (OwnCount, tuple, list, slice)) for one in value):
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
