"""A made-up rank: as many nodes, edges and halo rows as it is told, random edges, made-up fields."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.graphs import OwnFields, Relation, ShardedGraph, ShardedHeteroGraph, relation_of
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, NODE, EdgeType, NodeType, OwnerEdges, Ownership


@dataclass(frozen=True)
class Field:
    """A field of nodes or edges: the shape of one row, and its dtype."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class NodeSizes:
    """How much of the nodes of one type a rank has.

    Args:
        count: own nodes.
        fields: by name.
        num_classes: of the labels ``y``.
    """

    count: int
    fields: dict[str, Field] = field(default_factory=dict)
    num_classes: int = 2


@dataclass(frozen=True)
class EdgeSizes:
    """How much of the edges of one type a rank has.

    Args:
        count: edges that end in own nodes.
        cut: those of the edges that begin at nodes of other ranks.
        halo_rows: distinct sources of the cut edges.
        fields: by name.
    """

    count: int
    cut: int
    halo_rows: int
    fields: dict[str, Field] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSizes:
    """How much of a graph one rank has.

    Args:
        ranks: number of ranks of the run.
        nodes: by node type.
        edges: by edge type.
        per_host: ranks of one host. They share memory unless the options say otherwise.
    """

    ranks: int
    nodes: dict[NodeType, NodeSizes]
    edges: dict[EdgeType, EdgeSizes]
    per_host: int = 1

    @property
    def num_nodes(self) -> int:
        """Own nodes of all types."""
        return sum(sizes.count for sizes in self.nodes.values())

    @property
    def num_edges(self) -> int:
        """Own edges of all types."""
        return sum(sizes.count for sizes in self.edges.values())

    def scaled(self, scale: float) -> RankSizes:
        """The same rank, `scale` times as large; at least one node of each type."""

        def part(count: int) -> int:
            return round(count * scale)

        nodes = {kind: replace(sizes, count=max(1, part(sizes.count))) for kind, sizes in self.nodes.items()}
        edges = {
            kind: replace(sizes, count=part(sizes.count), cut=part(sizes.cut), halo_rows=part(sizes.halo_rows))
            for kind, sizes in self.edges.items()
        }
        return replace(self, nodes=nodes, edges=edges)


Edges = dict[EdgeType, list[OwnerEdges]]
"""The edges of each type, by the rank that owns their sources."""


def made_up_edges(sizes: RankSizes) -> Edges:
    """Random edges of a rank with these sizes, every peer sending it exactly as many rows as any other."""
    generator = torch.Generator().manual_seed(0)
    return {kind: _of_one_type(sizes, kind, generator) for kind in sizes.edges}


def _of_one_type(sizes: RankSizes, kind: EdgeType, generator: torch.Generator) -> list[OwnerEdges]:
    edges, begin, end = sizes.edges[kind], sizes.nodes[kind[0]].count, sizes.nodes[kind[2]].count
    others, cut = sizes.ranks - 1, min(edges.cut, edges.count)
    per_peer = min(begin, round(edges.halo_rows / others), cut // others) if others else 0
    cut = cut if per_peer else 0
    owners = []
    for rank in range(sizes.ranks):
        count = (cut * rank // others - cut * (rank - 1) // others) if rank else edges.count - cut
        num_rows = per_peer if rank else begin
        dst = torch.randint(0, end, (count,), generator=generator)
        indptr = torch.zeros(end + 1, dtype=torch.int32)
        indptr[1:] = torch.bincount(dst, minlength=end).cumsum(0)
        src_rows = torch.randint(0, max(1, num_rows), (count,), generator=generator, dtype=torch.int32)
        owners.append(OwnerEdges(torch.arange(per_peer if rank else 0, dtype=torch.int32), indptr, src_rows))
    return owners


def made_up_rank(sizes: RankSizes, comm: Ranks, options: Options, edges: Edges) -> ShardedGraph:
    """A rank's share of a random graph with these sizes, as it is loaded from a store; `edges` are copied."""
    ownership = {kind: Ownership.from_counts([own.count] * sizes.ranks) for kind, own in sizes.nodes.items()}
    relations = {kind: _relation(sizes, kind, comm, options, edges[kind]) for kind in sizes.edges}
    fields = {
        kind: OwnFields(
            {name: made_up_rows(one, own.count, own.num_classes) for name, one in own.fields.items()},
            comm,
            node_set(kind, own.count),
            lambda rows: rows,
        )
        for kind, own in sizes.nodes.items()
    }
    is_homogeneous = list(ownership) == [NODE] and list(relations) == [EDGE]
    return (ShardedGraph if is_homogeneous else ShardedHeteroGraph)(
        comm,
        options,
        ownership,
        {kind: torch.arange(own.count) for kind, own in sizes.nodes.items()},
        fields,
        relations,
        total_edges={kind: own.count * sizes.ranks for kind, own in sizes.edges.items()},
        num_classes={kind: own.num_classes for kind, own in sizes.nodes.items()},
    )


def _relation(sizes: RankSizes, kind: EdgeType, comm: Ranks, options: Options, owners: list[OwnerEdges]) -> Relation:
    """The made-up edges of one type."""
    edges, source, target = sizes.edges[kind], sizes.nodes[kind[0]], sizes.nodes[kind[2]]
    fields = {name: made_up_rows(one, edges.count, target.num_classes) for name, one in edges.fields.items()}
    return relation_of(
        comm,
        [OwnerEdges(*(tensor.clone() for tensor in owner)) for owner in owners],
        source.count,
        target.count,
        lambda: torch.randperm(edges.count),
        fields,
        options,
        (kind[0], kind[2]),
    )


def made_up_rows(kind: Field, count: int, num_classes: int) -> Tensor:
    """`count` rows of a field; integers are below `num_classes`."""
    shape = (count, *kind.shape)
    if kind.dtype == torch.bool:
        return (torch.arange(count) % 2 == 0).view(-1, *[1] * len(kind.shape)).expand(shape).clone()
    if kind.dtype.is_floating_point or kind.dtype.is_complex:
        return torch.rand(shape, dtype=kind.dtype)
    return torch.randint(0, num_classes, shape, dtype=kind.dtype)
