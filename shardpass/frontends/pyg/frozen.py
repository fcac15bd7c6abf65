"""A layer as it was in forward, while its message functions run again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from shardpass.frontends.pyg.lazy import Poison


class Frozen:
    """A context: within, training flags and attributes of a layer are those of the moment when this was made.

    Backward runs messages again, when the layer may have been called anew, or changed. What messages store on the layer
    is taken off again on leaving.
    """

    def __init__(self, conv: MessagePassing) -> None:
        self._flags = [(module, module.training) for module in conv.modules()]
        self._conv = conv
        self._engine = frozenset([*vars(nn.Module()), "propagate", "edge_updater"])
        self._attributes, self._buffers = self._found(), dict(conv._buffers)
        self._left: set[str] = set()
        self._exits: list[tuple[list[tuple[nn.Module, bool]], dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        conv = self._conv
        changed = [(m, m.training) for m, flag in self._flags if m.training != flag]
        now = self._found()
        self._exits.append((changed, now, dict(conv._buffers)))
        for module, flag in self._flags:
            module.training = flag
        self._restore(now, self._attributes, self._buffers)

    def __exit__(self, *error: object) -> None:
        flags, attributes, buffers = self._exits.pop()
        for module, flag in flags:
            module.training = flag
        now = self._found()
        self._left |= {
            key for key, value in now.items() if isinstance(value, Tensor) and value is not self._attributes.get(key)
        }
        self._restore(now, attributes, buffers)

    def poison(self, name: str) -> None:
        """Put stand-ins where messages stored tensors on the layer: they would hold the last chunk only."""
        for key in sorted(self._left):
            reason = f"{name}: `{key}`, set inside message(), is not available on a sharded graph: it would hold "
            setattr(self._conv, key, Poison.make(reason + "the last few edges only"))

    def _found(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self._conv).items() if key not in self._engine}

    def _restore(self, now: dict[str, Any], attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
        own = vars(self._conv)
        for key in now:
            if key not in attributes:
                del own[key]
        own.update(attributes)
        self._conv._buffers.update(buffers)
