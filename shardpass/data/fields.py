"""Stored fields by name, read and verified when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardpass.data.manifest import FieldInfo
from shardpass.data.tensor_file import TensorFile


class Fields(Mapping[str, Tensor]):
    """The fields of one node or edge type: a read-only mapping from name to tensor, [num_rows, ...].

    When you first ask for a field, its bytes are checked against the store's checksums, and the tensor is kept. A field
    of a single part is a view of the memory-mapped file; writing to it does not change the file. A field of several
    parts is copied into one tensor.

    `info` has the dtype and row shape of every field. `join` makes one tensor of those of all files; by default the
    rows of one follow those of another.

    Raises:
        StoreError: on `fields[name]`, when its bytes are altered. The error names the file.
        KeyError: on `fields[name]`, when there is no such field. The error lists those that there are.
    """

    def __init__(
        self,
        info: Mapping[str, FieldInfo],
        keys: Mapping[str, str],
        files: Sequence[TensorFile],
        join: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> None:
        self.info = dict(info)
        self._keys, self._files, self._join = dict(keys), list(files), join or join_rows
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.info:
            raise KeyError(f"there is no field {name!r}; the store holds {sorted(self.info) or 'none here'}")
        if name not in self._tensors:
            rows = self._join([file.verified(self._keys[name]) for file in self._files])
            if (dtype := self.info[name].dtype).is_complex:  # torch reads both halves at once, and files align halves
                rows = torch.view_as_complex(rows if rows.data_ptr() % dtype.itemsize == 0 else rows.clone())
            self._tensors[name] = rows
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def __repr__(self) -> str:
        described = (f"{name}: {info.dtype}{list(info.shape)}" for name, info in self.info.items())
        return f"Fields({', '.join(described)})"


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all tensors. If there is a single tensor, they are not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
