"""The one owner of what a run keeps: found by its type, and by the object that it was derived from."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Kind = TypeVar("Kind")


class Caches:
    """What one rank keeps during a run.

    Halo plans, shards and options are plain values. What is derived from them and is worth keeping lives here, for as
    long as the object it was derived from, and must not refer to that object.
    """

    def __init__(self) -> None:
        self._of_run: dict[type, Any] = {}
        self._of_objects: WeakKeyDictionary[object, dict[type, Any]] = WeakKeyDictionary()

    def of(self, kind: type[Kind], source: object | None = None) -> Kind:
        """The object of type `kind` that is kept for `source`, or for the whole run; made when first asked for.

        Args:
            kind: a class that is called without arguments.
            source: what it is derived from, such as a halo plan; compared by identity.
        """
        by_type = self._of_run if source is None else self._of_objects.setdefault(source, {})
        if kind not in by_type:
            by_type[kind] = kind()
        found: Kind = by_type[kind]
        return found
