"""A safetensors file that is written atomically, and of which every byte is verified when it is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardpass.core.ranks import (
    Blocks,
    bytes_of,
    dtype_name,
    flush,
    header_of,
    places_in,
    refuse_irregular,
    tells_of_full_disk,
    write_blocks,
)

_BLANK = "0" * 64


def write_verified(path: Path, tensors: Mapping[str, Tensor | Blocks], text: str = "") -> None:
    """Write `text` and `tensors` under another name, flush them to the disk, and give the file its name.

    Missing folders are made. If anything is raised, nothing is left behind, and an older file stays as it was.

    Raises:
        OSError: at `path` is something else than a regular file, or it cannot be written.
    """
    refuse_irregular(path, "replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # and nothing that it may point to is written
    blocks = {name: Blocks.of(t) if isinstance(t, Tensor) else t for name, t in sorted(tensors.items())}
    try:
        with tells_of_full_disk(path, _header(text, _BLANK, blocks)[1]):
            _fill(temporary, blocks, text)
            flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise


def _fill(path: Path, tensors: Mapping[str, Blocks], text: str) -> None:
    """Write everything; the checksum, which stands first, at last."""
    with open(path, "xb") as file:
        file.write(_header(text, _BLANK, tensors)[0])
        digests = write_blocks(file, tensors)
        file.seek(0)
        file.write(_header(text, _checksum(text, tensors, digests), tensors)[0])


def _header(text: str, checksum: str, tensors: Mapping[str, Blocks]) -> tuple[bytes, int]:
    return header_of(tensors, {"shardpass": text, "checksum": checksum})


def read_verified(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors of a file that `write_verified` wrote.

    Raises:
        ValueError: the file is torn, altered, or something else.
    """
    from safetensors import safe_open

    try:
        refuse_irregular(path)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # of the library, which documents none
        raise ValueError(f"{str(path)!r} is torn, or something else: {error}") from error
    if "shardpass" not in header or "checksum" not in header:
        raise ValueError(f"{str(path)!r} is no file of shardpass: its header has no checksum")
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    if _checksum(header["shardpass"], tensors, digests) != header["checksum"]:
        raise ValueError(f"{str(path)!r} was altered or damaged: its checksum does not fit")
    return header["shardpass"], tensors


def tensor_places(path: Path) -> dict[str, tuple[Tensor, int]]:
    """For each tensor of a file that `write_verified` wrote: one like it without memory, and the byte where it begins.

    Nothing is verified.
    """
    with open(path, "rb") as file:
        length = file.read(8)
        places = places_in(length + file.read(int.from_bytes(length, "little")))
    return {
        name: (torch.empty(info.shape, dtype=info.dtype, device="meta"), start)
        for name, (info, start) in places.items()
    }


def _checksum(text: str, tensors: Mapping[str, Tensor | Blocks], digests: dict[str, str]) -> str:
    total = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\0{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\0".encode())
        total.update(bytes.fromhex(digests[name]))
    return total.hexdigest()


def digest(tensor: Tensor) -> str:
    """The SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()
