"""Edge lists against their direction: the same edges, living with the owners of their sources.

Messages from destinations to sources would end on other ranks. So each rank is sent its out-edges once. They get their
own halo plan, and messages against the direction become ordinary ones. A differentiable exchange brings edge tensors to
the new order and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, WalkId, carry, halo_fetch
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.relation import build_relation
from shardpass.core.ranks import agree
from shardpass.core.sharding import KnownLists, Ownership
from shardpass.errors import RefusedError


@dataclass(frozen=True)
class ReversedEdges:
    """The out-edges of this rank's nodes, as an ordinary edge list from the old destinations to the old sources.

    Args:
        edge_index: the stand-in, in the new order of edges.
        serial: the number of this list among those that were made for its graph; the same on every rank.
        leaving: ``leaving[q]`` the edges of the old list whose source rank q owns, int64.
        came: how many edges came from each rank.
        order: for each edge of the new list its position among those that came, rank by rank, int64.
        num_old: edges of the old list.
    """

    edge_index: ShardedEdgeIndex
    serial: int
    leaving: tuple[Tensor, ...]
    came: tuple[int, ...]
    order: Tensor
    num_old: int

    def to_new(self, rows: Tensor, label: str) -> Tensor:
        """An edge tensor in the old order ``[num_old, ...]`` in the new one. Collective, differentiable."""
        return carry(self.edge_index.plan.comm, rows, label, self._there, self._back)

    def to_old(self, rows: Tensor, label: str) -> Tensor:
        """An edge tensor in the new order in the old one, ``[num_old, ...]``. Collective, differentiable."""
        return carry(self.edge_index.plan.comm, rows, label, self._back, self._there)

    def _there(self, rows: Tensor, walk: WalkId) -> Tensor:
        rows = rows.detach()
        sent = [rows.index_select(0, edges) for edges in self.leaving]
        came = self.edge_index.plan.comm.all_to_all(sent, label=walk.label)
        return torch.cat(came).index_select(0, self.order)

    def _back(self, rows: Tensor, walk: WalkId) -> Tensor:
        comm = self.edge_index.plan.comm
        sent = torch.empty_like(rows, memory_format=torch.contiguous_format)
        sent[self.order] = rows.detach()
        returned = comm.all_to_all(list(sent.split(list(self.came))), label=walk.label)
        out = rows.new_empty((self.num_old, *rows.shape[1:]))
        for edges, part in zip(self.leaving, returned):
            out[edges] = part
        return out


class _ReversedLists:
    """The edge lists of one graph that some layer wanted against their direction."""

    def __init__(self) -> None:
        self.lists: KnownLists[ReversedEdges] = KnownLists()


def reversed_edges(edge_index: ShardedEdgeIndex, label: str) -> ReversedEdges:
    """The edges of `edge_index` against their direction, kept for the next time. Collective.

    Which way `edge_index` looks does not matter. Every rank must pass the list of the same layer.
    """
    plan, comm = edge_index.plan, edge_index.plan.comm
    if plan.options.stream_structure:
        raise RefusedError(
            f"{label}: messages against the direction of the edges do not work with Options(stream_structure=True). "
            f"Store the graph with its edges the other way round, or load it without that option"
        )
    edges = edge_index.edges
    lists = plan.comm.caches.of(_ReversedLists, plan).lists
    known = lists.find(edges)
    serial = -1 if known is None else known.serial
    answers = agree(comm, f"{label}: reversed edges", [serial])
    if known is not None and all(answer == answers[0] for answer in answers):
        return known
    found = _reverse(plan, edge_index.sources_first, lists.count, label)
    return lists.keep(edges, found)


def _reverse(plan: HaloPlan, edges: Tensor, serial: int, label: str) -> ReversedEdges:
    comm = plan.comm
    counts = comm.all_gather(torch.tensor([plan.num_own_src, plan.num_dst], device=comm.device), label=label)
    destinations = Ownership.from_counts([int(row[1]) for row in counts])
    src_rows, dst_rows = edges
    at_owner = halo_fetch(torch.arange(plan.num_own_src, device=comm.device), plan, f"{label}: rows at their owners")
    starts = torch.tensor(plan.halo_start, device=comm.device)
    owner = torch.bucketize(src_rows, starts, right=True) - 1
    owner[src_rows < plan.num_own_src] = comm.rank
    pairs = torch.stack([at_owner[src_rows], destinations.to_global(dst_rows, comm.rank)], dim=1)
    leaving = tuple((owner == peer).nonzero().view(-1) for peer in range(comm.size))
    came = comm.all_to_all([pairs[rows] for rows in leaving], label=f"{label}: out-edges")
    new_dst, new_src = torch.cat(came).t().contiguous()
    ends = None if plan.ends is None else (plan.ends[1], plan.ends[0])
    relation = build_relation(
        comm, destinations, new_src, new_dst, plan.num_own_src, torch.arange(len(new_src)), {}, plan.options, ends
    )
    sizes = tuple(len(part) for part in came)
    relation.edge_index.plan = replace(relation.edge_index.plan, relation=plan.relation)
    return ReversedEdges(relation.edge_index, serial, leaving, sizes, relation.edge_ids, edges.size(1))
