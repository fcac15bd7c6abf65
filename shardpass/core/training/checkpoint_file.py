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

from shardpass.core.ranks import dtype_name
from shardpass.core.training.verified_file import read_verified, write_verified
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
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}")
    try:
        text, found = read_verified(path)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint {error}") from error
    if not text:
        raise CheckpointError(f"{str(path)!r} is no checkpoint: it has no manifest")
    manifest: dict[str, Any] = json.loads(text)
    tensors.update(found)
    for name in manifest["local"]:
        tensors[name] = torch.cat([tensors.pop(f"{name}@{rank}") for rank in range(manifest["ranks"])])
    manifest["tensors"] = {
        name: [dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())
    }
    return manifest
