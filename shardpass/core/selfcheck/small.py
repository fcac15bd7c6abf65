"""The arguments of a model's call, made over for a small random graph: whole, or one rank's share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardpass.core.graphs import BatchIndex, ShardedEdgeIndex, ShardedGraph, ShardedHeteroGraph
from shardpass.core.ranks import Options, Ranks, torch_private
from shardpass.core.selfcheck.frontend import Fields, Frontend
from shardpass.core.sharding import EDGE, NODE, EdgeType, NodeType

Kind = NodeType | EdgeType
_NODES, _EDGES = (23, 19, 29, 17, 31), (97, 83, 109, 71, 127)


class CannotCheckError(Exception):
    """The call cannot be made over, with the reason."""


@dataclass(frozen=True)
class GraphArgument:
    """A graph, with the fields that the model may read from it."""

    fields: Fields


@dataclass(frozen=True)
class EdgeIndexArgument:
    """The ends of the edges of one type."""

    kind: EdgeType


@dataclass(frozen=True)
class BatchArgument:
    """Which graph of a batch each node belongs to; the small graph is one."""

    rows: Tensor


@dataclass(frozen=True)
class RowsArgument:
    """Rows of the nodes or edges of one type."""

    kind: Kind
    rows: Tensor


@dataclass(frozen=True)
class Constant:
    """Anything else."""

    value: object


Argument = GraphArgument | EdgeIndexArgument | BatchArgument | RowsArgument | Constant
"""One leaf of the arguments, made over for the whole small graph."""


class SmallCall:
    """A call on a small random graph with the types of the real one.

    Args:
        frontend: that runs it.
        args, kwargs: of the call on this rank's share of the real graph.
        method: of the model that is called.
        dtype: of all floating point arguments.

    Raises:
        CannotCheckError: they cannot be made over.
    """

    def __init__(
        self,
        frontend: Frontend,
        args: Any,
        kwargs: Any,
        method: str = "forward",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.frontend, self.method, self.dtype = frontend, method, dtype
        leaves, self._structure = torch_private.tree_flatten_with_path((args, kwargs))
        self._generator = torch.Generator().manual_seed(0)
        real_nodes, real_edges = _real_sizes(leaves, frontend)
        self.num_nodes: dict[NodeType, int] = _numbers(real_nodes, _NODES, "node")
        num_edges: dict[EdgeType, int] = _numbers(real_edges, _EDGES, "edge")
        self.edges = {kind: self._random_edges(kind, count) for kind, count in num_edges.items()}
        self.counts: dict[Any, int] = {**self.num_nodes, **num_edges}
        real: dict[Any, int] = {**real_nodes, **real_edges}
        self._arguments = [self._argument(path, leaf, real) for path, leaf in leaves]
        self.owners = {kind: self._drawn(3, count) for kind, count in self.num_nodes.items()}

    def whole(self, grads: bool) -> tuple[Any, Any, list[Tensor]]:
        """``(args, kwargs, inputs)`` on the whole small graph; `inputs` are the floating point leaves."""
        inputs: list[Tensor] = []
        values: list[Any] = []
        for argument in self._arguments:
            match argument:
                case GraphArgument(fields):
                    values.append(self.frontend.whole(self.num_nodes, dict(self.edges), fields))
                case EdgeIndexArgument(kind):
                    values.append(self.edges[kind])
                case RowsArgument(_, rows):
                    values.append(_leaf(rows, grads, inputs))
                case BatchArgument(value) | Constant(value):
                    values.append(_copy(value))
        args, kwargs = torch_private.tree_unflatten(values, self._structure)
        return args, kwargs, inputs

    def sharded(self, comm: Ranks, options: Options, grads: bool) -> tuple[Any, Any, list[Tensor], dict[Any, Tensor]]:
        """``(args, kwargs, inputs, ids)`` of one rank; `ids` are its rows of every node and edge type. Collective."""
        graph = self.frontend.shard(self.num_nodes, self.edges, self.owners, comm, options)
        ids = _ids(graph)
        inputs: list[Tensor] = []
        values: list[Any] = []
        for argument in self._arguments:
            match argument:
                case GraphArgument(fields):
                    own = {k: {n: t[ids[k]] for n, t in named.items()} for k, named in fields.items()}
                    values.append(self.frontend.sharded(graph, own))
                case EdgeIndexArgument(kind):
                    values.append(graph.relations[kind].edge_index)
                case BatchArgument():
                    values.append(graph.batch)
                case RowsArgument(kind, rows):
                    values.append(_leaf(rows[ids[kind]], grads, inputs))
                case Constant(value):
                    values.append(_copy(value))
        args, kwargs = torch_private.tree_unflatten(values, self._structure)
        return args, kwargs, inputs, ids

    @property
    def input_kinds(self) -> list[Any]:
        """The node or edge type of each of the inputs."""
        given = [argument for argument in self._arguments if isinstance(argument, RowsArgument)]
        return [argument.kind for argument in given if argument.rows.is_floating_point()]

    def _drawn(self, limit: int, count: int) -> Tensor:
        return torch.randint(0, limit, (count,), generator=self._generator)

    def _random_edges(self, kind: EdgeType, count: int) -> Tensor:
        edges = torch.stack([self._drawn(self.num_nodes[end], count) for end in (kind[0], kind[2])])
        edges[:, :2] = edges[:, 2:4]  # duplicates
        if kind[0] == kind[2]:
            edges[1, 4:6] = edges[0, 4:6]  # self-loops
        if self.frontend.every_node:
            edges[1, : self.num_nodes[kind[2]]] = torch.arange(self.num_nodes[kind[2]])
        edges[1, -1] = self.num_nodes[kind[2]] - 1  # from the largest id, layers guess the number of nodes
        return edges[:, torch.argsort(edges[1], stable=True)]  # as aggregations with an order want them

    def _argument(self, path: Any, leaf: Any, real: dict[Any, int]) -> Argument:
        keys = [entry.key for entry in path if isinstance(entry, torch_private.MappingKey) and entry.key in self.counts]
        if self.frontend.core_of(leaf) is not None:
            return GraphArgument(self._fields(leaf))
        if isinstance(leaf, ShardedEdgeIndex):
            if leaf.is_reversed or leaf.derivation is not None:
                raise CannotCheckError("it is called with an edge_index that was changed outside it")
            return EdgeIndexArgument(keys[-1] if keys else EDGE)
        if isinstance(leaf, BatchIndex):
            return BatchArgument(torch.zeros(self.num_nodes[NODE], dtype=torch.int64))
        if not isinstance(leaf, Tensor):
            return Constant(leaf)
        kind = keys[-1] if keys else _kind_of(leaf, real)
        if kind is None:
            return Constant(self._cast(leaf.detach().cpu()))
        return RowsArgument(kind, self._rows(leaf.detach().cpu(), self.counts[kind]))

    def _fields(self, graph: Any) -> Fields:
        """Fields of the small graph, in place of those that the model may read from the real one."""
        return {
            kind: {name: self._rows(real.detach().cpu(), self.counts[kind]) for name, real in named.items()}
            for kind, named in self.frontend.fields_of(graph).items()
        }

    def _rows(self, real: Tensor, count: int) -> Tensor:
        """`count` rows drawn from the real ones, floating point ones stretched a little each."""
        rows = real[self._drawn(real.size(0), count)] if real.size(0) else real.new_zeros((count, *real.shape[1:]))
        if not rows.is_floating_point():
            return rows
        factors = torch.rand(rows.shape, generator=self._generator, dtype=torch.float64) + 0.5
        return self._cast(rows.double() * factors if bool(rows.any()) else factors)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _real_sizes(leaves: list[Any], frontend: Frontend) -> tuple[dict[NodeType, int], dict[EdgeType, int]]:
    """Own nodes and own edges of the real graph, by type, from the stand-ins among the arguments."""
    nodes: dict[NodeType, int] = {}
    edges: dict[EdgeType, int] = {}
    for path, given in leaves:
        leaf = frontend.core_of(given) or given
        if isinstance(leaf, ShardedHeteroGraph):
            nodes |= leaf.num_nodes_dict
            edges |= {kind: relation.shards.num_edges for kind, relation in leaf.relations.items()}
        elif isinstance(leaf, (ShardedGraph, ShardedEdgeIndex)):
            index = leaf.edge_index if isinstance(leaf, ShardedGraph) else leaf
            keys = [
                entry.key
                for entry in path
                if isinstance(entry, torch_private.MappingKey) and isinstance(entry.key, tuple)
            ]
            kind = keys[-1] if keys else EDGE
            if not keys and index.plan.num_own_src != index.plan.num_dst:
                raise CannotCheckError("it is called with one edge type of a graph of several")
            nodes |= {kind[0]: index.plan.num_own_src, kind[2]: index.plan.num_dst}
            edges[kind] = index.size(1)
    return nodes, edges


def _numbers(real: dict[Any, int], numbers: tuple[int, ...], what: str) -> dict[Any, int]:
    if len(real) > 40:
        raise CannotCheckError(f"the graph has {len(real)} {what} types")
    return {kind: numbers[i % 5] + 150 * (i // 5) for i, kind in enumerate(real)}


def _kind_of(tensor: Tensor, real: dict[Any, int]) -> Any:
    if tensor.dim() == 0:
        return None
    fits = [kind for kind, count in real.items() if count == tensor.size(0)]
    if len(fits) > 1:
        raise CannotCheckError(f"an argument with {tensor.size(0)} rows may belong to any of {fits}")
    return fits[0] if fits else None


def _ids(graph: ShardedGraph) -> dict[Any, Tensor]:
    if isinstance(graph, ShardedHeteroGraph):
        return {**graph.node_ids_dict, **{kind: relation.edge_ids for kind, relation in graph.relations.items()}}
    return {NODE: graph.node_ids, EDGE: graph.edge_ids}


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _leaf(rows: Tensor, grads: bool, inputs: list[Tensor]) -> Tensor:
    """A copy of `rows` that the model may change in place; floating point rows are among the `inputs` from here on."""
    if not rows.is_floating_point():
        return rows.clone()
    inputs.append(rows.detach().clone().requires_grad_(grads))
    return inputs[-1].clone()
