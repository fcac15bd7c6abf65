"""The nodes or the edges of a DGL partition: original ids where they are known, and fields in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.data.readers.dgl_config import IdRanges
from shardpass.data.readers.dgl_files import Stored, is_permutation, read_tensors
from shardpass.data.rows import as_tensor

ORIGINAL = "orig_id"
"""What DGL calls original ids: in the graphs of its older versions, and in fields of careful users."""

_Owner = tuple[int, str]


class TypedRows:
    """All nodes or all edges of a partition. A type goes by its number, the index in `kinds`.

    Args:
        what: ``"node"`` or ``"edge"``.
        kinds: the types, as in DGL.
        labels: their names in DGL's files.
        ranges: DGL's ids of each type in each part.
        features: the file of features of each part.
    """

    def __init__(
        self, what: str, kinds: Sequence[Any], labels: Sequence[str], ranges: IdRanges, features: Sequence[Path]
    ) -> None:
        self.what, self.kinds, self.ranges = what, kinds, ranges
        self._labels, self._features = labels, features
        # where DGL's distributed partitioning pipeline saves original ids if it is told to
        self._originals = [path.with_name(f"orig_{what[0]}ids.dgl") for path in features]
        self._orders: dict[int, np.ndarray] = {}

    def find_orders(self, given: Any, graphs: Mapping[int, np.ndarray]) -> None:
        """Settle the original ids: those `given` by the user, else those of a file, of the graphs, or of a field.

        Raises:
            ValueError: ids that are not each there once; a field of such ids is a field like any other instead.
            TypeError: given ids that are no integers.
        """
        if given is not None:
            self._orders = self._given(given)
            return
        for number, stored in {**graphs, **self._filed()}.items():
            # DGL counts on from one type to the next in its graphs
            ids = stored - stored.min() if _are_ids(stored) and stored.size and stored.min() > 0 else stored
            if not _are_ids(ids) or not is_permutation(ids):
                raise ValueError(
                    f"the files in {self._features[0].parent.parent} are altered or mixed: the original "
                    f"{self.what} ids of {self.kinds[number]!r} are not each there once"
                )
            self._orders[number] = ids
        for (number, _), field in self._gathered(self._features, self._original_field).items():
            if number not in self._orders and _are_ids(field.values) and is_permutation(field.values):
                self._orders[number] = field.values.astype(np.int64)

    def order(self, number: int) -> np.ndarray | None:
        """The original id of each row of a type in the order of DGL's ids, or None where it is not known."""
        return self._orders.get(number)

    def fields(self) -> list[dict[str, Tensor]]:
        """The fields of each type by name, rows by original id where it is known.

        Raises:
            ValueError: a part that lacks a field, or has it in another dtype or shape; the file is named.
        """
        fields: list[dict[str, Tensor]] = [{} for _ in self.kinds]
        for (number, name), stored in sorted(self._gathered(self._features, self._field, self._orders).items()):
            rows = torch.from_numpy(stored.values).view(stored.dtype)
            fields[number][name] = rows.view(torch.bool) if _was_mask(name, rows) else rows
        return fields

    def parts(self, number: int) -> Tensor:
        """The part of each row of a type, int32, rows as in `fields`."""
        parts = np.empty(self.ranges.totals[number], np.int32)
        for part in range(self.ranges.num_parts):
            parts[self._places(number, part, self._orders)] = part
        return torch.from_numpy(parts)

    def described(self) -> str:
        """Which ids these are, in words."""
        known = len(self._orders)
        which = "original" if known == len(self.kinds) else "DGL's new" if not known else "some original, some new"
        return f"{which} {self.what} ids"

    def _places(self, number: int, part: int, orders: Mapping[int, np.ndarray]) -> slice | np.ndarray:
        rows = self.ranges.rows(number, part)
        return orders[number][rows] if number in orders else rows

    def _gathered(
        self,
        files: Sequence[Path],
        owner_of: Callable[[str, Path], _Owner | None],
        orders: Mapping[int, np.ndarray] | None = None,
    ) -> dict[_Owner, Stored]:
        """The arrays of all parts as one for each type and name; rows by `orders`, else by DGL's ids."""
        found: dict[_Owner, Stored] = {}
        holders: dict[_Owner, set[int]] = {}
        for part, path in enumerate(files):
            for key, piece in read_tensors(path).items():
                owner = owner_of(key, path)
                if owner is None or not self._count(owner[0], part):
                    continue
                width, count = piece.values.shape[1:], self.ranges.totals[owner[0]]
                whole = found.setdefault(owner, _empty((count, *width), piece))
                if piece.dtype != whole.dtype or piece.values.shape != (
                    self._count(owner[0], part),
                    *whole.values.shape[1:],
                ):
                    raise ValueError(
                        f"{path} is altered: {key!r} is {piece.dtype} {list(piece.values.shape)}; expected "
                        f"{whole.dtype} {[self._count(owner[0], part), *whole.values.shape[1:]]}, as in other parts"
                    )
                whole.values[self._places(owner[0], part, orders or {})] = piece.values
                holders.setdefault(owner, set()).add(part)
        for (number, name), parts in holders.items():
            for part, path in enumerate(files):
                if part not in parts and self._count(number, part):
                    raise ValueError(f"{path} has no {name!r} of {self.kinds[number]!r}, which other parts have")
        return found

    def _count(self, number: int, part: int) -> int:
        rows = self.ranges.rows(number, part)
        return rows.stop - rows.start

    def _field(self, key: str, path: Path) -> _Owner:
        labels = [label for label in self._labels if key.startswith(f"{label}/")]
        if not labels:
            raise ValueError(f"{path}: {key!r} belongs to no type; expected <type>/<name> with one of {self._labels}")
        label = max(labels, key=len)  # a type's name may itself contain a slash
        return self._labels.index(label), key[len(label) + 1 :]

    def _original_field(self, key: str, path: Path) -> _Owner | None:
        owner = self._field(key, path)
        return owner if owner[1] == ORIGINAL else None

    def _filed(self) -> dict[int, np.ndarray]:
        """The original ids in files of their own."""
        if not any(path.exists() for path in self._originals):
            return {}

        def owner_of(key: str, path: Path) -> _Owner:
            if key not in self._labels:
                raise ValueError(f"{path}: {key!r} is no type of this graph: {list(self._labels)}")
            return self._labels.index(key), ORIGINAL

        return {number: ids.values for (number, _), ids in self._gathered(self._originals, owner_of).items()}

    def _given(self, given: Any) -> dict[int, np.ndarray]:
        if not isinstance(given, Mapping):
            if len(self.kinds) != 1:
                raise ValueError(
                    f"{self.what}_ids is one array; expected a dict with one for each of {list(self.kinds)}"
                )
            given = {self.kinds[0]: given}
        if set(given) != set(self.kinds):
            raise ValueError(f"{self.what}_ids has the types {list(given)}; the partition has {list(self.kinds)}")
        orders = {}
        for number, kind in enumerate(self.kinds):
            ids = as_tensor(given[kind], f"{self.what}_ids of {kind!r}").cpu().numpy()
            if ids.dtype.kind not in "iu":
                raise TypeError(f"{self.what}_ids of {kind!r} are {ids.dtype}; expected integers")
            count = self.ranges.totals[number]
            if ids.shape != (count,) or not is_permutation(ids):
                raise ValueError(f"{self.what}_ids of {kind!r} do not hold each of 0 .. {count - 1} once")
            orders[number] = ids.astype(np.int64)
        return orders


def _empty(shape: tuple[int, ...], like: Stored) -> Stored:
    return Stored(np.empty(shape, like.values.dtype.newbyteorder("=")), like.dtype)


def _are_ids(values: np.ndarray) -> bool:
    return values.ndim == 1 and values.dtype.kind in "iu"


def _was_mask(name: str, rows: Tensor) -> bool:
    """Whether a field was boolean before DGL stored it as uint8, which would be taken for row numbers."""
    return "mask" in name and rows.dtype is torch.uint8 and (not rows.numel() or int(rows.max()) <= 1)
