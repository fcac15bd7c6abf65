"""A made-up rank: as many nodes, edges and halo rows as it is told, random edges, made-up fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardpass.core.graphs import OwnFields, ShardedGraph, relation_of
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, NODE, OwnerEdges, Ownership


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


def made_up_edges(sizes: RankSizes) -> list[OwnerEdges]:
    """Random edges of a rank with these sizes, every peer sending it exactly as many rows as any other."""
    generator = torch.Generator().manual_seed(0)
    others = sizes.ranks - 1
    cut = min(sizes.cut_edges, sizes.edges)
    per_peer = min(sizes.nodes, round(sizes.halo_rows / others), cut // others) if others else 0
    cut = cut if per_peer else 0
    owners = []
    for rank in range(sizes.ranks):
        count = (cut * rank // others - cut * (rank - 1) // others) if rank else sizes.edges - cut
        num_rows = per_peer if rank else sizes.nodes
        dst = torch.randint(0, sizes.nodes, (count,), generator=generator)
        indptr = torch.zeros(sizes.nodes + 1, dtype=torch.int32)
        indptr[1:] = torch.bincount(dst, minlength=sizes.nodes).cumsum(0)
        src_rows = torch.randint(0, max(1, num_rows), (count,), generator=generator, dtype=torch.int32)
        owners.append(OwnerEdges(torch.arange(per_peer if rank else 0, dtype=torch.int32), indptr, src_rows))
    return owners


def made_up_rank(sizes: RankSizes, comm: Ranks, options: Options, edges: Sequence[OwnerEdges]) -> ShardedGraph:
    """A rank's share of a random graph with these sizes, as it is loaded from a store; `edges` are copied."""
    ownership = Ownership.from_counts([sizes.nodes] * sizes.ranks)
    fields = {name: made_up_rows(kind, sizes.edges, sizes.num_classes) for name, kind in sizes.edge_fields.items()}
    relation = relation_of(
        comm,
        [OwnerEdges(*(tensor.clone() for tensor in owner)) for owner in edges],
        sizes.nodes,
        sizes.nodes,
        lambda: torch.randperm(sizes.edges),
        fields,
        options,
        (NODE, NODE),
    )
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
