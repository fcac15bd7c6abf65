"""What the calls of a layer found out about its message function, kept for its next calls."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from shardpass.core.tracing.structure import Structure

MOST_KEPT = 8  # structures of one layer; the least recently used goes first


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
    structure: Structure
    described: str


class Findings:
    """What is known of the message function of one layer. Its frontend keeps it between calls.

    Attributes:
        passed: descriptions of structures with which the message function passed the row-wise check.
        declined: descriptions of linear maps that are left to the edges, since wider rows would travel.
    """

    def __init__(self) -> None:
        self.passed: set[tuple[str, bool]] = set()
        self.declined: set[str] = set()
        self._kept: dict[Hashable, _Kept] = {}

    def find(self, key: Hashable, depends_on: Dependence) -> tuple[Structure, str] | None:
        """The structure that was kept for an equal `key` and the same dependence, and its description."""
        kept = self._kept.pop((key, depends_on.values), None)
        if kept is None or not _are(depends_on.tensors, kept.tensors):
            return None
        self._kept[key, depends_on.values] = kept
        return kept.structure, kept.described

    def keep(self, key: Hashable, depends_on: Dependence, structure: Structure, described: str) -> None:
        """Keep a structure, unless it uses other tensors than those of `depends_on`, or hangs on their numbers."""
        lasting = {id(tensor) for tensor in depends_on.tensors}
        used = [*structure.captures, *structure.outside, *(tensor for one in structure.maps for tensor in one.tensors)]
        if structure.reads_values or not {id(tensor) for tensor in used} <= lasting:
            return
        tensors = [weakref.ref(tensor) for tensor in depends_on.tensors]
        self._kept[key, depends_on.values] = _Kept(tensors, structure, described)
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]


def _are(tensors: tuple[Tensor, ...], known: list[weakref.ref[Tensor]]) -> bool:
    return len(tensors) == len(known) and all(ref() is tensor for tensor, ref in zip(tensors, known))
