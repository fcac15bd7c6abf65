"""One file of named tensors in the safetensors format, written in blocks and read memory-mapped, with checksums.

The format (https://huggingface.co/docs/safetensors): 8 bytes, the length of the header, little-endian; the header, JSON
with the dtype, shape and byte range of each tensor; then the bytes of the tensors, without gaps. Its own library writes
only tensors that are in memory as a whole; features may be larger than that, so the two dozen lines are here. The
checksums (of the header and of each tensor) and the file's size cover every byte; the caller keeps them elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardpass.errors import InternalError, StoreError

_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Blocks:
    """A tensor to be written: its dtype, its shape, and its rows in consecutive blocks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Iterable[Tensor]

    @staticmethod
    def of(tensor: Tensor) -> Blocks:
        return Blocks(tensor.dtype, tuple(tensor.shape), [tensor])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """What is known of a written file: its size in bytes and the SHA-256 of its header and of each tensor."""

    name: str
    bytes: int
    header_sha256: str
    tensors: dict[str, str]


def write_tensors(path: Path, tensors: Mapping[str, Blocks]) -> FileRecord:
    """The record of the file that was written (and flushed to the disk) with these tensors."""
    # widest type first, so that every tensor starts at a multiple of its own item size
    keys = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
    header = _header({key: tensors[key] for key in keys})
    checksums = {}
    with open(path, "xb") as file:
        file.write(header)
        for key in keys:
            digest, written = hashlib.sha256(), 0
            for block in tensors[key].blocks:
                raw = _raw(block)
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


def _header(tensors: Mapping[str, Blocks]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for key, tensor in tensors.items():
        end = start + tensor.num_bytes
        entries[key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(block: Tensor) -> memoryview:
    if block.numel() == 0:
        return memoryview(b"")
    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A written file, read memory-mapped; `record` is what `write_tensors` returned.

    Raises:
        StoreError: naming the file, when it is missing, has another size, or its header is altered.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path, self.record = path, record
        self._map: Tensor | None = None
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != record.bytes:
                    raise StoreError(
                        f"{path} has {size} bytes, its manifest says {record.bytes}: the file is torn or belongs to "
                        "another store; write the store again with shardpass.partition"
                    )
                length = file.read(8)
                # a length that does not match the checksum below must not become a huge read
                header = length + file.read(min(int.from_bytes(length, "little"), size))
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error.strerror}); the store needs all its part files") from error
        if hashlib.sha256(header).hexdigest() != record.header_sha256:
            raise _altered(path, "the header")
        self._entries: dict[str, Any] = json.loads(header[8:])
        self._data_start = len(header)

    def tensor(self, key: str) -> Tensor:
        """A tensor whose memory is the file's (private: writing to it never reaches the file). Not yet verified."""
        entry, start, end = self._entry(key)
        dtype = _DTYPES[entry["dtype"]]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        if self._map is None:
            self._map = torch.from_file(str(self.path), shared=False, size=self.record.bytes, dtype=torch.uint8)
        return self._map[start:end].view(dtype).view(entry["shape"])

    def verified(self, key: str) -> Tensor:
        """The tensor, after its bytes have been checked against the record.

        Raises:
            StoreError: naming the file, when they differ.
        """
        self.verify(key)
        return self.tensor(key)

    def verify(self, key: str) -> None:
        """Return when the bytes of a tensor are those that were written.

        Raises:
            StoreError: naming the file, when they differ.
        """
        _, start, end = self._entry(key)
        digest, left = hashlib.sha256(), end - start
        buffer = memoryview(bytearray(max(1, min(left, _READ_BYTES))))
        # read, not mapped: checking features must not make them resident
        with open(self.path, "rb") as file:
            file.seek(start)
            while left:
                count = file.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    break
                digest.update(buffer[:count])
                left -= count
        if left or digest.hexdigest() != self.record.tensors[key]:
            raise _altered(self.path, f"the tensor {key!r}")

    def num_bytes(self, key: str) -> int:
        """The bytes of a tensor."""
        _, start, end = self._entry(key)
        return end - start

    def _entry(self, key: str) -> tuple[Any, int, int]:
        if key not in self._entries or key not in self.record.tensors:
            raise StoreError(f"{self.path} has no tensor {key!r}; it holds {', '.join(self._entries)}")
        start, end = self._entries[key]["data_offsets"]
        return self._entries[key], self._data_start + start, self._data_start + end


def _altered(path: Path, what: str) -> StoreError:
    return StoreError(
        f"{path} is altered: the checksum of {what} differs from the manifest's; "
        "copy the file again from where it was written, or write the store again with shardpass.partition"
    )
