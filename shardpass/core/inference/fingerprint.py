"""Whether a later run computes the same: what a model is, as text that changes where its results may."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardpass.core.graphs import ShardedEdgeIndex, ShardedGraph
from shardpass.core.training import digest

_PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device

_OF_CLASSES = frozenset(("__module__", "__doc__", "__firstlineno__"))


def same_model(model: nn.Module) -> Iterator[str]:
    """One line for each part of the model: structure, parameters, buffers, settings, and the code of its classes.

    Of functions outside the classes, those of the same file that the code names are looked at; other files are not.
    """
    yield str(model)
    for name, value in model.state_dict().items():
        yield f"{name} {same_tensor(value) if isinstance(value, Tensor) else repr(value)}"
    classes: dict[type, None] = {}
    of_every_module = vars(nn.Module())  # training, parameters, hooks
    for prefix, module in model.named_modules():
        classes |= dict.fromkeys(type(module).__mro__)
        for key, value in sorted(vars(module).items()):
            if key not in of_every_module:
                yield from (f"{prefix}.{key} {line}" for line in _same_setting(value))
    seen: set[Any] = set()
    for kind in classes:
        if kind not in (nn.Module, object):
            for name, value in sorted(vars(kind).items()):
                if name not in _OF_CLASSES:
                    lines = [repr(value)] if isinstance(value, _PLAIN) else _same_code(value, seen)
                    yield from (f"{kind.__qualname__}.{name} {line}" for line in lines)


def same_arguments(args: Any, graph: ShardedGraph) -> Iterator[str]:
    """One line for each argument. One that cannot be compared gets a line that no other run has."""
    for index, value in enumerate(tree_leaves(args)):
        yield f"argument {index} {_same_argument(value, graph)}"


def _same_argument(value: Any, graph: ShardedGraph) -> str:
    if value is graph or any(value is relation.edge_index for relation in graph.relations.values()):
        return "of the graph"
    if isinstance(value, ShardedEdgeIndex) and value.flow is None:
        return same_tensor(value.plain)
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        return same_tensor(value)
    return repr(value) if isinstance(value, _PLAIN) else uuid.uuid4().hex


def same_tensor(value: Tensor) -> str:
    """Dtype, shape and a hash of the contents."""
    return f"{value.dtype} {list(value.shape)} {digest(value.detach().cpu())}"


def _same_setting(value: Any) -> Iterator[str]:
    """A value, also of tensors that are no buffers and of objects that hold settings, or the code of a function."""
    if all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)):
        yield _plain(value)
    elif type(value) is Tensor and value.layout == torch.strided:
        yield same_tensor(value)
    elif isinstance(value, FunctionType | MethodType):
        yield from _same_code(value, set())
    else:
        held = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type | ModuleType) else {}
        plain = {key: item for key, item in sorted(held.items()) if isinstance(item, _PLAIN)}
        yield f"{type(value).__qualname__} {plain}"


def _same_code(value: Any, seen: set[Any]) -> Iterator[str]:
    """The code of a function, method or property, and of what it names in its own file."""
    if isinstance(value, property):
        for function in (value.fget, value.fset):
            yield from _same_code(function, seen)
        return
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    names: set[str] = set()
    yield "; ".join(_of_code(function.__code__, names)) + f" {_plain(function.__defaults__)}"
    for name in sorted(names & function.__globals__.keys()):
        other = function.__globals__[name]
        if all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(other)):
            yield f"{name} {_plain(other)}"
        elif getattr(other, "__module__", None) == function.__module__:
            yield from _same_code(other, seen)


def _of_code(code: CodeType, names: set[str]) -> Iterator[str]:
    names.update(code.co_names)
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant, names)
        else:
            yield _plain(constant)


def _plain(value: Any) -> str:
    """`repr`, with sets in a fixed order and without addresses."""
    if isinstance(value, frozenset):
        return str(sorted(map(repr, value)))
    return repr(value) if all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)) else str(type(value))
