"""PyG's message passing, carried out by the engine: what replaces `propagate` and `edge_updater` of one layer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.nn.conv import GraphConv, MessagePassing, SAGEConv

from shardpass.core.aggregation import aggregate
from shardpass.core.exchange import HaloPlan
from shardpass.core.graphs import ReversedEdges, ShardedEdgeIndex, ShardedGraph, reversed_edges
from shardpass.core.memory import only_watch
from shardpass.core.ranks import agree
from shardpass.core.sharding import DerivedShards, EdgeShards
from shardpass.core.tracing import Inputs, Program, Structure
from shardpass.errors import RefusedError
from shardpass.frontends.pyg.body import Body, Parts
from shardpass.frontends.pyg.frozen import Frozen
from shardpass.frontends.pyg.lazy import LazyEdges, LazySums
from shardpass.frontends.pyg.refusals import refuse_ordinary

_INDICES = frozenset(
    ["edge_index_i", "edge_index_j", "edge_index", "size_i", "size_j", "adj_t", "index", "ptr", "dim_size"]
)
_HELD = frozenset(["_edge_type"])
"""Edge tensors that a layer holds as attributes while it runs, for a message hook: `to_hetero_with_bases` does so."""
_MAPPED_NEXT = (SAGEConv, GraphConv)
"""Layers whose forward does nothing between `propagate` and a linear map of its result, nothing changed in place."""


class ShardedMessagePassing:
    """The engine's side of one PyG layer: replaces its `propagate` and `edge_updater`.

    Args:
        conv: the layer.
        name: what the user calls it, e.g. ``"GATConv (convs.1)"``.
    """

    def __init__(self, conv: MessagePassing, name: str) -> None:
        self.conv, self.name = conv, name
        self._checked: dict[bool, set[str]] = {}
        self._hooks: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"conv": self.conv, "name": self.name, "_checked": {}, "_hooks": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedMessagePassing:
        from copy import deepcopy

        return ShardedMessagePassing(deepcopy(self.conv, memo), self.name)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """`MessagePassing.propagate` on a sharded graph."""
        for hook in self.conv._propagate_forward_pre_hooks.values():
            changed = hook(self.conv, (edge_index, size, kwargs))
            edge_index, size, kwargs = (edge_index, size, kwargs) if changed is None else changed
        self._refuse(edge_index)
        out = self._propagate(edge_index, kwargs)
        for hook in self.conv._propagate_forward_hooks.values():
            changed = hook(self.conv, (edge_index, size, kwargs), out)
            out = out if changed is None else changed
        return out

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """`MessagePassing.edge_updater`: deferred into the propagate that follows, or computed on first other use."""
        for hook in self.conv._edge_update_forward_pre_hooks.values():
            changed = hook(self.conv, (edge_index, size, kwargs))
            edge_index, size, kwargs = (edge_index, size, kwargs) if changed is None else changed
        self._refuse(edge_index)
        out = self._deferred(edge_index, kwargs)
        for hook in self.conv._edge_update_forward_hooks.values():
            changed = hook(self.conv, (edge_index, size, kwargs), out)
            out = out if changed is None else changed
        return out

    def _deferred(self, edge_index: ShardedEdgeIndex, kwargs: dict[str, Any]) -> Any:
        direction = Direction.of(self.conv, self.name, edge_index)
        parts = _split(self.conv, self.name, self.conv._edge_user_args, direction, kwargs)
        frozen = Frozen(self.conv)

        def message(inputs: Inputs, prefix: str = "") -> Tensor:
            given = parts.collected(inputs, prefix)
            with frozen:
                return self.conv.edge_update(**self.conv.inspector.collect_param_data("edge_update", given))

        def compute() -> Tensor:
            program = Program(
                f"{self.name} edge update", parts.src, parts.dst, parts.edge, message, None, checked=self._passed()
            )
            return direction.from_edges(aggregate(program, direction.plan, direction.shards))

        return LazyEdges.make(self.name, parts, message, compute, direction.shards)

    def _passed(self) -> set[str]:
        """The signatures that passed the row-wise check in this training mode."""
        return self._checked.setdefault(self.conv.training, set())

    def _propagate(self, edge_index: ShardedEdgeIndex, kwargs: dict[str, Any]) -> Tensor:
        conv, direction = self.conv, Direction.of(self.conv, self.name, edge_index)
        plan = direction.plan
        lazy = {k: v for k, v in kwargs.items() if isinstance(v, LazyEdges) and v.may_be_fused(direction.shards)}
        wanted = conv.inspector.get_flat_param_names(["message", "aggregate"], exclude=list(conv.special_args))
        held = {name: value for name in _HELD if isinstance(value := vars(conv).get(name), Tensor)}
        given_now = {k: v for k, v in kwargs.items() if k not in lazy} | held
        parts = _split(conv, self.name, [*wanted, *held], direction, given_now)
        lazy = {name: value for name, value in lazy.items() if name in wanted}
        for name, value in lazy.items():
            parts.absorb(f"{name}:", value.parts)
        frozen = Frozen(conv)
        hooks = [*conv._message_forward_pre_hooks, *conv._message_forward_hooks, *conv._aggregate_forward_pre_hooks]
        if hooks != self._hooks:  # what was found row-wise was so without them
            self._checked, self._hooks = {}, hooks

        body = Body(conv, parts, lazy, [*held], frozen)
        program = Program(
            self.name,
            parts.src,
            parts.dst,
            parts.edge,
            body.message,
            body.reduce,
            conv.node_dim,
            checked=self._passed(),
        )
        program.watch = partial(_note_fused, list(lazy.values()))
        if edge_index.flow is not None:
            edge_index.flow.note(self.name, plan.comm, parts.src)
        parts.src, parts.dst = {}, {}  # what the body holds lives until backward: node rows are inputs of the call
        whole = {**kwargs, "dim_size": plan.num_dst, "size_i": plan.num_dst, "size_j": plan.num_own_src}

        def compute(weight: Tensor | None = None) -> Tensor:
            out = aggregate(program, plan, direction.shards, weight)
            body.release()
            frozen.poison(self.name)
            return conv.update(out, **conv.inspector.collect_param_data("update", whole))

        return LazySums.make(compute) if self._is_mapped_next() else compute()

    def _is_mapped_next(self) -> bool:
        """Whether the layer applies a linear map to its sums or means, and nothing before that."""
        conv = self.conv
        forward = vars(conv).get("forward")
        own = {"aggregate", "update", "message"} & vars(conv).keys() or getattr(forward, "adapted", forward) is not None
        inner = conv.aggr_module
        hooked = conv._aggregate_forward_pre_hooks or conv._aggregate_forward_hooks or conv._propagate_forward_hooks
        hooked = hooked or not (inner is None or only_watch({**inner._forward_pre_hooks, **inner._forward_hooks}))
        return (
            type(conv) in _MAPPED_NEXT
            and type(inner) in (SumAggregation, MeanAggregation)
            and conv.node_dim == -2
            and not own
            and not hooked
        )

    def _refuse(self, edge_index: Any) -> None:
        conv = self.conv
        if isinstance(edge_index, ShardedGraph):
            raise RefusedError(
                f"{self.name}: only the wrapped model itself is called with the graph; its layers and other "
                f"methods are called with graph.edge_index"
            )
        refuse_ordinary(self.name, edge_index)
        forward = edge_index.plan.comm.forward
        if forward is not None and forward.graph_is_hidden:
            if edge_index.flow is not None:
                raise RefusedError(f"{self.name}: pass what graph.layers returned as an argument of the wrapped model")
            forward.graph_is_hidden = False
            if edge_index.plan.comm.rank == 0:
                warnings.warn(
                    f"{self.name} runs without the self-check: the graph is not among the arguments of the wrapped "
                    f"model (it is kept on the model, or inside an object). Pass it as an argument of its own, once",
                    stacklevel=4,
                )
        if conv.explain:
            raise RefusedError(f"{self.name}: explanations are not supported on a sharded graph; set explain=False")


@dataclass(frozen=True)
class Direction:
    """The edges of one call in the direction of its messages: ordinary ones, or those of a reversed list.

    Args:
        name: of the layer.
        plan, shards: of the edges in that direction.
        against: what carries edge tensors between the two directions; None where messages follow the edges.
    """

    name: str
    plan: HaloPlan
    shards: EdgeShards
    against: ReversedEdges | None

    @classmethod
    def of(cls, conv: MessagePassing, name: str, edge_index: ShardedEdgeIndex) -> Direction:
        """The direction in which `conv` sends messages over `edge_index`. Collective where it is against the edges."""
        follows = conv.flow == "source_to_target"
        flow = edge_index.flow
        if follows != edge_index.is_reversed:
            return cls(name, edge_index.plan if flow is None else flow.plan, shards_of(edge_index), None)
        if flow is not None:
            raise RefusedError(
                f"{name}: messages against the edges are not supported with graph.layers(); use the graph"
            )
        against = reversed_edges(edge_index, name)
        return cls(name, against.edge_index.plan, shards_of(against.edge_index), against)

    def to_edges(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The edge tensors of a call in the order of `shards`. Those are edge tensors that are so on every rank."""
        against = self.against
        if against is None or not tensors:
            return tensors
        names = sorted(tensors)
        mine = [int(tensors[n].size(0) == against.num_old) for n in names]
        answers = agree(self.plan.comm, f"{self.name}: edge tensors", [len(names), *mine])
        common = {n for n, *flags in zip(names, *(answer[1:] for answer in answers)) if all(flags)}
        return {n: against.to_new(t, f"{self.name}: {n}") if n in common else t for n, t in sorted(tensors.items())}

    def from_edges(self, rows: Tensor) -> Tensor:
        """A result per edge in the order of the edge list that the layer was given."""
        return rows if self.against is None else self.against.to_old(rows, f"{self.name}: edge result")


def _note_fused(lazy: list[LazyEdges], structure: Structure) -> None:
    for value in lazy:
        value.fused(structure.drops or structure.random)


def shards_of(edge_index: ShardedEdgeIndex) -> EdgeShards:
    """The shards of an edge list; those of one that was derived in forward are found again."""
    if edge_index.flow is not None:
        found: EdgeShards = edge_index.flow.shards_of(edge_index)
        return found
    if edge_index.shards is not None:
        return edge_index.shards
    plan = edge_index.plan
    return plan.comm.caches.of(DerivedShards, plan).find(edge_index.edges, plan.blocks, plan.num_dst)


def _split(conv: MessagePassing, name: str, wanted: Any, direction: Direction, kwargs: dict[str, Any]) -> Parts:
    parts = Parts(conv.node_dim)
    kwargs = {k: v.materialise() if isinstance(v, LazyEdges) else v for k, v in kwargs.items()}
    for argument in sorted(wanted):
        if argument in _INDICES:
            continue
        if argument.endswith(("_i", "_j")):
            source = argument.endswith("_j")
            _place_node_argument(parts, argument, source, conv, name, direction, kwargs)
        elif argument in kwargs:
            value = kwargs[argument]
            if isinstance(value, Tensor) and value.dim() > 0:
                parts.edge[argument] = value
            else:
                parts.rest[argument] = value
    parts.edge = direction.to_edges(parts.edge)
    return parts


def _place_node_argument(
    parts: Parts,
    argument: str,
    source: bool,
    conv: MessagePassing,
    name: str,
    direction: Direction,
    kwargs: dict[str, Any],
) -> None:
    base, plan = argument[:-2], direction.plan
    if base not in kwargs:
        return
    value = kwargs[base]
    if isinstance(value, (tuple, list)):
        value = value[0 if source else 1]  # whatever the flow: so does the code that PyG generates
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
