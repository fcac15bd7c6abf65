"""Numbers of this rank's rows as a script gets them: ordinary numbers, of which is known where they come from.

A script may print them, and make tensors of as many rows. A loss that is computed with them is another objective on
each rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardpass.core.following.row_count import OwnShape, over_numpy

_Integer: Any = np.int64  # whose methods are typed too narrowly for ours


class _Own:
    """What arithmetic makes of a number of this rank's rows is one again."""

    def _computed(self, name: str, *others: Any) -> Any:
        mine, *plain = map(_plain, (self, *others))
        kind = float if any(isinstance(one, float) for one in (mine, *plain)) else int
        return own_number(getattr(kind, name)(kind(mine), *plain))

    def __add__(self, other: Any) -> Any:
        return self._computed("__add__", other)

    def __radd__(self, other: Any) -> Any:
        return self._computed("__radd__", other)

    def __sub__(self, other: Any) -> Any:
        return self._computed("__sub__", other)

    def __rsub__(self, other: Any) -> Any:
        return self._computed("__rsub__", other)

    def __mul__(self, other: Any) -> Any:
        return self._computed("__mul__", other)

    def __rmul__(self, other: Any) -> Any:
        return self._computed("__rmul__", other)

    def __truediv__(self, other: Any) -> Any:
        return self._computed("__truediv__", other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._computed("__rtruediv__", other)

    def __floordiv__(self, other: Any) -> Any:
        return self._computed("__floordiv__", other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._computed("__rfloordiv__", other)

    def __mod__(self, other: Any) -> Any:
        return self._computed("__mod__", other)

    def __rmod__(self, other: Any) -> Any:
        return self._computed("__rmod__", other)

    def __pow__(self, other: Any) -> Any:
        return self._computed("__pow__", other)

    def __rpow__(self, other: Any) -> Any:
        return self._computed("__rpow__", other)

    def __neg__(self) -> Any:
        return self._computed("__neg__")

    def __round__(self, *digits: Any) -> Any:
        return self._computed("__round__", *digits)


@over_numpy
class OwnInt(_Integer, _Own):
    """A whole number that was made of how many rows this rank has.

    `isinstance` calls it an `int`. It is a number of NumPy's, which torch takes for a size, since ``0.5 / n`` does not
    ask a subclass of `int` what it makes of that.
    """

    __class__ = property(lambda self: int)  # type: ignore[assignment]

    def __eq__(self, other: Any) -> Any:
        return int(self) == _plain(other)

    def __ne__(self, other: Any) -> Any:
        return int(self) != _plain(other)

    def __lt__(self, other: Any) -> Any:
        return int(self) < _plain(other)

    def __le__(self, other: Any) -> Any:
        return int(self) <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        return int(self) > _plain(other)

    def __ge__(self, other: Any) -> Any:
        return int(self) >= _plain(other)

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return str(int(self))

    __str__ = __repr__

    def __format__(self, how: str) -> str:
        return format(int(self), how)

    def __reduce__(self) -> Any:
        return int, (int(self),)


class OwnFloat(_Own, float):  # type: ignore[misc]
    """Another number that was made of how many rows this rank has."""

    def __reduce__(self) -> Any:
        return float, (float(self),)


def own_number(number: Any) -> Any:
    """`number`, or each number of a shape, as one of this rank's rows; what is no number as it is."""
    if type(number) is torch.Size:
        return OwnShape(map(own_number, number))
    if type(number) is int:
        return OwnInt(number)
    return OwnFloat(number) if type(number) is float else number


def is_own_number(value: Any) -> bool:
    """Whether `value` was made of how many rows this rank has."""
    return issubclass(type(value), _Own)


def _plain(number: Any) -> Any:
    if isinstance(number, (float, np.floating)):
        return float(number)
    return int(number) if isinstance(number, (int, np.integer)) else number
