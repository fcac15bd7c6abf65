"""Named tensors in the safetensors format, written block by block, with a checksum of each.

The safetensors package reads such files. It cannot write them: it wants a copy of every tensor in memory as a whole.
The format (https://huggingface.co/docs/safetensors) is 8 bytes with the length of the header, little-endian; the
header, which is JSON with the dtype, shape and byte range of each tensor; then the bytes of the tensors, without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardpass.core.ranks.units import SAFETENSORS_NAMES
from shardpass.errors import InternalError


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
    """A tensor to be written: its rows in consecutive blocks, which need not be in memory together."""

    blocks: Iterable[Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Blocks:
        """The whole tensor in one block."""
        return cls(tensor.dtype, tuple(tensor.shape), [tensor])


def header_of(tensors: Mapping[str, TensorInfo], metadata: dict[str, str] | None = None) -> tuple[bytes, int]:
    """The header of a file with these tensors, and the size of the whole file."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for key in _in_order(tensors):
        end = start + tensors[key].num_bytes
        dtype, shape = SAFETENSORS_NAMES[tensors[key].dtype], list(tensors[key].shape)
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + start


def read_header(file: BinaryIO) -> bytes:
    """The header of an open file, or what there is of it."""
    length = file.read(8)
    # a wrong length must not become a huge read
    return length + file.read(min(int.from_bytes(length, "little"), os.fstat(file.fileno()).st_size))


def places_in(header: bytes) -> dict[str, tuple[TensorInfo, int]]:
    """What each tensor of a file with this header is, and at which byte it begins.

    Raises:
        ValueError, LookupError: it is no such header, or has other dtypes.
    """
    dtypes = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
    return {
        key: (TensorInfo(dtypes[entry["dtype"]], tuple(entry["shape"])), len(header) + entry["data_offsets"][0])
        for key, entry in json.loads(header[8:]).items()
        if key != "__metadata__"
    }


def write_blocks(file: BinaryIO, tensors: Mapping[str, Blocks]) -> dict[str, str]:
    """Write tensors behind their header; the SHA-256 of the bytes of each."""
    checksums = {}
    for key in _in_order(tensors):
        total, written = hashlib.sha256(), 0
        for block in tensors[key].blocks:
            content = bytes_of(block)
            total.update(content)
            written += file.write(content)
        if written != tensors[key].num_bytes:
            raise InternalError(f"{file.name}: wrote {written} bytes of {key!r}, announced {tensors[key].num_bytes}")
        checksums[key] = total.hexdigest()
    return checksums


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """The SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def _in_order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The keys, the widest type first, so that every tensor begins at a multiple of its item size."""
    return sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
