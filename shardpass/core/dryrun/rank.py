"""A made-up rank: as many nodes, edges and halo rows as it is told, random edges, made-up fields."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardpass.core.graphs import OwnFields, ShardedGraph, build_relation
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, NODE, Ownership


@dataclass(frozen=True)
class Field:
    """A field of nodes or edges: the shape of one row, and its dtype."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class RankSizes:
    """How much of a graph one rank has.

    Args:
        ranks: number of ranks of the run.
        nodes: own nodes.
        edges: edges that end in own nodes.
        cut_edges: those of the edges that begin at nodes of other ranks.
        halo_rows: distinct sources of the cut edges.
        node_fields, edge_fields: by name.
        num_classes: of the labels ``y``.
        per_host: ranks of one host. They share memory unless the options say otherwise.
    """

    ranks: int
    nodes: int
    edges: int
    cut_edges: int
    halo_rows: int
    node_fields: dict[str, Field] = field(default_factory=dict)
    edge_fields: dict[str, Field] = field(default_factory=dict)
    num_classes: int = 2
    per_host: int = 1

    def scaled(self, scale: float) -> RankSizes:
        """The same rank, `scale` times as large; at least one node."""

        def part(count: int) -> int:
            return round(count * scale)

        return replace(
            self,
            nodes=max(1, part(self.nodes)),
            edges=part(self.edges),
            cut_edges=part(self.cut_edges),
            halo_rows=part(self.halo_rows),
        )


def made_up_rank(sizes: RankSizes, comm: Ranks, options: Options) -> ShardedGraph:
    """A rank's share of a random graph with these sizes, every peer sending it exactly as many rows as any other."""
    generator = torch.Generator().manual_seed(0)
    others = sizes.ranks - 1
    cut = min(sizes.cut_edges, sizes.edges)
    per_peer = min(sizes.nodes, round(sizes.halo_rows / others), cut // others) if others else 0
    cut = cut if per_peer else 0
    sources = torch.empty(sizes.edges, dtype=torch.int64)
    sources[cut:] = torch.randint(0, sizes.nodes, (sizes.edges - cut,), generator=generator)
    if cut:
        rows = per_peer * others
        halo = torch.randint(0, rows, (cut,), generator=generator)
        halo[:rows] = torch.arange(rows)  # so that each row is needed
        sources[:cut] = (halo // per_peer + 1) * sizes.nodes + halo % per_peer
    dst = torch.randint(0, sizes.nodes, (sizes.edges,), generator=generator)
    edge_ids = torch.randperm(sizes.edges, generator=generator)
    ownership = Ownership.from_counts([sizes.nodes] * sizes.ranks)
    fields = {name: made_up_rows(kind, sizes.edges, sizes.num_classes) for name, kind in sizes.edge_fields.items()}
    relation = build_relation(comm, ownership, sources, dst, sizes.nodes, edge_ids, fields, options, (NODE, NODE))
    nodes = {name: made_up_rows(kind, sizes.nodes, sizes.num_classes) for name, kind in sizes.node_fields.items()}
    return ShardedGraph(
        comm,
        options,
        {NODE: ownership},
        {NODE: torch.arange(sizes.nodes)},
        {NODE: OwnFields(nodes, lambda t: t)},
        {EDGE: relation},
        total_edges={EDGE: sizes.edges * sizes.ranks},
        num_classes={NODE: sizes.num_classes},
    )


def made_up_rows(kind: Field, count: int, num_classes: int) -> Tensor:
    """`count` rows of a field; integers are below `num_classes`."""
    shape = (count, *kind.shape)
    if kind.dtype == torch.bool:
        return (torch.arange(count) % 2 == 0).view(-1, *[1] * len(kind.shape)).expand(shape).clone()
    if kind.dtype.is_floating_point:
        return torch.rand(shape, dtype=kind.dtype)
    return torch.randint(0, num_classes, shape, dtype=kind.dtype)
