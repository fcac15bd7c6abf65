"""A made-up rank: as many nodes, edges and halo rows as it is told, random edges, made-up fields."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardpass.core.graphs import OwnFields, Relation, ShardedGraph, ShardedHeteroGraph, build_relation
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, NODE, EdgeType, NodeType, Ownership


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


def made_up_rank(sizes: RankSizes, comm: Ranks, options: Options) -> ShardedGraph:
    """A rank's share of a random graph with these sizes, every peer sending it exactly as many rows as any other."""
    generator = torch.Generator().manual_seed(0)
    ownership = {kind: Ownership.from_counts([own.count] * sizes.ranks) for kind, own in sizes.nodes.items()}
    relations = {kind: _relation(sizes, kind, ownership[kind[0]], comm, options, generator) for kind in sizes.edges}
    fields = {
        kind: OwnFields(
            {name: made_up_rows(one, own.count, own.num_classes) for name, one in own.fields.items()}, lambda t: t
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


def _relation(
    sizes: RankSizes,
    kind: EdgeType,
    ownership: Ownership,
    comm: Ranks,
    options: Options,
    generator: torch.Generator,
) -> Relation:
    """The made-up edges of one type."""
    edges, begin, end = sizes.edges[kind], sizes.nodes[kind[0]].count, sizes.nodes[kind[2]].count
    count = edges.count if begin and end else 0
    others, cut = sizes.ranks - 1, min(edges.cut, count)
    per_peer = min(begin, round(edges.halo_rows / others), cut // others) if others else 0
    cut = cut if per_peer else 0
    sources = torch.empty(count, dtype=torch.int64)
    sources[cut:] = torch.randint(0, max(1, begin), (count - cut,), generator=generator)
    if cut:
        rows = per_peer * others
        halo = torch.randint(0, rows, (cut,), generator=generator)
        halo[:rows] = torch.arange(rows)  # so that each row is needed
        sources[:cut] = (halo // per_peer + 1) * begin + halo % per_peer
    dst = torch.randint(0, max(1, end), (count,), generator=generator)
    edge_ids = torch.randperm(count, generator=generator)
    fields = {name: made_up_rows(one, count, sizes.nodes[kind[2]].num_classes) for name, one in edges.fields.items()}
    return build_relation(comm, ownership, sources, dst, end, edge_ids, fields, options, (kind[0], kind[2]))


def made_up_rows(kind: Field, count: int, num_classes: int) -> Tensor:
    """`count` rows of a field; integers are below `num_classes`."""
    shape = (count, *kind.shape)
    if kind.dtype == torch.bool:
        return (torch.arange(count) % 2 == 0).view(-1, *[1] * len(kind.shape)).expand(shape).clone()
    if kind.dtype.is_floating_point:
        return torch.rand(shape, dtype=kind.dtype)
    return torch.randint(0, num_classes, shape, dtype=kind.dtype)
