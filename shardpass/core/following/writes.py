"""Which functions of torch write into what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def writes_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch of this name writes into an operand."""
    if kwargs.get("out") is not None or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_")


def written_by(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a function of torch of this name writes into; `None` if it writes into nothing."""
    if name == "batch_norm" and kwargs.get("training"):
        return kwargs.get("running_mean", args[1])  # F.batch_norm passes it by position
    return kwargs.get("out", args[0] if args else None) if writes_in_place(name, kwargs) else None
