"""Arguments of another kind than a public function takes: one sentence says which, and what belongs there."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def require_path(value: Any, call: str) -> Path:
    """The path that `value` is. `call` is how the function is called: ``"load(path, comm)"``.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{call}: `path` must be a path, but got {type(value).__name__}")
    return Path(value)


def require_model(value: Any, call: str) -> None:
    """Raise unless `value` is a module of torch.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, nn.Module):
        raise TypeError(f"{call}: `model` must be a torch.nn.Module, but got {type(value).__name__}")


def require_tensor(value: Any, name: str, call: str) -> None:
    """Raise unless `value`, the argument `name`, is a tensor.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{call}: `{name}` must be a tensor, but got {type(value).__name__}")


def require_callable(value: Any, name: str, call: str) -> None:
    """Raise unless `value`, the argument `name`, is a function.

    Raises:
        TypeError: it is something else.
    """
    if not callable(value):
        raise TypeError(f"{call}: `{name}` must be a function, but got {type(value).__name__}")


def require_count(value: Any, name: str, call: str, least: int, most: int) -> int:
    """The integer that `value`, a number of `name` such as "parts", is.

    Raises:
        TypeError: it is none.
        ValueError: it is not in `[least, most]`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{call}: the number of {name} must be an integer, found {type(value).__name__}") from None
    if not least <= count <= most:
        raise ValueError(f"{call}: {count} {name}; expected at least {least} and at most {most}")
    return count


def require_device(value: Any, call: str) -> torch.device:
    """The device that `value` names.

    Raises:
        TypeError, ValueError: it names none.
    """
    if not isinstance(value, str | torch.device):
        raise TypeError(f"{call}: `device` must name a device, such as 'cpu', but got {type(value).__name__}")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{call}: `device` is {value!r}, but it must name a device, such as 'cpu'") from error
