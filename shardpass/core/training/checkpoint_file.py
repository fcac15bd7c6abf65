"""The file of a checkpoint: tensors and a JSON manifest, verified as a whole, without pickle.

[Note: the file]
A verified file (see `write_verified`) whose text is a JSON manifest. Nested state (a
model's or optimizer's ``state_dict``, the user's extra) is kept as a *tree* of JSON values, in which tensors stand as
``{"tensor": name}``, and dicts, lists and tuples as ``{"dict": [[key, value], ...]}``, ``{"list": [...]}``,
``{"tuple": [...]}``. Tensors that differ between ranks (random states, rows owned by ranks) are stored per rank as
``name@rank``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import COUNT, dtype_name, mismatch
from shardpass.core.training.verified_file import read_verified, write_verified
from shardpass.errors import CheckpointError

FORMAT = 1
_SCHEMA = {
    "ranks": range(1, 2**31),
    "epoch": int,
    "local": [str],
    "graph": (str, None),
    "partition": (str, None),
    "model": {"dict": list},
    "model_metadata": dict,
    "extra": object,
    "optimizer": ({"class": str, "shapes": [[[COUNT]]], "state": dict}, None),
}


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
    problem = mismatch(manifest, _SCHEMA)
    if problem:
        raise ValueError(problem)
    for name in manifest["local"]:
        tensors[name] = torch.cat([tensors.pop(f"{name}@{rank}") for rank in range(manifest["ranks"])])
    optimizer = manifest["optimizer"] and manifest["optimizer"]["state"]
    for tree in (manifest["model"], manifest["model_metadata"], manifest["extra"], optimizer):
        decode(tree, tensors)
    return dict(manifest)
