"""Methods of modules that call functions which TorchScript has compiled, by a global name.

Nobody sees such a call: it is no function of torch, and no module. So a module gets a copy of the method for itself, in
which the name means something else. The class and the file that they come from stay as they are.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_LIBRARIES = ("torch.", "torch_geometric.", "dgl.", "shardpass.")
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")


def is_compiled_function(value: Any) -> bool:
    """Whether a value is a function that ``torch.jit.script`` or ``torch.jit.trace`` has made."""
    return isinstance(value, torch.jit.ScriptFunction)


def methods_with_scripts(
    module: nn.Module, instead: Callable[[Any], Callable[..., Any]]
) -> Iterator[tuple[str, MethodType]]:
    """The methods of `module` that name compiled functions, which call what `instead` gives for them."""
    kinds = [kind for kind in type(module).__mro__ if not f"{kind.__module__}.".startswith(_LIBRARIES)]
    for name in dict.fromkeys(name for kind in kinds for name in vars(kind)):
        method = getattr(type(module), name, None)
        if isinstance(method, FunctionType) and _names_scripts(method):
            copy = FunctionType(
                method.__code__, _Names(method.__globals__, instead), method.__name__, method.__defaults__,
                method.__closure__,
            )  # fmt: skip
            copy.__kwdefaults__, copy.__qualname__ = method.__kwdefaults__, method.__qualname__
            copy.__dict__.update(method.__dict__)
            yield name, MethodType(copy, module)


def _names_scripts(method: FunctionType) -> bool:
    """Whether a method names compiled functions, and sets no global name, which a copy would set for itself."""
    codes = [*_codes_in(method.__code__)]
    names = {name for code in codes for name in code.co_names}
    is_any = any(is_compiled_function(method.__globals__.get(name)) for name in names)
    return is_any and not any(one.opname in _WRITES for code in codes for one in dis.get_instructions(code))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code and those of the functions that are written in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


class _Names(dict[str, Any]):
    """Global names as `names` has them at any time, with what `instead` gives for compiled functions."""

    def __init__(self, names: dict[str, Any], instead: Callable[[Any], Callable[..., Any]]) -> None:
        super().__init__(__builtins__=names.get("__builtins__", builtins))
        self._names, self._instead, self._given = names, instead, dict[Any, Any]()

    def __missing__(self, name: str) -> Any:
        value = self._names[name]
        if not is_compiled_function(value):
            return value
        if value not in self._given:
            self._given[value] = self._instead(value)
        return self._given[value]
