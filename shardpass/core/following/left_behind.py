"""What a model leaves where others may read it: in what it returns, attributes, classes, globals and closures."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_LIBRARIES = ("torch", "torch_geometric", "dgl", "shardpass", "numpy", "builtins", "collections", "functools", "typing")
_PLAIN = (str, bytes, int, float, complex)
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset)


def tensors_within(*roots: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from `roots` through containers, objects of the user's, and functions.

    Of a function, what it closes over and the globals that its code names; of an object, its attributes and those of
    its class. Libraries are left out, but for the attributes of their modules of layers.
    """
    found, seen = list(roots), set()
    while found:
        value = found.pop()
        if isinstance(value, Tensor):
            yield value
        elif value is not None and not isinstance(value, _PLAIN) and id(value) not in seen:
            seen.add(id(value))
            found.extend(_held_by(value))


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if (kind := next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)) is not None:
        return list(kind.__iter__(value))  # a class of the user's may have no length, as a number in group theory
    if isinstance(value, FunctionType):
        return _read_by(value)
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    kind = value if isinstance(value, type) else type(value)
    is_written = kind.__module__.partition(".")[0] not in _LIBRARIES
    attributes = list(getattr(value, "__dict__", {}).values()) if is_written or isinstance(value, nn.Module) else []
    return attributes if isinstance(value, type) or not is_written else [*attributes, kind]


def _read_by(function: FunctionType) -> Iterator[Any]:
    """What a function closes over, and the globals that its code names."""
    variables = inspect.getclosurevars(function)
    yield from (*variables.nonlocals.values(), *variables.globals.values())
