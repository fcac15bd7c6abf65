"""PyG's message passing, carried out by the engine: what replaces `propagate` and `edge_updater` of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from shardpass.core.aggregate import aggregate
from shardpass.core.edge_index import ShardedEdgeIndex
from shardpass.core.halo import HaloPlan
from shardpass.core.program import Inputs, Program
from shardpass.core.shard import EdgeShards
from shardpass.errors import NeedsHaloError, RefusedError
from shardpass.frontends.pyg.lazy import LazyEdges, Poison

_INDICES = frozenset(
    ["edge_index_i", "edge_index_j", "edge_index", "size_i", "size_j", "adj_t", "index", "ptr", "dim_size"]
)


class ShardedMessagePassing:
    """The engine's side of one PyG layer: replaces its `propagate` and `edge_updater`.

    Args:
        conv: the layer.
        name: what the user calls it, e.g. ``"GATConv (convs.1)"``.
    """

    def __init__(self, conv: MessagePassing, name: str) -> None:
        self.conv, self.name = conv, name
        self._checked: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"conv": self.conv, "name": self.name, "_checked": set()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedMessagePassing:
        from copy import deepcopy

        return ShardedMessagePassing(deepcopy(self.conv, memo), self.name)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """`MessagePassing.propagate` on a sharded graph; PyG's own on anything else."""
        original = type(self.conv).propagate
        if not isinstance(edge_index, ShardedEdgeIndex):
            return original(self.conv, edge_index, size=size, **kwargs)
        self._refuse(edge_index)
        try:
            return self._propagate(edge_index, kwargs)
        except NeedsHaloError:
            if edge_index.plan.options.mode != "halo":
                raise
            kwargs = {k: v.materialise() if isinstance(v, LazyEdges) else v for k, v in kwargs.items()}
            return original(self.conv, edge_index, size=size, **kwargs)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """`MessagePassing.edge_updater`: deferred into the propagate that follows, or computed on first other use."""
        original = type(self.conv).edge_updater
        if not isinstance(edge_index, ShardedEdgeIndex):
            return original(self.conv, edge_index, size=size, **kwargs)
        self._refuse(edge_index)
        parts = _split(self.conv, self.name, self.conv._edge_user_args, edge_index.plan, kwargs)
        frozen = _Frozen(self.conv)

        def message(inputs: Inputs, prefix: str = "") -> Tensor:
            given = parts.collected(inputs, prefix)
            with frozen:
                return self.conv.edge_update(**self.conv.inspector.collect_param_data("edge_update", given))

        def compute() -> Tensor:
            program = Program(
                f"{self.name} edge update", parts.src, parts.dst, parts.edge, message, None, self._checked
            )
            try:
                return aggregate(program, edge_index.plan, shards_of(edge_index))
            except NeedsHaloError:
                if edge_index.plan.options.mode != "halo":
                    raise
                return original(self.conv, edge_index, size=size, **kwargs)

        return LazyEdges.make(parts, message, compute)

    def _propagate(self, edge_index: ShardedEdgeIndex, kwargs: dict[str, Any]) -> Tensor:
        conv, plan = self.conv, edge_index.plan
        lazy = {name: value for name, value in kwargs.items() if isinstance(value, LazyEdges)}
        wanted = conv.inspector.get_flat_param_names(["message", "aggregate"], exclude=list(conv.special_args))
        parts = _split(conv, self.name, wanted, plan, {k: v for k, v in kwargs.items() if k not in lazy})
        lazy = {name: value for name, value in lazy.items() if name in wanted}
        for name, value in lazy.items():
            parts.absorb(f"{name}:", value.parts)
        frozen = _Frozen(conv)

        def collect(inputs: Inputs) -> dict[str, Any]:
            given = parts.collected(inputs)
            for name, value in lazy.items():
                given[name] = value.message(inputs, f"{name}:")
            return given

        given: dict[str, Any] = {}

        def message(inputs: Inputs) -> Tensor:
            with frozen:
                given.clear()
                given.update(collect(inputs))
                messages = _with_hooks(conv, given)
            dim = conv.node_dim % messages.dim()
            return messages.movedim(dim, 0) if dim else messages

        def reduce(messages: Tensor, inputs: Inputs) -> Tensor:
            arguments = given if inputs.index is given.get("index") else parts.collected(inputs)
            dim = conv.node_dim % messages.dim()
            messages = messages.movedim(0, dim) if dim else messages
            with frozen:
                return conv.aggregate(messages, **conv.inspector.collect_param_data("aggregate", arguments))

        program = Program(self.name, parts.src, parts.dst, parts.edge, message, reduce, self._checked)
        out = aggregate(program, plan, shards_of(edge_index))
        frozen.poison(self.name)
        whole = {**kwargs, "dim_size": plan.num_dst, "size_i": plan.num_dst, "size_j": plan.num_own_src}
        return conv.update(out, **conv.inspector.collect_param_data("update", whole))

    def _refuse(self, edge_index: ShardedEdgeIndex) -> None:
        conv = self.conv
        if conv.explain:
            raise RefusedError(f"{self.name}: explanations are not supported on a sharded graph; set explain=False")
        if conv.flow != "source_to_target" or edge_index.is_reversed:
            raise RefusedError(
                f"{self.name}: messages against the direction of the edges are not supported on a sharded graph. "
                f"Partition the graph with its edges reversed instead"
            )
        if conv.decomposed_layers > 1:
            raise RefusedError(f"{self.name}: decomposed_layers > 1 is not supported; messages are already in pieces")


def shards_of(edge_index: ShardedEdgeIndex) -> EdgeShards:
    """The shards of an edge list; those of one that was derived in forward are found again."""
    if edge_index.shards is not None:
        return edge_index.shards
    plan = edge_index.plan
    edges = edge_index.plain if edge_index.derivation is None else edge_index.derivation
    return plan.derived.find(edges, plan.blocks, plan.num_dst)


class Parts:
    """The arguments of a layer's message functions, sorted: node rows by side, edge tensors, everything else."""

    def __init__(self, node_dim: int) -> None:
        self.node_dim = node_dim
        self.src: dict[str, Tensor] = {}
        self.dst: dict[str, Tensor] = {}
        self.edge: dict[str, Tensor] = {}
        self.rest: dict[str, Any] = {}
        self.dims: dict[str, int] = {}

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
        for name, tensor in self.edge.items():
            given[name] = inputs.edge.get(prefix + name, tensor)
        given.update(index=inputs.index, edge_index_i=inputs.index, ptr=None, dim_size=inputs.num_dst)
        given.update(size_i=inputs.num_dst, edge_index=Poison.make(_NO_IDS), edge_index_j=Poison.make(_NO_IDS))
        given.update(adj_t=None, size_j=None, size=[None, inputs.num_dst])
        return given


_NO_IDS = (
    "node ids inside message() are numbered per rank. Pass the node tensor you want to index to propagate() and take "
    "it as an argument ending in _j or _i"
)


def _split(conv: MessagePassing, name: str, wanted: Any, plan: HaloPlan, kwargs: dict[str, Any]) -> Parts:
    parts = Parts(conv.node_dim)
    for argument in sorted(wanted):
        if argument in _INDICES:
            continue
        if argument.endswith(("_i", "_j")):
            source = argument.endswith("_j")
            _place_node_argument(parts, argument, source, conv, name, plan, kwargs)
        elif argument in kwargs:
            value = kwargs[argument]
            if isinstance(value, Tensor) and value.dim() > 0:
                parts.edge[argument] = value
            else:
                parts.rest[argument] = value
    return parts


def _place_node_argument(
    parts: Parts, argument: str, source: bool, conv: MessagePassing, name: str, plan: HaloPlan, kwargs: dict[str, Any]
) -> None:
    base = argument[:-2]
    if base not in kwargs:
        return
    value = kwargs[base]
    if isinstance(value, (tuple, list)):
        value = value[0 if source else 1]
    if not isinstance(value, Tensor):
        parts.rest[argument] = value
        return
    rows = plan.num_own_src if source else plan.num_dst
    if value.size(conv.node_dim) != rows:
        raise ValueError(
            f"{name} on rank {plan.comm.rank}: `{argument}` has {value.size(conv.node_dim)} rows along dimension "
            f"{conv.node_dim}, expected {rows} (the own {'source' if source else 'destination'} nodes)"
        )
    dim = conv.node_dim % value.dim()
    parts.dims[base] = dim
    (parts.src if source else parts.dst)[base] = value.movedim(dim, 0) if dim else value


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


class _Frozen:
    """Training flags as they were in forward, while a body runs again; and what the body left on the layer."""

    def __init__(self, conv: MessagePassing) -> None:
        self._flags = [(module, module.training) for module in conv.modules()]
        self._conv = conv
        self._before = {key: value for key, value in vars(conv).items() if isinstance(value, Tensor)}
        self._exits: list[list[tuple[torch.nn.Module, bool]]] = []

    def __enter__(self) -> None:
        self._exits.append([(m, m.training) for m, flag in self._flags if m.training != flag])
        for module, flag in self._flags:
            module.training = flag

    def __exit__(self, *error: object) -> None:
        for module, flag in self._exits.pop():
            module.training = flag

    def poison(self, name: str) -> None:
        """Replace tensors that the body stored on the layer: they hold the last chunk only."""
        for key, value in list(vars(self._conv).items()):
            if isinstance(value, Tensor) and value is not self._before.get(key) and not isinstance(value, Poison):
                reason = f"{name}: `{key}`, set inside message(), is not available on a sharded graph: it would hold "
                setattr(self._conv, key, Poison.make(reason + "the last few edges only"))
