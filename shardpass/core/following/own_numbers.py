"""Numbers of this rank's rows as a script gets them: ordinary numbers, of which is known where they come from.

A script may print them, and make tensors of as many rows. A loss that is computed with them is another objective on
each rank.
"""

from __future__ import annotations

from typing import Any, cast


class _Own:
    """What arithmetic makes of a number of this rank's rows is one again."""

    def _computed(self, name: str, *others: Any) -> Any:
        kind = float if any(isinstance(one, float) for one in (self, *others)) else int
        return own_number(getattr(kind, name)(kind(cast(Any, self)), *others))

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


class OwnInt(_Own, int):  # type: ignore[misc]
    """A whole number that was made of how many rows this rank has."""

    def __reduce__(self) -> Any:
        return int, (int(self),)


class OwnFloat(_Own, float):  # type: ignore[misc]
    """Another number that was made of how many rows this rank has."""

    def __reduce__(self) -> Any:
        return float, (float(self),)


def own_number(number: Any) -> Any:
    """`number` as one of this rank's rows; what is no number as it is."""
    if type(number) is int:
        return OwnInt(number)
    return OwnFloat(number) if type(number) is float else number


def is_own_number(value: Any) -> bool:
    """Whether `value` was made of how many rows this rank has."""
    return isinstance(value, _Own)
