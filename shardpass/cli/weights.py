"""`Weights`: what the file of `shardpass infer --weights` holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shardpass.core.ranks import refuse_irregular

_OF_MODEL = "model/"  # before the names of the parameters in a checkpoint


@dataclass(frozen=True)
class Weights:
    """A state_dict in `tensors`, or a checkpoint, of which only the `shapes` by the names of the model are read."""

    is_checkpoint: bool
    shapes: dict[str, tuple[int, ...]]
    tensors: dict[str, Tensor]


def read_weights(path: Path) -> Weights:
    """What the file holds. A `ValueError` says what was expected."""
    try:
        found = _read(path)
    except Exception as error:  # libraries raise errors of many kinds here
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--weights {path} cannot be read: {words}. Expected a checkpoint of shardpass train, or a state_dict as "
            f".safetensors, or as .pt by torch.save(model.state_dict(), path)"
        ) from error
    if isinstance(found, Weights):
        return found
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        held = f"a dict with {', '.join(map(str, found))}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ValueError(f"--weights {path} holds {held}; expected a state_dict, tensors by the names of the model")
    return Weights(False, {name: tuple(value.shape) for name, value in found.items()}, found)


def _read(path: Path) -> object:
    """`Weights` of a checkpoint, or what should be a state_dict."""
    refuse_irregular(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return torch.load(path, map_location="cpu", weights_only=True)
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        if "shardpass" not in (file.metadata() or {}):
            return {name: file.get_tensor(name) for name in names}
        shapes = {
            name.removeprefix(_OF_MODEL): tuple(file.get_slice(name).get_shape())
            for name in names
            if name.startswith(_OF_MODEL)
        }
        return Weights(True, shapes, {})
