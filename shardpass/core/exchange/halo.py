"""The halo plan: which source rows a rank receives from each peer, and which it sends. Built with one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from shardpass.core.exchange.schedule import Schedule
from shardpass.core.exchange.windows import SharedRows, find_shared_rows
from shardpass.core.ranks import Options, Ranks, RowSet
from shardpass.core.sharding import NODE, Block, NodeType, Ownership
from shardpass.errors import InternalError


def node_set(node_type: NodeType, count: int) -> RowSet:
    """The own nodes of a type."""
    return RowSet("nodes" if node_type == NODE else f"{node_type!r} nodes", count, ("nodes", node_type))


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """Own-first numbering of source rows, and the rows that travel. Sources and destinations may be different nodes.

    The source rows of a rank are its own rows ``0 .. num_own_src - 1``, then the halo rows, grouped by owner and
    ascending in id.

    Args:
        comm: the ranks.
        options: of the run.
        num_own_src: source rows this rank owns.
        num_dst: destination rows this rank owns.
        halo_start: ``halo_start[q]`` is the first halo row of owner q; one more entry closes the last owner's.
        send_rows: ``send_rows[p]`` are the own rows that rank p needs, int64; empty for this rank itself.
        schedule: the rounds.
        blocks: the source rows of the own block and then of each round, in the order of the rounds.
        ends: the types of sources and destinations, where they are known.
        shared: the rows that go through shared memory, or `None` where all go as messages.
        edges: how many edges this rank has, and how many all ranks have; `None` where that does not matter.
        last_node: the own row of the last node of the original graph, where sources and destinations have one type;
            `None` on other ranks.
        relation: tells these edges from those of other relations. Plans for some of the destinations, or against the
            direction of the edges, share it.
        weights: the edge field that was the values of an adjacency matrix, or `None`: PyG's layers read those unasked.
    """

    comm: Ranks
    options: Options
    num_own_src: int
    num_dst: int
    halo_start: tuple[int, ...]
    send_rows: tuple[Tensor, ...]
    schedule: Schedule
    blocks: tuple[Block, ...]
    ends: tuple[NodeType, NodeType] | None = None
    shared: SharedRows | None = None
    edges: tuple[int, int] | None = None
    last_node: int | None = None
    relation: object = field(default_factory=object)
    weights: str | None = None

    @classmethod
    def over(
        cls,
        comm: Ranks,
        options: Options,
        schedule: Schedule,
        num_own_src: int,
        num_dst: int,
        send_rows: Sequence[Tensor],
    ) -> HaloPlan:
        """The plan that carries out `schedule`, whose counts say how many halo rows each owner has. Collective."""
        needed = schedule.counts[comm.rank]
        halo_start = tuple(accumulate(needed, initial=num_own_src))
        blocks = [Block(comm.rank, 0, num_own_src)]
        for move in schedule.transfers(comm.rank):
            first = halo_start[move.source]
            blocks.append(Block(move.source, first + move.recv_start, first + move.recv_stop))
        shared = find_shared_rows(comm, send_rows, schedule) if options.share_memory else None
        return cls(
            comm, options, num_own_src, num_dst, halo_start, tuple(send_rows), schedule, tuple(blocks), shared=shared
        )

    @property
    def joins_types(self) -> bool:
        """Whether edges begin at nodes of one type and end at those of another."""
        return self.ends is not None and self.ends[0] != self.ends[1]

    @property
    def source_set(self) -> RowSet:
        """The own source rows, as what a model computes is told."""
        return node_set(NODE if self.ends is None else self.ends[0], self.num_own_src)

    @property
    def dst_set(self) -> RowSet:
        """The own destination rows."""
        return node_set(NODE if self.ends is None else self.ends[1], self.num_dst)

    def edge_set(self, count: int) -> RowSet:
        """The `count` edges of a list over this plan: those of the graph, or others that a layer made of them."""
        own, total = self.edges or (None, None)
        return RowSet("edges", count, ("edges", self.relation), total=total if count == own else None)

    @property
    def num_halo(self) -> int:
        """Remote source rows this rank needs."""
        return self.halo_start[-1] - self.num_own_src

    @property
    def num_src(self) -> int:
        """All source rows of this rank, own and halo."""
        return self.halo_start[-1]


def build_halo_plan(
    comm: Ranks, sources: Ownership, src_ids: Tensor, num_dst: int, options: Options
) -> tuple[HaloPlan, Tensor]:
    """``(plan, src_rows)`` for edges whose sources have the global ids `src_ids`. Collective.

    Every rank must pass the same `sources` and `options`.

    Args:
        sources: ownership of the source nodes over the ranks of `comm`.
        src_ids: ``[num_edges]`` global source ids of this rank's edges, int64.
        num_dst: destination rows of this rank.

    Returns:
        the plan, and the own-first source row of each edge, ``[num_edges]`` int64.
    """
    rank, size = comm.rank, comm.size
    own = sources.num_own(rank)
    remote = sources.owner_of(src_ids) != rank
    needed = torch.unique(src_ids[remote])
    src_rows = torch.where(remote, own + torch.searchsorted(needed, src_ids), src_ids - sources.offsets[rank])

    cuts = torch.searchsorted(needed, needed.new_tensor(sources.offsets)).tolist()
    wanted = [needed[cuts[q] : cuts[q + 1]] - sources.offsets[q] for q in range(size)]
    return halo_plan_of(comm, own, wanted, num_dst, src_ids.numel(), options), src_rows


def halo_plan_of(
    comm: Ranks, num_own_src: int, needed: Sequence[Tensor], num_dst: int, num_edges: int, options: Options
) -> HaloPlan:
    """The plan by which a rank receives the rows `needed`. Collective. Every rank must pass the same `options`.

    Args:
        num_own_src: source rows this rank owns.
        needed: for each rank the rows of its own that this rank needs, ascending; none of this rank itself.
        num_dst: destination rows of this rank.
        num_edges: of this rank.
    """
    rank, size = comm.rank, comm.size
    wanted = [rows.to(comm.device, torch.int64) for rows in needed]
    send_rows = tuple(comm.all_to_all(wanted, label="halo plan: needed rows"))
    mine = wanted[0].new_tensor([*(w.numel() for w in wanted), num_edges])
    told = [row.tolist() for row in comm.all_gather(mine, label="halo plan")]
    counts = [row[:size] for row in told]
    for peer in range(size):
        found, expected = send_rows[peer].numel(), counts[peer][rank]
        if found != expected:
            raise InternalError(f"rank {rank} got {found} rows to send to rank {peer}, which needs {expected}")

    schedule = Schedule.ring(counts, options.block_rows)
    plan = HaloPlan.over(comm, options, schedule, num_own_src, num_dst, send_rows)
    return replace(plan, edges=(num_edges, sum(row[size] for row in told)))
