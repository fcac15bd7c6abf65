"""The fields of all nodes or all edges of a DGL partition, and their original ids where these are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardpass.data.readers.dgl_partitions.config import IdRanges
from shardpass.data.readers.dgl_partitions.files import Stored, is_permutation, read_tensors, reordered

ORIGINAL = "orig_id"
"""What DGL calls original ids: in the graphs of its older versions, and in fields of careful users."""

Fields = dict[str, Stored]


def read_fields(labels: Sequence[str], ranges: IdRanges, paths: Sequence[Path]) -> list[Fields]:
    """The fields of each type, rows by DGL's ids.

    Args:
        labels: the types, as in DGL's files.
        paths: the file of fields of each part.

    Raises:
        ValueError: when a part lacks a field, or has it in another dtype or shape. The error names the file.
    """
    found: list[Fields] = [{} for _ in labels]
    for part, path in enumerate(paths):
        pieces = {_owner(key, labels, path): piece for key, piece in _read(path).items()}
        for (number, name), piece in pieces.items():
            if not ranges.size(number, part):
                continue
            shape = (ranges.totals[number], *piece.values.shape[1:])
            empty = Stored(np.empty(shape, piece.values.dtype.newbyteorder("=")), piece.dtype)
            whole = found[number].setdefault(name, empty)
            expected = (ranges.size(number, part), *whole.values.shape[1:])
            if (piece.dtype, piece.values.shape) != (whole.dtype, expected):
                raise ValueError(
                    f"{path} is altered: {name!r} of {labels[number]!r} is {piece.dtype} {list(piece.values.shape)}; "
                    f"expected {whole.dtype} {list(expected)}, as in other parts"
                )
            whole.values[ranges.rows(number, part)] = piece.values
    for part, path in enumerate(paths):
        present = {_owner(key, labels, path) for key in _read(path)}
        for number, fields in enumerate(found):
            missing = [name for name in fields if (number, name) not in present]
            if missing and ranges.size(number, part):
                raise ValueError(f"{path} has no {missing[0]!r} of {labels[number]!r}, which other parts have")
    return found


def _read(path: Path) -> dict[str, Stored]:
    """The arrays of a file by ``<type>/<name>``."""
    of_ids = path.name.startswith("orig_")  # such a file has an array for each type, without a name
    return {f"{key}/{ORIGINAL}" if of_ids else key: stored for key, stored in read_tensors(path).items()}


def _owner(key: str, labels: Sequence[str], path: Path) -> tuple[int, str]:
    """The number of the type and the name of a field."""
    owners = [label for label in labels if key.startswith(f"{label}/")]
    if not owners:
        raise ValueError(f"{path}: {key!r} belongs to no type; expected <type>/<name> with one of {list(labels)}")
    label = max(owners, key=len)  # a type's name may itself contain a slash
    return labels.index(label), key[len(label) + 1 :]


class OriginalIds:
    """The original ids of all nodes or all edges of a partition. A type goes by its number, its index in `labels`.

    They are taken from files of their own, else from the graphs of the parts, else from a field ``orig_id``.

    Args:
        labels: the types, as in DGL's files.
        paths: the file of fields of each part.
        graphs: what the graphs of the parts say, -1 where they say nothing, by DGL's ids.
        fields: of each type, rows by DGL's ids.

    Raises:
        ValueError: when not each of the original ids of a type is there once. A field of such ids is a field like any
            other instead.
    """

    def __init__(
        self, labels: Sequence[str], ranges: IdRanges, paths: Sequence[Path], graphs: np.ndarray, fields: list[Fields]
    ) -> None:
        self._ranges, self._fields = ranges, fields
        self._orders: list[np.ndarray | None] = []
        # where DGL's distributed partitioning pipeline saves original ids if it is told to
        files = [path.with_name(f"orig_{ranges.what[0]}ids.dgl") for path in paths]
        saved = read_fields(labels, ranges, files) if any(path.exists() for path in files) else [{} for _ in labels]
        for label, of_file, of_graphs, own in zip(labels, saved, ranges.by_type(graphs), fields):
            ids = of_file[ORIGINAL].values if of_file else of_graphs if (of_graphs >= 0).any() else None
            if ids is not None:
                ids = _from_zero(ids)
                if not _are_ids(ids):
                    raise ValueError(
                        f"the files in {paths[0].parent.parent} are altered or mixed: the original "
                        f"{ranges.what} ids of {label!r} are not each there once"
                    )
            elif ORIGINAL in own and _are_ids(own[ORIGINAL].values):
                ids = own[ORIGINAL].values.astype(np.int64)
            self._orders.append(ids)

    def of(self, number: int, ids: np.ndarray) -> np.ndarray:
        """The original ids of DGL's ids within a type, or these if the original ones are not known."""
        order = self._orders[number]
        return ids if order is None else order[ids]

    def in_order(self, number: int, values: np.ndarray) -> np.ndarray:
        """The values of a type, given by DGL's ids, by original id where it is known."""
        order = self._orders[number]
        return values if order is None else reordered(values, order)

    def fields(self) -> list[dict[str, Tensor]]:
        """The fields of each type by name, rows by original id where it is known."""
        found: list[dict[str, Tensor]] = [{} for _ in self._fields]
        for number, fields in enumerate(self._fields):
            for name, stored in sorted(fields.items()):
                rows = torch.from_numpy(self.in_order(number, stored.values)).view(stored.dtype)
                found[number][name] = rows.view(torch.bool) if _was_mask(name, rows) else rows
        return found

    def parts(self) -> list[Tensor]:
        """The part of each row of each type, int32, rows as in `fields`."""
        parts = np.arange(self._ranges.num_parts, dtype=np.int32)
        return [
            torch.from_numpy(self.in_order(n, np.repeat(parts, sizes))) for n, sizes in enumerate(self._ranges.sizes)
        ]

    def described(self) -> str:
        """Which ids these are, in words."""
        known = sum(order is not None for order in self._orders)
        which = "original" if known == len(self._orders) else "some original, some new" if known else "DGL's new"
        return f"{which} {self._ranges.what} ids"


def _from_zero(ids: np.ndarray) -> np.ndarray:
    """The ids within their type. In its graphs, DGL counts on from one type to the next."""
    plain = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size
    return ids.astype(np.int64) - max(0, int(ids.min())) if plain else ids


def _are_ids(ids: np.ndarray) -> bool:
    return ids.ndim == 1 and ids.dtype.kind in "iu" and is_permutation(ids)


def _was_mask(name: str, rows: Tensor) -> bool:
    """Whether a field was boolean before DGL stored it as uint8, which would be taken for row numbers."""
    return "mask" in name and rows.dtype is torch.uint8 and (not rows.numel() or int(rows.max()) <= 1)
