"""ShardedGraph: one rank's share of a graph, as PyG code expects ``data`` to look."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakSet

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, build_halo_plan, node_set
from shardpass.core.graphs.batch_index import BatchIndex
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.flow import message_flow
from shardpass.core.ranks import Options, Ranks, RowSet
from shardpass.core.sharding import (
    EDGE,
    HOST,
    NODE,
    EdgeShards,
    EdgeType,
    NodeType,
    Ownership,
    build_shards,
    shard_order,
    smallest_index_dtype,
)
from shardpass.errors import RefusedError


class OwnFields(Mapping[str, Tensor]):
    """The fields of this rank's nodes or edges by name; each is read, put in order and moved to the device once."""

    def __init__(self, stored: Mapping[str, Tensor], place: Callable[[Tensor], Tensor]) -> None:
        self._stored, self._place = stored, place
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            if name not in self._stored:
                raise KeyError(f"no field {name!r} is stored for this graph; there are: {self.listed()}")
            self._read[name] = self._place(self._stored[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def read(self) -> Iterator[Tensor]:
        """The fields that were read."""
        return iter(self._read.values())

    def listed(self) -> str:
        """The names, for an error message."""
        return ", ".join(sorted(self)) or "none"


_AMBIGUOUS = {"num_nodes": "nodes", "num_edges": "edges", "num_nodes_dict": "nodes", "num_edges_dict": "edges"}


def refuse_ambiguous(name: str) -> None:
    """Raise if `name` is a count that means the whole graph in PyG, where a rank has one of its own too."""
    if name in _AMBIGUOUS:
        what = _AMBIGUOUS[name]
        of = "graph[type]" if name.endswith("_dict") else "graph"
        raise RefusedError(
            f"`{name}` of a sharded graph could mean two numbers: {of}.num_own_{what} counts this rank's {what}, and "
            f"{of}.total_{what} those of the whole graph. A model that is to run on plain PyG too can read a size from "
            f"a tensor, as in x.size(0)"
        )


@dataclass
class Relation:
    """The edges of one type into this rank's destination nodes.

    Args:
        plan: the halo of their sources.
        shards: the edges by source block, in the rank's edge order.
        edge_index: the stand-in for ``edge_index``.
        edge_ids: original position of each edge, ``[num_edges]`` int64.
        fields: edge tensors in the rank's edge order.
    """

    plan: HaloPlan
    shards: EdgeShards
    edge_index: ShardedEdgeIndex
    edge_ids: Tensor
    fields: OwnFields


def build_relation(
    comm: Ranks,
    sources: Ownership,
    src_ids: Tensor,
    dst_rows: Tensor,
    num_dst: int,
    edge_ids: Tensor,
    fields: Mapping[str, Tensor],
    options: Options,
    ends: tuple[NodeType, NodeType] | None = None,
) -> Relation:
    """The edges of one type, sharded. Collective; `sources` and `options` must be the same on every rank.

    Args:
        src_ids: global source id of each edge, ``[num_edges]`` int64.
        dst_rows: own destination row of each edge, ``[num_edges]`` int64.
        edge_ids, fields: per edge, in the same order as `src_ids`.
        ends: the types of sources and destinations, by which edges of another type are recognised.
    """
    device = HOST if options.stream_structure else comm.device
    src_ids, dst_rows, edge_ids = src_ids.to(device), dst_rows.to(device), edge_ids.to(device)
    plan, src_rows = build_halo_plan(comm, sources, src_ids, num_dst, options)
    plan = replace(plan, ends=ends)
    if options.mode == "halo":
        order = torch.argsort(edge_ids)  # layers that see whole neighbourhoods break ties by the order of edges
    else:
        order, _ = shard_order(src_rows, dst_rows, plan.blocks)  # shards are slices of edge tensors
    src_rows, dst_rows = src_rows[order], dst_rows[order]
    shards = build_shards(src_rows, dst_rows, plan.blocks, num_dst)
    edge_index = ShardedEdgeIndex.wrap(torch.stack([src_rows, dst_rows]), plan, shards)
    where = order.to(smallest_index_dtype(order.numel())) if fields else order[:0]  # is kept

    def placed(stored: Tensor) -> Tensor:
        with comm.unfollowed():  # a model may be the first to read a field
            rows = stored.to(device).index_select(0, where)
        comm.mark_rows(rows, plan.edge_set(shards.num_edges))
        return rows

    return Relation(plan, shards, edge_index, edge_ids[order], OwnFields(fields, placed))


class LoadedGraphs:
    """The graphs of a run that are in use."""

    def __init__(self) -> None:
        self.graphs: WeakSet[ShardedGraph] = WeakSet()


class ShardedGraph:
    """One rank's share of a graph: its own nodes, and the edges that end in them.

    Made by `load`; goes where PyG code expects ``data`` or ``edge_index``. Node tensors hold own rows
    ``[num_own_nodes, ...]``; edge tensors hold own edges ``[num_own_edges, ...]`` in the order of ``edge_index``. There
    is no ``num_nodes`` or ``num_edges``: a script that comes from PyG means the whole graph by them, and a size means
    this rank's share.
    """

    def __init__(
        self,
        comm: Ranks,
        options: Options,
        ownership: dict[NodeType, Ownership],
        node_ids: dict[NodeType, Tensor],
        node_fields: dict[NodeType, OwnFields],
        relations: dict[EdgeType, Relation],
        *,
        total_edges: dict[EdgeType, int],
        num_classes: Mapping[NodeType, int] | None = None,
        fingerprint: str = "",
        partition_fingerprint: str = "",
        contents: str = "",
    ) -> None:
        self.comm, self.options, self.ownership = comm, options, ownership
        self.fingerprint, self.partition_fingerprint, self.contents = fingerprint, partition_fingerprint, contents
        self.relations = relations
        self._node_ids, self._node_fields = node_ids, node_fields
        self._total_edges, self._num_classes = total_edges, dict(num_classes or {})
        comm.caches.of(LoadedGraphs).graphs.add(self)
        if options.stream_structure and not self.is_homogeneous:
            raise ValueError(
                f"Options(stream_structure=True) is for graphs of one node and one edge type, and this one has "
                f"{len(relations)} edge types: load it without that option"
            )

    def __repr__(self) -> str:
        return (
            f"ShardedGraph(rank {self.comm.rank} of {self.comm.size}: {self.num_own_nodes} of {self.total_nodes} "
            f"nodes, {self.num_own_edges} of {self.total_edges} edges, mode={self.options.mode!r})"
        )

    @property
    def node_types(self) -> list[NodeType]:
        return list(self.ownership)

    @property
    def edge_types(self) -> list[EdgeType]:
        return list(self.relations)

    @property
    def is_homogeneous(self) -> bool:
        return list(self.ownership) == [NODE] and list(self.relations) == [EDGE]

    def _single(self, what: str) -> None:
        if not self.is_homogeneous:
            raise ValueError(
                f"`{what}` is for graphs of one node and one edge type; this one has the node types {self.node_types} "
                f"and the edge types {self.edge_types}: name one, as in graph[type]"
            )

    @property
    def relation(self) -> Relation:
        """The edges, for graphs of one edge type."""
        self._single("relation")
        return self.relations[EDGE]

    @property
    def node(self) -> OwnFields:
        """Every stored node field by name, own rows."""
        self._single("node")
        return self._node_fields[NODE]

    @property
    def edge(self) -> OwnFields:
        """Every stored edge field by name, own edges."""
        return self.relation.fields

    def __getattr__(self, name: str) -> Tensor:
        refuse_ambiguous(name)
        if name.startswith("_") or not self.is_homogeneous:
            raise AttributeError(f"ShardedGraph has no attribute {name!r}")
        for fields in (self.node, self.edge):
            if name in fields:
                return fields[name]
        raise AttributeError(
            f"this graph has no field {name!r}; there are the node fields {self.node.listed()} and the edge fields "
            f"{self.edge.listed()}"
        )

    @property
    def edge_index(self) -> ShardedEdgeIndex:
        """The stand-in for ``edge_index``, ``[2, num_edges]``."""
        return self.relation.edge_index

    def layers(self, nodes: Tensor, num_layers: int) -> list[ShardedEdgeIndex]:
        """An ``edge_index`` for each layer of a model from which you only want the outputs of `nodes`. Collective.

        A layer that is called with its own ``edge_index`` leaves out the nodes and halo rows that none of `nodes`
        needs. If there is only message passing and row-wise code between the layers, the outputs of `nodes` are those
        of the whole graph. The rows of other nodes have no meaning. Norms over all nodes are refused.

        Args:
            nodes: own rows, ``[num_own_nodes]`` bool.
            num_layers: of the model, the same on every rank.
        """
        if nodes.dtype != torch.bool or nodes.shape != (self.num_own_nodes,):
            raise ValueError(
                f"rank {self.comm.rank}: layers takes a mask over own nodes, expected bool [{self.num_own_nodes}], got "
                f"{nodes.dtype} {list(nodes.shape)}"
            )
        relation = self.relation
        if self.options.stream_structure:
            raise ValueError("graph.layers with Options(stream_structure=True) is not supported: load without it")
        flows = message_flow(self.edge_index, self.ownership[NODE], nodes.to(self.comm.device), num_layers)
        numbers = relation.edge_index.sources_first
        return [ShardedEdgeIndex.wrap(numbers, relation.plan, relation.shards, flow=flow) for flow in flows]

    @cached_property
    def batch(self) -> BatchIndex:
        """The graph of each own node: all zeros, since a sharded graph is one graph.

        Pooling, norms and softmax over it take in the nodes of all ranks; they are collective and differentiable.
        """
        return BatchIndex.of(self.num_own_nodes, self.comm)

    @property
    def num_own_nodes(self) -> int:
        """Own nodes of this rank."""
        return sum(o.num_own(self.comm.rank) for o in self.ownership.values())

    @property
    def num_own_edges(self) -> int:
        """Own edges of this rank."""
        return sum(r.shards.num_edges for r in self.relations.values())

    @property
    def total_nodes(self) -> int:
        """Nodes of the whole graph."""
        return sum(o.num_total for o in self.ownership.values())

    @property
    def total_edges(self) -> int:
        """Edges of the whole graph."""
        return sum(self._total_edges.values())

    @property
    def num_halo(self) -> int:
        """Remote source rows that this rank's edges need."""
        return sum(r.plan.num_halo for r in self.relations.values())

    @property
    def num_features(self) -> int:
        """Channels of ``x``."""
        if "x" not in self.node and "feat" in self.node:
            raise KeyError("features are stored as 'feat', not 'x': use graph.node['feat'].size(1)")
        x = self.node["x"]
        return 1 if x.dim() == 1 else x.size(-1)

    @property
    def num_classes(self) -> int:
        """Classes of ``y``: columns of a float matrix, or the largest label of the whole graph plus one."""
        if NODE not in self._num_classes:
            named = "; store 'label' under that name, or give the number yourself" if "label" in self.node else ""
            raise ValueError(f"this graph has no labels: no node field 'y' is stored{named}")
        return self._num_classes[NODE]

    @property
    def node_ids(self) -> Tensor:
        """Original id of each own node, ``[num_own_nodes]`` int64."""
        self._single("node_ids")
        return self._node_ids[NODE]

    @property
    def node_ids_dict(self) -> dict[NodeType, Tensor]:
        """Original id of each own node, by type."""
        return dict(self._node_ids)

    @property
    def edge_ids(self) -> Tensor:
        """Original position of each own edge, ``[num_own_edges]`` int64."""
        return self.relation.edge_ids

    def fields_of(self, node_type: NodeType) -> OwnFields:
        """Every stored field of the nodes of a type, own rows."""
        return self._node_fields[node_type]

    def total_edges_of(self, edge_type: EdgeType) -> int:
        """Edges of a type in the whole graph."""
        return self._total_edges[edge_type]

    def row_sets(self) -> dict[RowSet, OwnFields]:
        """The sets of own rows, each with its fields."""
        found = {}
        for kind, owned in self.ownership.items():
            rows = node_set(kind, owned.num_own(self.comm.rank))
            found[replace(rows, total=owned.num_total)] = self._node_fields[kind]
        for edge_type, relation in self.relations.items():
            rows = relation.plan.edge_set(relation.shards.num_edges)
            found[replace(rows, total=self._total_edges[edge_type])] = relation.fields
        return found

    def ids_of(self, node_type: NodeType | None = None) -> tuple[Tensor, int]:
        """Original ids of own nodes of a type (None: the only one), and how many nodes the whole graph has of it."""
        if node_type is None and len(self.ownership) == 1:
            node_type = next(iter(self.ownership))
        if node_type not in self.ownership:
            raise ValueError(f"node_type={node_type!r}; expected one of the types of this graph: {self.node_types}")
        return self._node_ids[node_type], self.ownership[node_type].num_total


def gather(graph: ShardedGraph, rows: Tensor, node_type: NodeType | None = None) -> Tensor | None:
    """Own rows of every rank in the original node order, on rank 0; None on the others. Collective.

    Args:
        rows: ``[num_nodes, ...]``, one row per own node; the same dtype and trailing shape on every rank.
        node_type: of the nodes; needed where the graph has several.

    Returns:
        ``[total_nodes, ...]`` on rank 0.

    Raises:
        ValueError: another number of rows, or a node type that is missing or unknown.
    """
    ids, total = graph.ids_of(node_type)
    if rows.size(0) != ids.numel():
        raise ValueError(
            f"rank {graph.comm.rank}: gather takes one row per own node, expected {ids.numel()} rows, "
            f"got {rows.size(0)}"
        )
    comm = graph.comm

    def at_root(own: Tensor, label: str) -> list[Tensor]:
        return comm.all_to_all([own] + [own[:0]] * (comm.size - 1), label=label)

    parts = at_root(rows.detach().contiguous(), "gather rows")
    id_parts = at_root(ids.to(comm.device), "gather ids")
    if comm.rank != 0:
        return None
    out = rows.new_empty((total, *rows.shape[1:]))
    for part, part_ids in zip(parts, id_parts):
        out[part_ids] = part
    return out
