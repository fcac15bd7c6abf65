"""A file of named tensors in the safetensors format, with checksums that the caller keeps elsewhere.

The checksums of the header and of each tensor, and the size of the file, cover every byte.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardpass.core.ranks import (
    Blocks,
    bytes_of,
    header_of,
    places_in,
    read_header,
    refuse_irregular,
    tells_of_full_disk,
    write_blocks,
)
from shardpass.errors import StoreError

_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file: its size in bytes, and the SHA-256 of its header and of each tensor."""

    name: str
    bytes: int
    header_sha256: str
    tensors: dict[str, str]


def write_tensors(path: Path, tensors: Mapping[str, Blocks]) -> FileRecord:
    """The record of a new file with these tensors, which has been flushed to the disk."""
    header, num_bytes = header_of(tensors)
    with tells_of_full_disk(path, num_bytes), open(path, "xb") as file:
        file.write(header)
        checksums = write_blocks(file, tensors)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return FileRecord(path.name, size, hashlib.sha256(header).hexdigest(), checksums)


def _identity(file: Any) -> tuple[int, int]:
    """What tells an open file from another one that takes its name later."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


class TensorFile:
    """A file that `write_tensors` has written, with the record that it returned. It is memory-mapped.

    Raises:
        StoreError: when the file is missing, has another size, or its header is altered. The error names the file.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path, self.record = path, record
        try:
            refuse_irregular(path)
            with open(path, "rb") as file:
                size, self._identity = os.fstat(file.fileno()).st_size, _identity(file)
                header = read_header(file)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read ({error.strerror or error}); the store needs all its part files"
            ) from error
        if size != record.bytes:
            raise StoreError(
                f"{path} has {size} bytes, its manifest says {record.bytes}: the file is torn or belongs to another "
                "store; write the store again with shardpass.partition"
            )
        self._compare(hashlib.sha256(header).hexdigest(), record.header_sha256, "the header")
        try:
            self._file: Any = safe_open(path, framework="pt")
            self._places = places_in(header)
        except (SafetensorError, ValueError, LookupError) as error:
            raise StoreError(f"{path} is not as shardpass.partition writes it: {error}") from error
        if self._places.keys() != record.tensors.keys():
            raise StoreError(f"{path} does not hold the tensors that its manifest lists: write the store again")

    def tensor(self, key: str) -> Tensor:
        """A tensor whose memory is the file's, not verified yet. Writing to the tensor never reaches the file."""
        found: Tensor = self._file.get_tensor(key)
        return found

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """A copy of the numbers ``[start, stop)`` of a tensor, [stop - start], not verified. The file is not mapped."""
        info, first = self._places[key]
        raw = bytearray((stop - start) * info.dtype.itemsize)
        try:
            with open(self.path, "rb") as file:
                if _identity(file) != self._identity:
                    raise StoreError(f"{self.path} was replaced after the store was opened: load the store again")
                file.seek(first + start * info.dtype.itemsize)
                if file.readinto(raw) != len(raw):
                    raise StoreError(f"{self.path} has become shorter since it was opened; write the store again")
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read any more: {error.strerror or error}") from error
        return torch.frombuffer(raw, dtype=info.dtype) if raw else torch.empty(0, dtype=info.dtype)

    def blocks(self, key: str, mapped: bool = False) -> Iterator[Tensor]:
        """The numbers of a tensor in consecutive blocks, [n] each.

        They are copies, or if `mapped` views of the mapped file, whose pages are in memory from then on.
        """
        digest, (info, _) = hashlib.sha256(), self._places[key]
        count, step = math.prod(info.shape), _BLOCK_BYTES // info.dtype.itemsize
        whole = self.tensor(key).view(-1) if mapped else None
        for start in range(0, count, step):
            stop = min(start + step, count)
            block = self.read(key, start, stop) if whole is None else whole[start:stop]
            digest.update(bytes_of(block))
            yield block
        self._compare(digest.hexdigest(), self.record.tensors[key], f"the tensor {key!r}")

    def verified(self, key: str) -> Tensor:
        """A tensor whose memory is the file's, after its bytes have been checked against the record."""
        for _ in self.blocks(key, mapped=True):
            pass
        return self.tensor(key)

    def _compare(self, found: str, sha256: str, what: str) -> None:
        if found != sha256:
            raise StoreError(
                f"{self.path} is altered: the checksum of {what} differs from the manifest's; copy the file again from "
                "where it was written, or write the store again with shardpass.partition"
            )
