"""PyG's message passing, carried out by the engine: what replaces `propagate` and `edge_updater` of one layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.nn.conv import GraphConv, MessagePassing, SAGEConv

from shardpass.core.aggregation import aggregate
from shardpass.core.exchange import HaloPlan
from shardpass.core.following import user_line
from shardpass.core.graphs import ShardedEdgeIndex, ShardedGraph
from shardpass.core.ranks import Ranks, RowSet, torch_private
from shardpass.core.tracing import Findings, Inputs, NeedsMessagesError, Program, Structure
from shardpass.core.wrapping import replaced_forward
from shardpass.errors import RefusedError
from shardpass.frontends.pyg.arguments import Arguments, moved
from shardpass.frontends.pyg.dependence import dependence_of
from shardpass.frontends.pyg.direction import Direction
from shardpass.frontends.pyg.frozen import Frozen
from shardpass.frontends.pyg.lazy import LazyEdges, LazySums
from shardpass.frontends.pyg.message import MessageFunction
from shardpass.frontends.pyg.private import with_hooks
from shardpass.frontends.pyg.refusals import no_explanations, refuse_ordinary

_INDICES = frozenset(
    ["edge_index_i", "edge_index_j", "edge_index", "size_i", "size_j", "adj_t", "index", "ptr", "dim_size"]
)
_HELD = ("_edge_type",)
"""Edge tensors that a layer keeps as attributes while it runs, for a message hook: `to_hetero_with_bases` does so."""
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
        self._findings: dict[bool, Findings] = {}
        self._hooks: list[int] = []
        self._nothing = torch.empty(0)
        self._others = frozenset([*vars(nn.Module()), "propagate", "edge_updater"])
        self._keeps_messages = "edge_index" in conv.inspector.get_param_dict("aggregate")

    def __getstate__(self) -> dict[str, Any]:
        return vars(ShardedMessagePassing(self.conv, self.name))  # a copy has found out nothing

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """`MessagePassing.propagate` on a sharded graph. Collective."""
        return with_hooks(self.conv, "propagate", (edge_index, size, kwargs), self._propagate)  # type: ignore[no-any-return]

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """`MessagePassing.edge_updater`: computed inside the next `propagate`, or on the first other use."""
        return with_hooks(self.conv, "edge_update", (edge_index, size, kwargs), self._edge_update)  # type: ignore[no-any-return]

    def _edge_update(self, edge_index: Any, _: Any, kwargs: dict[str, Any]) -> Tensor:
        self._refuse(edge_index)
        conv, direction = self.conv, Direction.of(self.conv, self.name, edge_index)
        arguments = self._sorted(conv._edge_user_args, direction, kwargs)
        frozen = Frozen(conv, self._others)

        def message(inputs: Inputs, prefix: str = "") -> Tensor:
            given = arguments.collected(inputs, prefix)
            with frozen.as_in_forward():
                rows = conv.edge_update(**conv.inspector.collect_param_data("edge_update", given))
            if isinstance(rows, Tensor):
                return rows
            raise RefusedError(
                f"{self.name}: edge_update() returns a {type(rows).__name__}: return one tensor, such as those of a "
                f"tuple side by side (torch.cat), and split what edge_updater() returns"
            )

        def compute() -> Tensor:
            program = Program(
                f"{self.name} edge update", arguments.src, arguments.dst, arguments.edge, message, None,
                findings=self._present_findings(),
            )  # fmt: skip
            return direction.from_edges(aggregate(program, direction.plan, direction.shards))

        return LazyEdges.make(self._nothing, self.name, arguments, message, compute, direction.shards)  # type: ignore[no-any-return]

    def _propagate(self, edge_index: Any, _: Any, kwargs: dict[str, Any]) -> Tensor:
        layers = 1 if self.conv.explain else self.conv.decomposed_layers
        if layers == 1:
            return self._propagate_layer(edge_index, kwargs)
        names = {name[:-2] for name in self.conv._user_args if name.endswith("_j")}
        pieces = {name: kwargs[name].chunk(layers, -1) for name in names}
        given = ({**kwargs, **{name: pieces[name][i] for name in names}} for i in range(layers))
        return torch.cat([self._propagate_layer(edge_index, one) for one in given], -1)

    def _propagate_layer(self, edge_index: Any, kwargs: dict[str, Any]) -> Tensor:
        self._refuse(edge_index)
        conv, direction = self.conv, Direction.of(self.conv, self.name, edge_index)
        plan = direction.plan
        arguments, lazy, held = self._arguments(direction, kwargs)
        frozen = Frozen(conv, self._others)
        function = MessageFunction(conv, arguments, lazy, held, frozen)
        program = Program(
            self.name, arguments.src, arguments.dst, arguments.edge, function.message, function.reduce, conv.node_dim,
            findings=self._present_findings(), watch=partial(_note_fused, list(lazy.values())),
            depends_on=None if held else dependence_of(conv, arguments, lazy, self._others),
        )  # fmt: skip
        depends_on, findings = program.depends_on, program.findings
        stores = None if depends_on is None else findings.find("stores", depends_on)
        if edge_index.flow is not None:
            edge_index.flow.note(self.name, plan.comm, arguments.src)
        arguments.src, arguments.dst = {}, {}  # these are inputs of the call; held here they would live until backward

        def compute(weight: Tensor | None = None) -> Tensor:
            out = None if self._keeps_messages else self._aggregated(program, direction, weight)
            if self._keeps_messages:
                out = self._aggregated_at_once(
                    replace(program, message=function.side_by_side, depends_on=None),
                    function,
                    direction,
                    edge_index,
                    kwargs,
                )
            function.release()
            stored = frozenset(frozen.stored()).union(stores or ())
            if depends_on is not None:  # last, so that it is forgotten after the structure
                findings.keep("stores", depends_on, stored)
            frozen.poison(self.name, stored)
            return conv.update(out, **self._collected("update", edge_index, plan, kwargs))

        return LazySums.make(self._nothing, compute) if self._is_mapped_next() else compute()

    def _aggregated(self, program: Program, direction: Direction, weight: Tensor | None) -> Any:
        try:
            return aggregate(program, direction.plan, direction.shards, weight)
        except NeedsMessagesError:
            self._keeps_messages = True
            return None

    def _aggregated_at_once(
        self, program: Program, function: MessageFunction, direction: Direction, edge_index: ShardedEdgeIndex,
        given: dict[str, Any],
    ) -> Any:  # fmt: skip
        """What the layer's `aggregate` makes of the messages of all own edges, which are kept. Collective.

        An `aggregate` that returns rows of edges, or reads `edge_index`, is ordinary code on these.
        """
        conv = self.conv
        rows = aggregate(replace(program, aggregate=None), direction.plan, direction.shards)
        messages = function.apart(direction.from_edges(rows))
        wanted = self._collected("aggregate", edge_index, direction.plan, given)
        return with_hooks(conv, "aggregate", (wanted,), lambda found: conv.aggregate(messages, **found))

    def _collected(
        self, method: str, edge_index: ShardedEdgeIndex, plan: HaloPlan, given: dict[str, Any]
    ) -> dict[str, Any]:
        """What PyG collects for a method of the layer that runs on all own edges at once."""
        conv = self.conv
        names, ends = conv.inspector.get_param_dict(method), dict[str, Tensor]()
        if not names:
            return {}
        if any(name == "index" or name[-2:] in ("_i", "_j") for name in names):
            ends = dict(zip("ji", edge_index if conv.flow == "source_to_target" else edge_index.flip(0)))
            given = {**given, "index": ends["i"], "edge_index_i": ends["i"], "edge_index_j": ends["j"]}
        sources, rows = (_count(plan.comm, of) for of in (plan.source_set, plan.dst_set))
        given = {**given, "edge_index": edge_index, "ptr": None, "adj_t": None}
        given.update(dim_size=rows, size_i=rows, size_j=sources, size=[sources, rows])
        for name in names:
            if name[-2:] in ("_i", "_j") and name not in given and name[:-2] in given:
                value, end = given[name[:-2]], name[-1]
                value = value["ji".index(end)] if isinstance(value, (tuple, list)) else value
                given[name] = value.index_select(conv.node_dim, ends[end])
        return conv.inspector.collect_param_data(method, given)  # type: ignore[no-any-return]

    def _arguments(
        self, direction: Direction, kwargs: dict[str, Any]
    ) -> tuple[Arguments, dict[str, LazyEdges], list[str]]:
        """The arguments of `message` and `aggregate`; edge updates among them that `message` computes; `_HELD` ones."""
        conv = self.conv
        wanted = conv.inspector.get_flat_param_names(["message", "aggregate"], exclude=list(conv.special_args))
        lazy = {k: v for k, v in kwargs.items() if isinstance(v, LazyEdges) and v.may_be_fused(direction.shards)}
        held = {name: value for name in _HELD if isinstance(value := vars(conv).get(name), Tensor)}
        given = {name: value for name, value in kwargs.items() if name not in lazy} | held
        arguments = self._sorted([*wanted, *held], direction, given)
        lazy = {name: value for name, value in lazy.items() if name in wanted}
        for name, value in lazy.items():
            arguments.absorb(f"{name}:", value.arguments)
        return arguments, lazy, [*held]

    def _sorted(self, wanted: Any, direction: Direction, kwargs: dict[str, Any]) -> Arguments:
        """The `wanted` ones of the arguments that `propagate` or `edge_updater` was called with."""
        arguments = Arguments()
        kwargs = {
            name: value.materialise() if isinstance(value, LazyEdges) else value for name, value in kwargs.items()
        }
        for name in sorted(set(wanted) - _INDICES):
            if name.endswith(("_i", "_j")):
                if (argument := name[:-2]) in kwargs:
                    self._refuse_one(argument, wanted, kwargs[argument], direction.plan)
                    self._place_node_argument(arguments, name, kwargs[argument], direction.plan)
            elif name in kwargs:
                value = kwargs[name]
                is_per_edge = isinstance(value, Tensor) and value.dim() > 0
                (arguments.edge if is_per_edge else arguments.rest)[name] = value
        arguments.edge = direction.to_edges(arguments.edge)
        return arguments

    def _refuse_one(self, argument: str, wanted: Any, value: Any, plan: HaloPlan) -> None:
        """Refuse a tensor that is to hold the rows of nodes of two types."""
        if isinstance(value, (tuple, list)):
            is_one = value[0] is value[1] and value[0] is not None
        else:
            is_one = {f"{argument}_i", f"{argument}_j"} <= set(wanted)
        if is_one and plan.joins_types:
            raise RefusedError(
                f"{user_line()}: {self.name}: `{argument}` is one tensor for edges from {plan.source_set.name} to "
                f"{plan.dst_set.name}, where a layer takes a pair: of sources, and of destinations (or None)"
            )

    def _place_node_argument(self, arguments: Arguments, name: str, value: Any, plan: HaloPlan) -> None:
        is_source, node_dim = name.endswith("_j"), self.conv.node_dim
        if isinstance(value, (tuple, list)):
            value = value[0 if is_source else 1]  # whatever the flow: so does the code that PyG generates
        if not isinstance(value, Tensor):
            arguments.rest[name] = value
            return
        rows = plan.num_own_src if is_source else plan.num_dst
        if value.size(node_dim) != rows:
            raise ValueError(
                f"{self.name} on rank {plan.comm.rank}: `{name}` has {value.size(node_dim)} rows along dimension "
                f"{node_dim}, expected {rows} (the own {'source' if is_source else 'destination'} nodes)"
            )
        dim = arguments.dims[name[:-2]] = node_dim % value.dim()
        (arguments.src if is_source else arguments.dst)[name[:-2]] = moved(value, dim, 0)

    def _present_findings(self) -> Findings:
        """What is known of the message function with the present hooks, in this training mode."""
        conv = self.conv
        hooks = [*conv._message_forward_pre_hooks, *conv._message_forward_hooks, *conv._aggregate_forward_pre_hooks]
        if hooks != self._hooks:
            self._findings, self._hooks = {}, hooks
        return self._findings.setdefault(conv.training, Findings())

    def _is_mapped_next(self) -> bool:
        """Whether the layer applies a linear map to its sums or means, and nothing before that."""
        conv = self.conv
        own = {"aggregate", "update", "message"} & vars(conv).keys() or replaced_forward(conv) is not None
        inner = conv.aggr_module
        hooked = conv._aggregate_forward_pre_hooks or conv._aggregate_forward_hooks or conv._propagate_forward_hooks
        hooked = hooked or (inner is not None and torch_private.has_forward_hook(inner))
        return (
            type(conv) in _MAPPED_NEXT
            and type(inner) in (SumAggregation, MeanAggregation)
            and conv.node_dim == -2
            and not own
            and not hooked
        )

    def _refuse(self, edge_index: Any) -> None:
        """Raise unless the engine can pass messages over `edge_index`."""
        if isinstance(edge_index, ShardedGraph):
            raise RefusedError(
                f"{self.name} was called with the graph, which only the wrapped model itself takes: call its layers "
                f"and other methods with graph.edge_index"
            )
        refuse_ordinary(self.name, edge_index)
        forward = edge_index.plan.comm.forward
        if edge_index.flow is not None and forward is not None and not forward.layers_are_given:
            raise RefusedError(f"{self.name}: pass what graph.layers returned as an argument of the wrapped model")
        if self.conv.explain:
            raise no_explanations(f"{self.name}: ")


def _count(comm: Ranks, of: RowSet) -> Any:
    """How many rows there are, as a model is told it, which may make a size of it."""
    rows = torch.zeros(()).expand(of.count)
    comm.mark_rows(rows, of)
    return rows.size(0)


def _note_fused(lazy: list[LazyEdges], structure: Structure) -> None:
    for value in lazy:
        value.fused(structure.drops or structure.random)
