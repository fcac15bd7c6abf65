"""Numbers of this rank's rows as a script gets them: ordinary numbers, of which is known where they come from.

A script may print them, and make tensors of as many rows. A loss that is computed with them is another objective on
each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPERATIONS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "neg pos abs round floor ceil trunc"
)


def _own(name: str, kind: type) -> Callable[..., Any]:
    def computed(self: Any, *others: Any) -> Any:
        if any(isinstance(other, float) for other in others):
            return own_number(getattr(float, name)(float(self), *others))
        return own_number(getattr(kind, name)(self, *others))

    return computed


class OwnInt(int):
    """A whole number that was made of how many rows this rank has."""

    def __reduce__(self) -> Any:
        return int, (int(self),)


class OwnFloat(float):
    """Another number that was made of how many rows this rank has."""

    def __reduce__(self) -> Any:
        return float, (float(self),)


for _kind, _plain in ((OwnInt, int), (OwnFloat, float)):
    for _name in _OPERATIONS.split():
        setattr(_kind, f"__{_name}__", _own(f"__{_name}__", _plain))


def own_number(number: Any) -> Any:
    """`number` as one of this rank's rows; what is no number as it is."""
    if type(number) is int:
        return OwnInt(number)
    return OwnFloat(number) if type(number) is float else number


def is_own_number(value: Any) -> bool:
    """Whether `value` was made of how many rows this rank has."""
    return isinstance(value, (OwnInt, OwnFloat))
