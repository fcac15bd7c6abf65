"""The one owner of everything that is derived from a graph and kept for as long as the graph lives."""

from __future__ import annotations

from typing import Any, TypeVar

Kind = TypeVar("Kind")


class Caches:
    """What was derived from one graph, one object per type: the owner of all its caches."""

    def __init__(self) -> None:
        self._by_type: dict[type, Any] = {}

    def of(self, kind: type[Kind]) -> Kind:
        """The object of type `kind`, made without arguments when it is first asked for."""
        found: Kind = self._by_type.setdefault(kind, kind())
        return found
