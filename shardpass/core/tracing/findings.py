"""What the calls of a layer found out about its functions, kept for its next calls."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

MOST_KEPT = 16  # findings of one layer; the least recently used goes first


class Dependence(NamedTuple):
    """What a function depends on besides its inputs.

    Args:
        values: compared by value.
        tensors: parameters and such, compared by identity.
    """

    values: Hashable
    tensors: tuple[Tensor, ...] = ()


class _Kept(NamedTuple):
    tensors: list[weakref.ref[Tensor]]
    value: object


class Findings:
    """What is known of the functions of one layer. Its frontend keeps it between calls.

    Attributes:
        passed: descriptions of structures with which the message function passed the row-wise check.
        mapped_first: by the description of linear maps, whether they are applied to nodes. They are left to the edges
            where wider rows would travel.
    """

    def __init__(self) -> None:
        self.passed: set[tuple[str, bool]] = set()
        self.mapped_first: dict[str, bool] = {}
        self._kept: dict[Hashable, _Kept] = {}

    def find(self, key: Hashable, depends_on: Dependence) -> Any:
        """What was kept for an equal `key` and the same dependence, or `None`."""
        kept = self._kept.pop((key, depends_on.values), None)
        if kept is None or not _are(depends_on.tensors, kept.tensors):
            return None
        self._kept[key, depends_on.values] = kept
        return kept.value

    def keep(self, key: Hashable, depends_on: Dependence, value: Any) -> None:
        """Keep `value`, which hangs on nothing else than `key` and `depends_on`."""
        tensors = [weakref.ref(tensor) for tensor in depends_on.tensors]
        self._kept.pop((key, depends_on.values), None)
        self._kept[key, depends_on.values] = _Kept(tensors, value)
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]


def _are(tensors: tuple[Tensor, ...], known: list[weakref.ref[Tensor]]) -> bool:
    return len(tensors) == len(known) and all(ref() is tensor for tensor, ref in zip(tensors, known))
