"""A safetensors file that is written atomically, and of which every byte is verified when it is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import describe, refuse_irregular


def write_verified(path: Path, tensors: dict[str, Tensor], text: str = "") -> None:
    """Write `text` and `tensors` under another name, flush them to the disk, and give the file its name.

    Missing folders are made. If anything is raised, nothing is left behind, and an older file stays as it was.

    Raises:
        OSError: at `path` is something else than a regular file, or it cannot be written.
    """
    from safetensors.torch import save_file

    refuse_irregular(path, "replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # and nothing that it may point to is written
    try:
        stored = dict(_storable(tensors))
        save_file(stored, temporary, metadata={"shardpass": text, "checksum": _checksum(text, stored)})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise


def _storable(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors on the CPU, each with memory of its own, as safetensors wants them."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        yield name, tensor


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
    if _checksum(header["shardpass"], tensors) != header["checksum"]:
        raise ValueError(f"{str(path)!r} was altered or damaged: its checksum does not fit")
    return header["shardpass"], tensors


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\0{name} {describe(tensor)}\0".encode())
        total.update(bytes.fromhex(digest(tensor)))
    return total.hexdigest()


def digest(tensor: Tensor) -> str:
    """The SHA-256 of the bytes of a CPU tensor."""
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()
