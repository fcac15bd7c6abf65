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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardpass.core.ranks import refuse_irregular
from shardpass.errors import InternalError, StoreError

_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip


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
    header, _ = header_of(tensors)
    checksums = {}
    with open(path, "xb") as file:
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
        dtype, shape = _DTYPE_NAMES[tensors[key].dtype], list(tensors[key].shape)
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + start


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


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
                size = os.fstat(file.fileno()).st_size
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
        except SafetensorError as error:
            raise StoreError(f"{path} is not as shardpass.partition writes it: {error}") from error

    def tensor(self, key: str) -> Tensor:
        """A tensor whose memory is the file's, not verified yet. Writing to the tensor never reaches the file."""
        try:
            found: Tensor = self._file.get_tensor(key)
        except SafetensorError as error:
            raise StoreError(f"{self.path} is not as its manifest says: {error}") from error
        return found

    def verified(self, key: str) -> Tensor:
        """A tensor whose memory is the file's, after its bytes have been checked against the record.

        Raises:
            StoreError: when they differ. The error names the file.
        """
        tensor = self.tensor(key)
        self._check(_bytes_of(tensor), self.record.tensors[key], f"the tensor {key!r}")
        return tensor

    def _check(self, content: bytes | memoryview, sha256: str, what: str) -> None:
        if hashlib.sha256(content).hexdigest() != sha256:
            raise StoreError(
                f"{self.path} is altered: the checksum of {what} differs from the manifest's; copy the file again from "
                "where it was written, or write the store again with shardpass.partition"
            )
