"""A layer as it was in forward, while its message functions run again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from shardpass.core.ranks import torch_private
from shardpass.core.training import SteadyNorms
from shardpass.frontends.pyg.poison import Poison


class Frozen:
    """The training flags, attributes and modules that a layer has now.

    Backward runs message functions again. By then the layer may have been called with something else, or changed.

    Args:
        conv: the layer.
        others: names of attributes that are those of any module, or that `wrap` has set.
    """

    def __init__(self, conv: MessagePassing, others: frozenset[str]) -> None:
        self._conv, self._others = conv, others
        self._flags = [(module, module.training) for module in conv.modules()]
        self._held = self._state()
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
        before = self._state()
        _set_training([(module, not flag) for module, flag in changed])
        self._restore(*self._held)
        try:
            yield
        finally:
            _set_training(changed)
            for name, value in self._found().items():
                if isinstance(value, Tensor) and value is not self._held[0].get(name):
                    self._left[name] = value
            self._restore(*before)

    def stored(self) -> dict[str, Tensor]:
        """The tensors that the latest message function stored on the layer."""
        return dict(sorted(self._left.items()))

    def store(self, tensors: dict[str, Tensor]) -> None:
        """Store on the layer what a message function would have stored on it, had it run on all edges at once."""
        for name, tensor in tensors.items():
            setattr(self._conv, name, tensor)
            del self._left[name]

    def poison(self, name: str, stored: Collection[str]) -> None:
        """Put stand-ins where a message function stores tensors on the layer: they would hold the last few edges."""
        for key in sorted(stored):
            reason = f"{name}: `{key}`, set inside message(), is not available on a sharded graph: it would hold "
            remedy = "the last few edges only. Return it beside the message, as a tuple, and take both in aggregate()"
            if not isinstance(vars(self._conv).get(key), Poison):
                setattr(self._conv, key, Poison.make(reason + remedy))

    def _state(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        conv = self._conv
        return self._found(), dict(torch_private.buffers_of(conv)), dict(torch_private.modules_of(conv))

    def _found(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._conv).items() if name not in self._others}

    def _restore(self, attributes: dict[str, Any], buffers: dict[str, Any], modules: dict[str, Any]) -> None:
        for name in self._found().keys() - attributes.keys():
            del vars(self._conv)[name]
        vars(self._conv).update(attributes)
        torch_private.buffers_of(self._conv).update(buffers)
        torch_private.modules_of(self._conv).update(modules)


def _set_training(flags: list[tuple[nn.Module, bool]]) -> None:
    for module, flag in flags:
        module.training = flag
