"""The fields of all nodes or all edges of a DGL partition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardpass.data.readers.dgl_partitions.config import IdRanges
from shardpass.data.readers.dgl_partitions.files import Stored, read_tensors


def read_fields(labels: Sequence[str], ranges: IdRanges, paths: Sequence[Path]) -> list[dict[str, Tensor]]:
    """The fields of each type by name, with rows in the order of DGL's ids.

    Args:
        labels: the types, as in DGL's files.
        paths: the file of fields of each part.

    Raises:
        ValueError: when a part lacks a field, or has it in another dtype or shape. The error names the file.
    """
    found: list[dict[str, Stored]] = [{} for _ in labels]
    pieces = [{owner_of(key, labels, path): piece for key, piece in read_tensors(path).items()} for path in paths]
    for part, path in enumerate(paths):
        for number, name in sorted(key for keys in pieces for key in keys):
            rows, label = ranges.rows(number, part), labels[number]
            if rows.start == rows.stop:
                continue
            if (number, name) not in pieces[part]:
                raise ValueError(f"{path} has no {name!r} of {label!r}, which other parts have")
            piece = pieces[part][number, name]
            whole = found[number].setdefault(name, _empty(ranges.totals[number], piece))
            expected = (rows.stop - rows.start, *whole.values.shape[1:])
            if (piece.dtype, piece.values.shape) != (whole.dtype, expected):
                raise ValueError(
                    f"{path} is altered: {name!r} of {label!r} is {piece.dtype} {list(piece.values.shape)}; "
                    f"expected {whole.dtype} {list(expected)}, as in other parts"
                )
            whole.values[rows] = piece.values
    return [{name: _as_tensor(name, stored) for name, stored in fields.items()} for fields in found]


def owner_of(key: str, labels: Sequence[str], path: Path) -> tuple[int, str]:
    """The number of the type and the name of a field that is stored as ``<type>/<name>``.

    Raises:
        ValueError: when there is no such type. The error names `path`.
    """
    owners = [label for label in labels if key.startswith(f"{label}/")]
    if not owners:
        raise ValueError(f"{path}: {key!r} belongs to no type; expected <type>/<name> with one of {list(labels)}")
    label = max(owners, key=len)  # a type's name may itself contain a slash
    return labels.index(label), key[len(label) + 1 :]


def _empty(count: int, like: Stored) -> Stored:
    shape = (count, *like.values.shape[1:])
    return Stored(np.empty(shape, like.values.dtype.newbyteorder("=")), like.dtype)


def _as_tensor(name: str, stored: Stored) -> Tensor:
    return as_mask(name, torch.from_numpy(stored.values).view(stored.dtype))


def as_mask(name: str, rows: Tensor) -> Tensor:
    """`rows`, as booleans if they are a mask. DGL stored it as uint8, which torch takes for row numbers."""
    is_mask = "mask" in name and rows.dtype is torch.uint8 and (not rows.numel() or int(rows.max()) <= 1)
    return rows.view(torch.bool) if is_mask else rows
