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
    """
    pieces = [{owner_of(key, labels, path): piece for key, piece in read_tensors(path).items()} for path in paths]
    found: list[dict[str, Tensor]] = [{} for _ in labels]
    for number, name in sorted({key for keys in pieces for key in keys}):
        label, parts = labels[number], [part for part in range(len(paths)) if ranges.sizes[number, part]]
        stored: list[Stored] = []  # all are checked before memory is taken for any
        for part in parts:
            if (number, name) not in pieces[part]:
                raise ValueError(f"{paths[part]} has no {name!r} of {label!r}, which other parts have")
            stored.append(pieces[part][number, name])
            dtype, expected = stored[0].dtype, (int(ranges.sizes[number, part]), *stored[0].values.shape[1:])
            if (stored[-1].dtype, stored[-1].values.shape) != (dtype, expected):
                raise ValueError(
                    f"{paths[part]} is altered: {name!r} of {label!r} is {stored[-1].dtype} "
                    f"{list(stored[-1].values.shape)}; expected {dtype} {list(expected)}, as in other parts"
                )
        if stored:
            rows = torch.from_numpy(np.concatenate([piece.values for piece in stored]))
            found[number][name] = as_mask(name, rows.view(stored[0].dtype))
    return found


def owner_of(key: str, labels: Sequence[str], path: Path) -> tuple[int, str]:
    """The number of the type and the name of a field that is stored as ``<type>/<name>``."""
    owners = [label for label in labels if key.startswith(f"{label}/")]
    if not owners:
        raise ValueError(f"{path}: {key!r} belongs to no type; expected <type>/<name> with one of {list(labels)}")
    label = max(owners, key=len)  # a type's name may itself contain a slash
    return labels.index(label), key[len(label) + 1 :]


def as_mask(name: str, rows: Tensor) -> Tensor:
    """`rows`, as booleans if they are a mask. DGL stored it as uint8, which torch takes for row numbers."""
    is_mask = "mask" in name and rows.dtype is torch.uint8 and (not rows.numel() or int(rows.max()) <= 1)
    return rows.view(torch.bool) if is_mask else rows
