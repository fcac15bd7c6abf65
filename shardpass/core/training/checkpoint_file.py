"""The files of checkpoints and journals: tensors and a text, verified as a whole, without pickle.

[Note: the file]
A safetensors file that is written atomically, with a checksum of every byte in its header. The text of a checkpoint is
a JSON manifest. Nested state (a model's or optimizer's ``state_dict``, the user's extra) is kept as a *tree* of JSON
values, in which tensors stand as ``{"tensor": name}``, and dicts, lists and tuples as ``{"dict": [[key, value],
...]}``, ``{"list": [...]}``, ``{"tuple": [...]}``. Tensors that differ between ranks (random states, rows owned by
ranks) are stored per rank as ``name@rank``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import (
    COUNT,
    Blocks,
    dtype_name,
    flush,
    header_of,
    mismatch,
    refuse_irregular,
    tells_of_full_disk,
    tensor_digest,
    write_blocks,
)
from shardpass.errors import CheckpointError

_BLANK = "0" * 64
FORMAT = 1
_SCHEMA = {
    "ranks": range(1, 2**31),
    "epoch": int,
    "local": [str],
    "graph": (str, None),
    "partition": (str, None),
    "columns": {str: {str: [str]}},
    "model": {"dict": list},
    "model_metadata": dict,
    "extra": object,
    "optimizer": ({"class": str, "shapes": [[[COUNT]]], "state": dict}, None),
}


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
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    if _checksum(header["shardpass"], tensors, digests) != header["checksum"]:
        raise ValueError(f"{str(path)!r} was altered or damaged: its checksum does not fit")
    return header["shardpass"], tensors


def _checksum(text: str, tensors: Mapping[str, Tensor | Blocks], digests: dict[str, str]) -> str:
    total = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\0{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\0".encode())
        total.update(bytes.fromhex(digests[name]))
    return total.hexdigest()


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
    """Write the file, atomically.

    Raises:
        CheckpointError: it could not be written; nothing is left behind, and an older file stays as it was.
    """
    try:
        write_verified(path, tensors, json.dumps(manifest))
    except Exception as error:  # whatever it is, the other ranks must hear of it
        raise CheckpointError(f"the checkpoint {str(path)!r} could not be written: {error}") from error


def read_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The manifest of the file. Its tensors are put into `tensors`; every byte is verified.

    What was stored per rank as ``name@rank`` is one tensor again, ``name``, with the rows of one rank after the other.
    The manifest gains ``"tensors"``: name -> [dtype, shape].

    Raises:
        CheckpointError: the file is missing, torn, altered, or something else.
    """
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}")
    try:
        text, found = read_verified(path)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint {error}") from error
    if not text:
        raise CheckpointError(f"{str(path)!r} is no checkpoint: it has no manifest")
    tensors.update(found)
    try:
        manifest = _checked(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} is not as save_checkpoint writes it: {error or type(error).__name__}"
        ) from error
    manifest["tensors"] = {
        name: [dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())
    }
    return manifest


def _checked(manifest: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The manifest, after its trees have been decoded once. Tensors that were stored per rank are joined."""
    if isinstance(manifest, dict) and manifest.get("format") != FORMAT:
        raise ValueError(f"it has format {manifest.get('format')}, this version reads format {FORMAT}")
    if isinstance(manifest, dict):
        manifest.setdefault("columns", {})  # which earlier checkpoints have not
    problem = mismatch(manifest, _SCHEMA)
    if problem:
        raise ValueError(problem)
    for name in manifest["local"]:
        tensors[name] = torch.cat([tensors.pop(f"{name}@{rank}") for rank in range(manifest["ranks"])])
    optimizer = manifest["optimizer"] and manifest["optimizer"]["state"]
    for tree in (manifest["model"], manifest["model_metadata"], manifest["extra"], optimizer):
        decode(tree, tensors)
    return dict(manifest)
