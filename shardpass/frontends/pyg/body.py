"""The body of a PyG layer, as the engine runs it on a piece of the edges: the layer's own methods, hooks included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from shardpass.core.tracing import Inputs
from shardpass.frontends.pyg.dense import whole_neighbourhoods
from shardpass.frontends.pyg.frozen import Frozen
from shardpass.frontends.pyg.lazy import LazyEdges, Poison

_NO_IDS = (
    "node ids inside message() are numbered per rank. Pass the node tensor you want to index to propagate() and take "
    "it as an argument ending in _j or _i"
)


class Parts:
    """The arguments of a layer's message functions, sorted: node rows by side, edge tensors, everything else."""

    def __init__(self, node_dim: int) -> None:
        self.node_dim = node_dim
        self.src: dict[str, Tensor] = {}
        self.dst: dict[str, Tensor] = {}
        self.edge: dict[str, Tensor] = {}
        self.rest: dict[str, Any] = {}
        self.dims: dict[str, int] = {}
        self._taken: set[str] = set()  # edge tensors that the latest call took as inputs

    def absorb(self, prefix: str, other: Parts) -> None:
        """Take in the tensors of a deferred edge update, under prefixed names."""
        for mine, theirs in ((self.src, other.src), (self.dst, other.dst), (self.edge, other.edge)):
            mine.update({prefix + name: tensor for name, tensor in theirs.items()})

    def collected(self, inputs: Inputs, prefix: str = "") -> dict[str, Any]:
        """What PyG's `_collect` would have gathered for the edges of `inputs`."""
        given = dict(self.rest)
        for suffix, rows in (("_j", inputs.src), ("_i", inputs.dst)):
            for name, tensor in rows.items():
                if name.startswith(prefix) and (prefix or ":" not in name):
                    name = name[len(prefix) :]
                    given[name + suffix] = tensor.movedim(0, self.dims[name]) if self.dims[name] else tensor
        self._taken = {
            key[len(prefix) :] for key in inputs.edge if key.startswith(prefix) and (prefix or ":" not in key)
        }
        given.update(self.edge)
        given.update({name: inputs.edge[prefix + name] for name in self._taken})
        given.update(index=inputs.index, edge_index_i=inputs.index, ptr=None, dim_size=inputs.num_dst)
        given.update(size_i=inputs.num_dst, edge_index=Poison.make(_NO_IDS), edge_index_j=Poison.make(_NO_IDS))
        given.update(adj_t=None, size_j=None, size=[None, inputs.num_dst])
        return given

    def release(self) -> None:
        """Let go of the edge tensors that are inputs of the call: what the body holds lives until backward."""
        self.edge = {name: tensor for name, tensor in self.edge.items() if name not in self._taken}


class Body:
    """`message` and `aggregate` of a layer, given what PyG would have gathered for a piece of the edges.

    Args:
        conv: the layer.
        parts: the arguments of both.
        lazy: edge updates that are computed inside the message, by name.
        held: names of edge tensors that the layer holds as attributes while it runs.
        frozen: what the layer must not change meanwhile.
    """

    def __init__(
        self, conv: MessagePassing, parts: Parts, lazy: Mapping[str, LazyEdges], held: Sequence[str], frozen: Frozen
    ) -> None:
        self._conv, self._parts, self._lazy, self._held, self._frozen = conv, parts, lazy, held, frozen
        self._given: dict[str, Any] = {}  # to the message that ran last

    def message(self, inputs: Inputs) -> Tensor:
        """The messages of a piece, one row each."""
        conv, given = self._conv, self._given
        with self._frozen:
            given.clear()
            given.update(self._parts.collected(inputs))
            for name, value in self._lazy.items():
                given[name] = value.message(inputs, f"{name}:")
            with _holding(conv, {name: given[name] for name in self._held}):
                messages = _with_hooks(conv, given)
        dim = conv.node_dim % messages.dim()
        return messages.movedim(dim, 0) if dim else messages

    def reduce(self, messages: Tensor, inputs: Inputs) -> Tensor:
        """What the layer makes of messages."""
        conv, given = self._conv, self._given
        arguments = given if inputs.index is given.get("index") else self._parts.collected(inputs)
        dim = conv.node_dim % messages.dim()
        messages = messages.movedim(0, dim) if dim else messages
        with self._frozen, whole_neighbourhoods(conv, inputs.max_degree):
            return _with_aggregate_hooks(conv, messages, arguments)

    def release(self) -> None:
        """Let go of what is an input of the call: what the body holds lives until backward."""
        self._parts.release()
        self._given.clear()


def _with_hooks(conv: MessagePassing, given: dict[str, Any]) -> Tensor:
    arguments = conv.inspector.collect_param_data("message", given)
    for hook in conv._message_forward_pre_hooks.values():
        changed = hook(conv, (arguments,))
        if changed is not None:
            arguments = changed[0] if isinstance(changed, tuple) else changed
    out = conv.message(**arguments)
    for hook in conv._message_forward_hooks.values():
        changed = hook(conv, (arguments,), out)
        if changed is not None:
            out = changed
    return out


def _with_aggregate_hooks(conv: MessagePassing, messages: Tensor, given: dict[str, Any]) -> Tensor:
    arguments = conv.inspector.collect_param_data("aggregate", given)
    for hook in conv._aggregate_forward_pre_hooks.values():
        changed = hook(conv, (arguments,))
        if changed is not None:
            arguments = changed[0] if isinstance(changed, tuple) else changed
    out: Tensor = conv.aggregate(messages, **arguments)
    for hook in conv._aggregate_forward_hooks.values():
        changed = hook(conv, (arguments,), out)
        out = out if changed is None else changed
    return out


@contextmanager
def _holding(conv: MessagePassing, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The layer holds `tensors` as attributes, in place of those for all edges that it holds in forward."""
    before = {name: vars(conv)[name] for name in tensors if name in vars(conv)}
    vars(conv).update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            del vars(conv)[name]
        vars(conv).update(before)
