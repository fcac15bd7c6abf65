"""A file of named tensors in the safetensors format, with checksums that the caller keeps elsewhere.

The safetensors package reads these files. It cannot write them: it wants every tensor in memory as a whole, and
features may be larger than that. So `write_tensors` writes the format itself (https://huggingface.co/docs/safetensors):
8 bytes with the length of the header, little-endian; the header, which is JSON with the dtype, shape and byte range of
each tensor; then the bytes of the tensors, without gaps.

The checksums of the header and of each tensor, and the size of the file, cover every byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardpass.core.ranks import SAFETENSORS_NAMES, refuse_irregular, tells_of_full_disk
from shardpass.errors import InternalError, StoreError

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and the shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Blocks(TensorInfo):
    """A tensor to be written: its rows in consecutive blocks."""

    blocks: Iterable[Tensor]


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
    checksums = {}
    with tells_of_full_disk(path, num_bytes), open(path, "xb") as file:
        file.write(header)
        for key in _in_order(tensors):
            digest, written = hashlib.sha256(), 0
            for block in tensors[key].blocks:
                raw = _bytes_of(block)
                digest.update(raw)
                written += file.write(raw)
            if written != tensors[key].num_bytes:
                raise InternalError(
                    f"{path.name}: wrote {written} bytes of {key!r}, announced {tensors[key].num_bytes}"
                )
            checksums[key] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return FileRecord(path.name, size, hashlib.sha256(header).hexdigest(), checksums)


def _in_order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The keys, widest type first, so that every tensor starts at a multiple of its own item size."""
    return sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)


def header_of(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, int]:
    """The header of a file with these tensors, and the size of the whole file."""
    entries: dict[str, Any] = {}
    start = 0
    for key in _in_order(tensors):
        end = start + tensors[key].num_bytes
        dtype, shape = SAFETENSORS_NAMES[tensors[key].dtype], list(tensors[key].shape)
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + start


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _identity(file: Any) -> tuple[int, int]:
    """What tells an open file from another one that takes its name later."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


class TensorFile:
    """A written file, memory-mapped.

    Args:
        record: what `write_tensors` returned.

    Raises:
        StoreError: when the file is missing, has another size, or its header is altered. The error names the file.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path, self.record = path, record
        try:
            refuse_irregular(path)
            with open(path, "rb") as file:
                size, self._identity = os.fstat(file.fileno()).st_size, _identity(file)
                length = file.read(8)
                # a wrong length must not become a huge read
                header = length + file.read(min(int.from_bytes(length, "little"), size))
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read ({error.strerror or error}); the store needs all its part files"
            ) from error
        if size != record.bytes:
            raise StoreError(
                f"{path} has {size} bytes, its manifest says {record.bytes}: the file is torn or belongs to another "
                "store; write the store again with shardpass.partition"
            )
        self._check(header, record.header_sha256, "the header")
        try:
            self._file: Any = safe_open(path, framework="pt")
            entries = {key: entry for key, entry in json.loads(header[8:]).items() if key != "__metadata__"}
            unknown = sorted({entry["dtype"] for entry in entries.values()} - _DTYPES.keys())
            known = {key: entry for key, entry in entries.items() if entry["dtype"] not in unknown}
            self._infos = {
                key: TensorInfo(_DTYPES[entry["dtype"]], tuple(entry["shape"])) for key, entry in known.items()
            }
            self._starts = {key: len(header) + entry["data_offsets"][0] for key, entry in known.items()}
        except (SafetensorError, ValueError, LookupError) as error:
            raise StoreError(f"{path} is not as shardpass.partition writes it: {error}") from error
        if unknown:
            raise StoreError(f"{path} holds tensors of the types {unknown}; expected some of {sorted(_DTYPES)}")
        if self._infos.keys() != record.tensors.keys():
            raise StoreError(f"{path} does not hold the tensors that its manifest lists: write the store again")

    def tensor(self, key: str) -> Tensor:
        """A tensor whose memory is the file's, not verified yet. Writing to the tensor never reaches the file."""
        found: Tensor = self._file.get_tensor(key)
        return found

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """A copy of the numbers ``[start, stop)`` of a tensor, [stop - start], not verified. The file is not mapped."""
        info = self._infos[key]
        raw = bytearray((stop - start) * info.dtype.itemsize)
        try:
            with open(self.path, "rb") as file:
                if _identity(file) != self._identity:
                    raise StoreError(f"{self.path} was replaced after the store was opened: load the store again")
                file.seek(self._starts[key] + start * info.dtype.itemsize)
                if file.readinto(raw) != len(raw):
                    raise StoreError(f"{self.path} has become shorter since it was opened; write the store again")
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read any more: {error.strerror or error}") from error
        return torch.frombuffer(raw, dtype=info.dtype) if raw else torch.empty(0, dtype=info.dtype)

    def blocks(self, key: str, mapped: bool = False) -> Iterator[Tensor]:
        """The numbers of a tensor in consecutive blocks, [n] each.

        Args:
            mapped: give views of the mapped file, whose pages are in memory from then on, in place of copies.
        """
        digest, info = hashlib.sha256(), self._infos[key]
        count, step = math.prod(info.shape), _BLOCK_BYTES // info.dtype.itemsize
        whole = self.tensor(key).view(-1) if mapped else None
        for start in range(0, count, step):
            stop = min(start + step, count)
            block = self.read(key, start, stop) if whole is None else whole[start:stop]
            digest.update(_bytes_of(block))
            yield block
        self._compare(digest.hexdigest(), self.record.tensors[key], f"the tensor {key!r}")

    def verified(self, key: str) -> Tensor:
        """A tensor whose memory is the file's, after its bytes have been checked against the record."""
        for _ in self.blocks(key, mapped=True):
            pass
        return self.tensor(key)

    def _check(self, content: bytes, sha256: str, what: str) -> None:
        self._compare(hashlib.sha256(content).hexdigest(), sha256, what)

    def _compare(self, found: str, sha256: str, what: str) -> None:
        if found != sha256:
            raise StoreError(
                f"{self.path} is altered: the checksum of {what} differs from the manifest's; copy the file again from "
                "where it was written, or write the store again with shardpass.partition"
            )
