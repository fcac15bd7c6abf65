"""What the message function of a layer of PyG depends on besides its arguments, where that is known.

The methods of a user's class may read anything, so nobody knows what they depend on. Those of PyG's own layers compute
from their arguments and from what the layer and its modules hold. As long as that stays the same, so does what a probe
finds of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from shardpass.core.ranks import torch_private
from shardpass.core.tracing import Dependence
from shardpass.core.wrapping import replaced_forward
from shardpass.frontends.pyg.arguments import Arguments
from shardpass.frontends.pyg.lazy import LazyEdges

_PLAIN = frozenset([bool, int, float, str, NoneType, torch.Size, torch.dtype, torch.device])
_LIBRARIES = frozenset(["torch", "torch_geometric", "shardpass"])
_NOT_READ = ("inspector", "comm", "__prepare_scriptable__", "forward", "_shardpass_wrapped")
_METHODS = ("message", "edge_update", "aggregate")


class _UnknownError(Exception):
    """A layer holds something of which nobody knows what it does."""


def dependence_of(
    conv: MessagePassing, arguments: Arguments, lazy: Mapping[str, LazyEdges], others: frozenset[str]
) -> Dependence | None:
    """What `message` and `aggregate` of `conv` depend on, besides the tensors with rows in `arguments`.

    `None` if that is not known, as for methods of a user's class, or if there are hooks, which may do anything.

    Args:
        lazy: the edge updates that `message` computes, by name.
        others: names of attributes that are those of any module, or that `wrap` has set.
    """
    state = _State(others)
    try:
        if torch_private.has_any_forward_hook():
            raise _UnknownError
        for module in conv.modules():
            if module is not conv and (torch_private.has_hook(module) or replaced_forward(module)):
                raise _UnknownError
            state.add(module)
        state.values += [state.of(getattr(type(conv), name)) for name in _METHODS]
        for name, given in (("", arguments), *((name, value.arguments) for name, value in lazy.items())):
            state.values += [name, *sorted(given.dims.items())]
            state.values += [(name, state.of(value)) for name, value in sorted(given.rest.items())]
    except _UnknownError:
        return None
    return Dependence(tuple(state.values), tuple(state.tensors))


class _State:
    """What modules hold, as values and as tensors."""

    def __init__(self, others: frozenset[str]) -> None:
        self._others = others.union(_NOT_READ)
        self.values: list[Any] = []
        self.tensors: list[Tensor] = []

    def add(self, module: nn.Module) -> None:
        """Add what `module` itself holds.

        Raises:
            _UnknownError: it is of a user's class, or holds something that may be changed unseen.
        """
        kind = type(module)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            raise _UnknownError
        self.values += [kind, self.of(kind.forward), module.training]
        for tensors in (torch_private.parameters_of(module), torch_private.buffers_of(module)):
            self.values += [(name, self.of(tensor)) for name, tensor in tensors.items()]
        self.values += [(name, self.of(value)) for name, value in vars(module).items() if name not in self._others]

    def of(self, value: Any) -> Any:
        """What stands for `value` among the values."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            is_plain = kind in (Tensor, nn.Parameter) and value.layout == torch.strided
            return (value.requires_grad, value.dtype, value.shape, value.data_ptr()) if is_plain else kind
        if kind in (tuple, list):
            return (kind, *map(self.of, value))
        is_function = kind in (FunctionType, BuiltinFunctionType)
        if is_function and (value.__module__ or "torch").partition(".")[0] in _LIBRARIES:
            return value
        if kind.__name__ in ("dict", "OrderedDict") and all(type(key) is str for key in value):  # hooks have numbers
            return (kind, *((key, self.of(one)) for key, one in value.items()))
        raise _UnknownError
