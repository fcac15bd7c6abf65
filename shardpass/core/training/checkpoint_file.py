"""The file of a checkpoint: tensors and a JSON manifest, verified as a whole, without pickle.

[Note: the file]
A safetensors file whose header holds a JSON manifest and a checksum of the manifest and all tensors. Nested state (a
model's or optimizer's ``state_dict``, the user's extra) is kept as a *tree* of JSON values, in which tensors stand as
``{"tensor": name}``, and dicts, lists and tuples as ``{"dict": [[key, value], ...]}``, ``{"list": [...]}``,
``{"tuple": [...]}``. Tensors that differ between ranks (random states, rows owned by ranks) are stored per rank as
``name@rank``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import describe, dtype_name
from shardpass.errors import CheckpointError


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree of `value`, see [Note: the file]. Its tensors go to `tensors`, under names that begin with `name`."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise CheckpointError(f"{name} is a sparse tensor, which a checkpoint cannot hold")
        while name in tensors:
            name += "+"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise CheckpointError(f"{name} has the key {key!r}; keys in a checkpoint are strings or integers")
        return {"dict": [[key, encode(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{name} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, None, dicts, lists, tuples"
    )


def decode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The value for which `encode` returned `tree`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in content}
    return (tuple if kind == "tuple" else list)(decode(item, tensors) for item in content)


def write_file(path: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """Write the file, atomically: under another name, to the disk, then renamed.

    Raises:
        CheckpointError: it could not be written; nothing is left behind, and an older file stays as it was.
    """
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        stored = dict(_storable(tensors))
        text = json.dumps(manifest)
        header = {"shardpass": text, "checksum": _checksum(text, stored)}
        save_file(stored, temporary, metadata=header)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"the checkpoint {str(path)!r} could not be written: {error}") from error


def _storable(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors on the CPU, each with memory of its own, as safetensors wants them."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        yield name, tensor


def read_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The manifest of the file. Its tensors are put into `tensors`; every byte is verified.

    What was stored per rank as ``name@rank`` is one tensor again, ``name``, with the rows of one rank after the other.
    The manifest gains ``"tensors"``: name -> [dtype, shape].

    Raises:
        CheckpointError: the file is missing, torn, altered, or something else.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except Exception as error:  # whatever it is, the other ranks must hear of it
        raise CheckpointError(f"{str(path)!r} is torn, or no checkpoint: {error}") from error
    if "shardpass" not in header or "checksum" not in header:
        raise CheckpointError(f"{str(path)!r} is not a checkpoint of shardpass: its header has no manifest")
    if _checksum(header["shardpass"], tensors) != header["checksum"]:
        raise CheckpointError(f"the checkpoint {str(path)!r} was altered or damaged: its checksum does not fit")
    manifest: dict[str, Any] = json.loads(header["shardpass"])
    for name in manifest["local"]:
        tensors[name] = torch.cat([tensors.pop(f"{name}@{rank}") for rank in range(manifest["ranks"])])
    manifest["tensors"] = {
        name: [dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())
    }
    return manifest


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
