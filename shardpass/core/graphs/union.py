"""Several relations as one edge list, for layers that put the nodes of several types into one tensor.

The rows of a type are consecutive rows of that tensor, so a relation's source rows and destination rows each begin
somewhere in it. The union has its own halo plan, so that each row travels once, however many relations need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, build_halo_plan, halo_fetch
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.ranks import agree
from shardpass.core.sharding import EdgeShards, Ownership, build_shards
from shardpass.errors import RefusedError

_MOST = 4


@dataclass(frozen=True)
class Piece:
    """One relation of a union.

    Args:
        edge_index: its edges.
        src_start: row of the union's source tensor where this rank's own source rows begin.
        dst_start: row of the union's destination tensor where its own destination rows begin.
    """

    edge_index: ShardedEdgeIndex
    src_start: int
    dst_start: int


@dataclass(frozen=True)
class Union:
    """A union that was made, and of what. `serial` is the same on every rank."""

    of: tuple[tuple[EdgeShards | None, int, int], ...]
    sizes: tuple[int, int]
    edge_index: ShardedEdgeIndex
    serial: int


class Unions:
    """The unions that begin with one relation, as they were made."""

    def __init__(self) -> None:
        self.made: list[Union] = []


def union(pieces: Sequence[Piece], num_src: int, num_dst: int, label: str) -> ShardedEdgeIndex:
    """All edges of `pieces` as one list, piece by piece in their order. Collective; kept for the next time.

    Args:
        pieces: at least one; the same relations in the same order on every rank.
        num_src, num_dst: own rows of the union's source and destination tensors.
        label: who asks, for messages.

    Raises:
        RefusedError: a piece is against the direction of its edges, or of another graph.
        ValueError: a piece does not fit into the tensors.
    """
    plan = pieces[0].edge_index.plan
    with plan.comm.unfollowed():
        return _union(pieces, plan, num_src, num_dst, label)


def _union(pieces: Sequence[Piece], plan: HaloPlan, num_src: int, num_dst: int, label: str) -> ShardedEdgeIndex:
    for piece in pieces:
        _check(piece, plan, num_src, num_dst, label)
    of = tuple((piece.edge_index.shards, piece.src_start, piece.dst_start) for piece in pieces)
    made = plan.comm.caches.of(Unions, plan).made
    known = next((u for u in made if _same(u, of, (num_src, num_dst))), None)
    answers = agree(plan.comm, f"{label}: union of relations", [-1 if known is None else known.serial])
    if known is not None and all(answer == answers[0] for answer in answers):
        return known.edge_index
    edge_index = _build(pieces, num_src, num_dst, label)
    serial = made[-1].serial + 1 if made else 0
    made[:] = [*made, Union(of, (num_src, num_dst), edge_index, serial)][-_MOST:]
    return edge_index


def _same(known: Union, of: tuple[tuple[EdgeShards | None, int, int], ...], sizes: tuple[int, int]) -> bool:
    """Whether `known` is of the graph's own lists at the same places; derived lists (no shards) are not compared."""
    return (
        known.sizes == sizes
        and len(known.of) == len(of)
        and all(a[0] is b[0] and a[0] is not None and a[1:] == b[1:] for a, b in zip(known.of, of))
    )


def _check(piece: Piece, first: HaloPlan, num_src: int, num_dst: int, label: str) -> None:
    plan = piece.edge_index.plan
    if piece.edge_index.is_reversed or plan.comm is not first.comm:
        raise RefusedError(
            f"{label} takes relations of one graph in their own direction. Store reversed edges as an edge type of "
            f"their own before partitioning (PyG: ToUndirected)"
        )
    if piece.src_start + plan.num_own_src > num_src or piece.dst_start + plan.num_dst > num_dst:
        raise ValueError(
            f"{label} on rank {plan.comm.rank}: a relation from {plan.num_own_src} to {plan.num_dst} own nodes does "
            f"not fit at rows {piece.src_start} and {piece.dst_start} of tensors with {num_src} and {num_dst} rows"
        )


def _build(pieces: Sequence[Piece], num_src: int, num_dst: int, label: str) -> ShardedEdgeIndex:
    first = pieces[0].edge_index.plan
    comm = first.comm
    counts = comm.all_gather(torch.tensor([num_src], device=comm.device), label=f"{label}: rows of the union")
    sources = Ownership.from_counts([int(count) for count in counts])
    src_ids: list[Tensor] = []
    dst_rows: list[Tensor] = []
    for piece in pieces:
        plan, edges = piece.edge_index.plan, piece.edge_index.sources_first
        own = sources.to_global(torch.arange(plan.num_own_src, device=comm.device) + piece.src_start, comm.rank)
        ids = halo_fetch(own, plan, f"{label}: rows of the union at their owners")
        src_ids.append(ids[edges[0]])
        dst_rows.append(edges[1] + piece.dst_start)
    plan, src = build_halo_plan(comm, sources, torch.cat(src_ids), num_dst, first.options)
    if len(pieces) == 1:
        plan = replace(plan, relation=first.relation)
    dst = torch.cat(dst_rows)
    return ShardedEdgeIndex.of_shards(build_shards(src, dst, plan.blocks, num_dst), plan)  # type: ignore[no-any-return]
