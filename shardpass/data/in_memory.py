"""A graph that every rank holds alike: which of its nodes and edges are a rank's own, and the graph made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.graphs import OwnFields, Relation, ShardedGraph, ShardedHeteroGraph, relation_of, row_of_last
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, HOST, NODE, EdgeType, NodeType, Ownership, edges_by_owner, stable_order
from shardpass.data.raw import ADJACENCY, RawGraph
from shardpass.data.rows import SIGNED_TWIN, Field, take_rows

Owners = Mapping[NodeType, Tensor | None]
"""The rank of each node by type, ``[num_nodes]`` int64; `None` gives each rank a range of the nodes."""


class Placed(NamedTuple):
    """The nodes of a type, as they are given to ranks.

    Args:
        ownership: of their new numbers.
        ids: the original numbers of own nodes, ascending.
        new: the new number of each node, or `None` where it is the original one.
    """

    ownership: Ownership
    ids: Tensor
    new: Tensor | None

    def new_of(self, ids: Tensor) -> Tensor:
        """The new numbers of nodes, int64."""
        return ids.long() if self.new is None else self.new[ids.long()]


def _placed(owner: Tensor | None, count: int, comm: Ranks) -> Placed:
    if owner is None or comm.size == 1:
        ownership = Ownership(tuple(count * rank // comm.size for rank in range(comm.size + 1)))
        return Placed(ownership, torch.arange(*ownership.offsets[comm.rank : comm.rank + 2]), None)
    owner = owner.to(comm.device)
    order = stable_order(owner, comm.size)
    ownership = Ownership.from_counts(torch.bincount(owner, minlength=comm.size).tolist())
    new = torch.empty_like(order)
    new[order] = torch.arange(order.numel(), device=order.device)
    return Placed(ownership, order[slice(*ownership.offsets[comm.rank : comm.rank + 2])], new)


def _taken(rows: Field, ids: Tensor | None, device: torch.device) -> Tensor:
    """The rows `ids` of a field, dense; `None` takes all, which are not copied if they are dense and on `device`."""
    is_plain = isinstance(rows, Tensor) and rows.layout is torch.strided and rows.dtype not in SIGNED_TWIN
    if is_plain and isinstance(rows, Tensor):
        return rows.to(device) if ids is None else rows.index_select(0, ids.to(rows.device)).to(device)
    return take_rows(rows, torch.arange(rows.shape[0]) if ids is None else ids.cpu()).to(device)


class OwnEdges(NamedTuple):
    """The edges of a type that end in own nodes.

    Args:
        chosen: their original positions, ascending; `None` if these are all.
        relation: the edges, without fields.
    """

    chosen: Tensor | None
    relation: Relation


@dataclass(frozen=True)
class Structure:
    """Nodes and edges, to which fields are given.

    Args:
        number: counts the structures of a run; the same on every rank.
    """

    number: int
    num_nodes: Mapping[NodeType, int]
    nodes: Mapping[NodeType, Placed]
    edges: Mapping[EdgeType, OwnEdges]

    def is_of(self, raw: RawGraph) -> bool:
        """Whether these are the types of `raw`, in its order, with as many nodes."""
        return [*self.num_nodes.items()] == [*raw.num_nodes.items()] and [*self.edges] == [*raw.edges]

    def graph(self, raw: RawGraph, comm: Ranks, options: Options) -> ShardedGraph:
        """The share of `raw`, whose nodes and edges these are."""
        fields, relations = {}, {}
        for kind, placed in self.nodes.items():
            ids = None if comm.size == 1 else placed.ids
            own = {name: _taken(rows, ids, comm.device) for name, rows in raw.node_fields.get(kind, {}).items()}
            fields[kind] = OwnFields(own, comm, node_set(kind, placed.ids.numel()))
        for edge_type, (chosen, relation) in self.edges.items():
            given = raw.edge_fields.get(edge_type, {})
            own = {name: _taken(rows, chosen, comm.device) for name, rows in given.items()}
            relations[edge_type] = replace(relation, fields=relation.fields.of_same_rows(own))
        is_homogeneous = list(fields) == [NODE] and list(relations) == [EDGE]
        classes = {kind: num_classes(some["y"]) for kind, some in raw.node_fields.items() if "y" in some}
        graph = (ShardedGraph if is_homogeneous else ShardedHeteroGraph)(
            comm, options, {kind: placed.ownership for kind, placed in self.nodes.items()},
            {kind: placed.ids for kind, placed in self.nodes.items()}, fields, relations,
            total_edges=raw.num_edges, num_classes=classes,
        )  # fmt: skip
        graph.column_names = {kind: {name: [*of] for name, of in some.items()} for kind, some in raw.columns.items()}
        graph.graph_fields = {
            name: value.to(comm.device) if isinstance(value, Tensor) else value
            for name, value in raw.graph_fields.items()
            if name != ADJACENCY
        }
        return graph


def structure_of(raw: RawGraph, owners: Owners, comm: Ranks, options: Options, number: int = 0) -> Structure:
    """The own nodes and edges of a graph that has been checked. Collective."""
    nodes = {kind: _placed(owners[kind], count, comm) for kind, count in raw.num_nodes.items()}
    edges = {kind: _own_edges(raw, kind, nodes, comm, options) for kind in raw.edges}
    return Structure(number, dict(raw.num_nodes), nodes, edges)


def _own_edges(
    raw: RawGraph, kind: EdgeType, nodes: Mapping[NodeType, Placed], comm: Ranks, options: Options
) -> OwnEdges:
    source, target, ends = nodes[kind[0]], nodes[kind[2]], raw.edges[kind]
    first, last = target.ownership.offsets[comm.rank : comm.rank + 2]
    src, rows = ends.src.to(comm.device), target.new_of(ends.dst.to(comm.device)) - first
    chosen = None if comm.size == 1 else ((rows >= 0) & (rows < last - first)).nonzero().view(-1)
    src, rows = (src, rows) if chosen is None else (src[chosen], rows[chosen])
    device, num_edges = HOST if options.stream_structure else comm.device, len(rows)
    owners, order = edges_by_owner(
        source.ownership, comm.rank, source.new_of(src).to(device), rows.to(device), last - first
    )

    def edge_ids() -> Tensor:
        return torch.arange(num_edges, device=comm.device) if chosen is None else chosen

    last_node = row_of_last(source.ids, source.ownership.num_total) if kind[0] == kind[2] else None
    weights = str(raw.graph_fields.get(ADJACENCY, "")).split()
    relation = relation_of(
        comm, owners, source.ownership.num_own(comm.rank), last - first, edge_ids, {}, options, (kind[0], kind[2]),
        order, last_node, next((name for name in weights if name in raw.edge_fields.get(kind, {})), None),
    )  # fmt: skip
    return OwnEdges(chosen, relation)


def num_classes(y: Tensor, comm: Ranks | None = None) -> int:
    """The number of classes in labels of the whole graph, or of all own rows where `comm` is given. Then collective."""
    if y.is_floating_point():
        return y.size(-1) if y.dim() > 1 else 1
    largest = int(y.max()) if y.numel() else -1
    if comm is not None:
        largest = int(comm.all_reduce(torch.tensor([largest]).to(comm.device), "max", label="number of classes"))
    return largest + 1
