"""What is in a value, however it is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from shardpass.core.ranks import torch_private

_PLAIN = (Tensor, str, bytes, int, float, type)


def leaves_within(value: Any) -> list[Any]:
    """What `value` holds, where torch's pytree sees it, and in mappings of any class, dataclasses and namespaces.

    So a `ParameterDict`, a `UserDict` or a `MappingProxyType` is opened as a dict is. The fields of a graph are not,
    which are read when they are asked for.
    """
    return list(_leaves(value, set()))


def _leaves(value: Any, opened: set[int]) -> Iterator[Any]:
    for leaf in torch_private.tree_leaves(value):
        held = None if isinstance(leaf, _PLAIN) else _held_by(leaf)
        if held is None:
            yield leaf
        elif id(leaf) not in opened:
            yield from _leaves(held, opened | {id(leaf)})


def _held_by(leaf: Any) -> list[Any] | None:
    """What a value that pytree does not open holds; `None` if it is a leaf."""
    if type(leaf).__module__.startswith("shardpass."):
        return None
    if isinstance(leaf, (Mapping, nn.ParameterDict)):
        return [leaf[key] for key in leaf]
    if isinstance(leaf, nn.ParameterList):
        return [*leaf]
    if isinstance(leaf, SimpleNamespace):
        return [*vars(leaf).values()]
    if dataclasses.is_dataclass(leaf):
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    return None
