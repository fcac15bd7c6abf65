"""The out-edges of a rank's nodes: an edge list as the owners of the sources see it, over which gradients are pulled.

Edges live with their destination. To pull gradients, the owner of a source needs its out-edges by block of
destinations, and a halo plan of the destination rows in which they end. Counting the rows that such a plan would move
does not need the plan. Counts, plan and edges are made once per edge list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, Schedule, Transfer
from shardpass.core.ranks import agree
from shardpass.core.sharding import Block, EdgeShards, Shard, Transposes, running, smallest_index_dtype, transposed


@dataclass
class OutEdges:
    """How many rows a pull over one edge list moves, and the out-edges once they are needed.

    Args:
        serial: number of the call in which all ranks counted together.
        counts: ``counts[q][p]`` destination rows of rank p that the sources of rank q have edges into.
        are_on_devices: every rank has its tensors on a device.
    """

    serial: int
    counts: tuple[tuple[int, ...], ...]
    are_on_devices: bool = False
    _built: tuple[HaloPlan, EdgeShards] | None = field(default=None, repr=False)

    @property
    def num_rows(self) -> int:
        """Destination rows that travel to the owners of sources, over all ranks."""
        return sum(map(sum, self.counts))

    def of(self, plan: HaloPlan, edges: EdgeShards, label: str) -> tuple[HaloPlan, EdgeShards]:
        """The plan by which destination rows travel, and the out-edges into them. Collective the first time.

        Args:
            plan, edges: of which this was made.

        Returns:
            a plan whose sources are this rank's destinations, and shards whose destinations are its sources; those
            have no order in which edge tensors could follow.
        """
        if self._built is None:
            self._built = _build(plan, edges, self.counts, f"{label}: out-edges")
        return self._built


def count_out_edges(plan: HaloPlan, edges: EdgeShards, serial: int, label: str) -> OutEdges:
    """The out-edges of `edges`, counted only. Collective: one small all-gather."""
    mine = [0 if q == plan.comm.rank else _ends(edges, q).numel() for q in range(plan.comm.size)]
    every = agree(plan.comm, f"{label}: rows to pull", [int(plan.comm.device.type != "cpu"), *mine])
    return OutEdges(serial, tuple(zip(*(rows for _, *rows in every))), all(on_device for on_device, *_ in every))


def _ends(edges: EdgeShards, owner: int) -> Tensor:
    """The destination rows that edges from sources of `owner` end in, ascending, int64."""
    degrees = [shard.degrees() for shard in edges.shards if shard.block.owner == owner]
    return torch.stack(degrees).any(0).nonzero().view(-1) if degrees else edges.shards[0].indptr.new_zeros(0).long()


def _build(
    plan: HaloPlan, edges: EdgeShards, counts: Sequence[Sequence[int]], label: str
) -> tuple[HaloPlan, EdgeShards]:
    """The halo plan and the out-edges. Every rank sorts its edges by source and sends each owner a CSR of its part."""
    comm, rank = plan.comm, plan.comm.rank
    none = torch.zeros(0, dtype=torch.int64, device=comm.device)
    send_rows = [none if q == rank else _ends(edges, q) for q in range(comm.size)]
    schedule = Schedule.ring(counts, plan.options.block_rows)
    reverse = HaloPlan.over(comm, plan.options, schedule, edges.num_dst, plan.num_own_src, send_rows)
    index = smallest_index_dtype(max(map(max, counts)))
    parts: list[list[Tensor]] = [[none.to(index)] for _ in range(comm.size)]
    moves = schedule.transfers(rank)
    for move in moves:
        if move.send_stop > move.send_start:
            parts[move.to] += [t.to(index) for t in _leaving(plan, edges, send_rows[move.to], move)]
    came = comm.all_to_all([torch.cat(part) for part in parts], label=label)
    shards = [_own_shard(edges.shards[number], plan) for number in edges.numbers(0)]
    taken = [0] * comm.size
    for move, block in zip(moves, reverse.blocks[1:]):
        if block.num_rows == 0:
            shards.append(_shard(block, plan.num_own_src, none, none.to(index), none.to(index)))
            continue
        sources = plan.send_rows[move.source]
        message = came[move.source][taken[move.source] :]
        degrees = message[: sources.numel()]
        num_edges = int(degrees.sum())
        taken[move.source] += degrees.numel() + num_edges
        columns = message[degrees.numel() : degrees.numel() + num_edges]
        shards.append(_shard(block, plan.num_own_src, sources, degrees, columns))
    num_edges = sum(shard.num_edges for shard in shards)
    return reverse, EdgeShards(tuple(shards), plan.num_own_src, num_edges, num_own=edges.num_own)


def _leaving(plan: HaloPlan, edges: EdgeShards, ends: Tensor, move: Transfer) -> tuple[Tensor, Tensor]:
    """The edges from sources of rank ``move.to`` into a window of `ends`, by source: ``(degrees, columns)``.

    Degrees are those of the source rows that this rank needs of that rank; columns count from the window's start.
    """
    window = ends[move.send_start : move.send_stop]
    column_of = torch.full((edges.num_dst,), -1, dtype=smallest_index_dtype(window.numel()), device=ends.device)
    column_of[window] = torch.arange(window.numel(), dtype=column_of.dtype, device=ends.device)
    degrees, columns = [], []
    for shard in sorted((s for s in edges.shards if s.block.owner == move.to), key=lambda s: s.block.start):
        indptr, dst_rows, _ = transposed(shard)
        found = column_of.index_select(0, dst_rows)
        inside = found >= 0
        before = running(inside).index_select(0, indptr)
        degrees.append(before[1:] - before[:-1])
        columns.append(found[inside])
    return torch.cat(degrees), torch.cat(columns)


def _own_shard(shard: Shard, plan: HaloPlan) -> Shard:
    indptr, columns, _ = plan.comm.caches.of(Transposes).of(shard)
    return Shard(Block(plan.comm.rank, 0, shard.num_dst), indptr, columns, slice(0, 0))


def _shard(block: Block, num_rows: int, rows: Tensor, degrees: Tensor, columns: Tensor) -> Shard:
    """A shard of edges in order of `rows`, which have the given degrees. No edge tensor follows its order."""
    counts = torch.zeros(num_rows + 1, dtype=torch.int64, device=columns.device)
    counts[rows + 1] = degrees.to(torch.int64)
    return Shard(block, counts.cumsum(0).to(smallest_index_dtype(columns.numel())), columns, slice(0, 0))
