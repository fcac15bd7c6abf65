"""A layer as it was in forward, while its message functions run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from shardpass.core.ranks import torch_private
from shardpass.core.training import SteadyNorms
from shardpass.frontends.pyg.poison import Poison


class Frozen:
    """The training flags and attributes that a layer has now.

    Backward runs message functions again. By then the layer may have been called with something else, or changed.
    """

    def __init__(self, conv: MessagePassing) -> None:
        self._conv = conv
        self._not_its_own = frozenset([*vars(nn.Module()), "propagate", "edge_updater"])
        self._flags = [(module, module.training) for module in conv.modules()]
        self._attributes, self._buffers = self._found(), dict(torch_private.buffers_of(conv))
        self._left: dict[str, Tensor] = {}
        self._norms = SteadyNorms(conv)

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Within, the layer has these flags and attributes; afterwards those that it had before.

        So the tensors that a message function stores on the layer are taken off it again.

        Raises:
            RefusedError: see `SteadyNorms`.
        """
        self._norms.check(type(self._conv).__name__)
        changed = [(module, module.training) for module, flag in self._flags if module.training != flag]
        before, buffers = self._found(), dict(torch_private.buffers_of(self._conv))
        _set_training([(module, not flag) for module, flag in changed])
        self._restore(self._attributes, self._buffers)
        try:
            yield
        finally:
            _set_training(changed)
            for name, value in self._found().items():
                if isinstance(value, Tensor) and value is not self._attributes.get(name):
                    self._left[name] = value
            self._restore(before, buffers)

    def stored(self) -> dict[str, Tensor]:
        """The tensors that the latest message function stored on the layer."""
        return dict(sorted(self._left.items()))

    def store(self, tensors: dict[str, Tensor]) -> None:
        """Store on the layer what a message function would have stored on it, had it run on all edges at once."""
        for name, tensor in tensors.items():
            setattr(self._conv, name, tensor)
            del self._left[name]

    def poison(self, name: str) -> None:
        """Put stand-ins where a message function stored tensors on the layer: they would hold the last few edges."""
        for key in sorted(self._left):
            reason = f"{name}: `{key}`, set inside message(), is not available on a sharded graph: it would hold "
            remedy = "the last few edges only. Return it beside the message, as a tuple, and take both in aggregate()"
            setattr(self._conv, key, Poison.make(reason + remedy))

    def _found(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._conv).items() if name not in self._not_its_own}

    def _restore(self, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
        for name in self._found().keys() - attributes.keys():
            del vars(self._conv)[name]
        vars(self._conv).update(attributes)
        torch_private.buffers_of(self._conv).update(buffers)


def _set_training(flags: list[tuple[nn.Module, bool]]) -> None:
    for module, flag in flags:
        module.training = flag
