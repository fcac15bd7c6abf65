"""Stored fields by name, read and verified when they are first asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardpass.data.manifest import FieldInfo
from shardpass.data.tensor_file import TensorFile


class Fields(Mapping[str, Tensor]):
    """The fields of one node or edge type: a read-only mapping from name to tensor, [num_rows, ...].

    Asking for a field checks its bytes against the store's checksums and keeps the tensor. A field of a single part is
    a view of its file's memory, private to this process; those of several parts are copied into one tensor.

    `info` tells dtype and row shape of every field without reading any.

    Raises:
        StoreError: on `fields[name]`, naming the file whose bytes are altered.
        KeyError: on `fields[name]`, listing the fields there are.
    """

    def __init__(self, info: Mapping[str, FieldInfo], keys: Mapping[str, str], files: Sequence[TensorFile]) -> None:
        self.info = dict(info)
        self._keys, self._files = dict(keys), list(files)
        self._tensors: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.info:
            raise KeyError(f"there is no field {name!r}; the store holds {sorted(self.info) or 'none here'}")
        with self._lock:
            if name not in self._tensors:
                self._tensors[name] = read_joined(self._files, self._keys[name])
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


def read_joined(files: Sequence[TensorFile], key: str) -> Tensor:
    """One tensor of every file, verified, one after the other; of a single file without a copy."""
    tensors = [file.verified(key) for file in files]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
