"""A rank's edges by the owner of their sources, which is how a store keeps them, and the shards of such edges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.sharding.ordering import stable_order
from shardpass.core.sharding.ownership import Ownership
from shardpass.core.sharding.shard import Block, EdgeShards, LazyTensor, Shard, running, smallest_index_dtype


class OwnerEdges(NamedTuple):
    """The edges from the nodes of one rank into this rank's nodes, as CSR by destination.

    Args:
        needed: rows of that rank's nodes at which the edges begin, ascending, ``[num_needed]``. Empty for this rank.
        indptr: ``[num_dst + 1]``.
        src_rows: ``[num_edges]`` places in `needed`; rows of own nodes for this rank.
    """

    needed: Tensor
    indptr: Tensor
    src_rows: Tensor

    def to(self, device: torch.device) -> OwnerEdges:
        """The same edges on a device. What is there already is not copied."""
        return OwnerEdges(*(tensor.to(device) for tensor in self))


def edges_by_owner(
    sources: Ownership, rank: int, src_ids: Tensor, dst_rows: Tensor, num_dst: int
) -> tuple[list[OwnerEdges], Tensor]:
    """``(owners, order)``: the edges from each rank's nodes, and where each of them stands in the list, by owner.

    Args:
        sources: ownership of the source nodes.
        rank: this rank.
        src_ids: ``[num_edges]`` global source id of each edge, int64.
        dst_rows: ``[num_edges]`` own destination row of each edge, int64.
        num_dst: destination rows of this rank.
    """
    owner = sources.owner_of(src_ids)
    order = stable_order(owner * num_dst + dst_rows, sources.num_ranks * num_dst)
    found = []
    for peer, edges in enumerate(order.split(torch.bincount(owner, minlength=sources.num_ranks).tolist())):
        src_rows = src_ids[edges] - sources.offsets[peer]
        needed = src_rows[:0]
        if peer != rank:
            is_needed = torch.zeros(sources.num_own(peer), dtype=torch.bool, device=src_ids.device)
            is_needed[src_rows] = True
            needed, src_rows = is_needed.nonzero().view(-1), running(is_needed)[src_rows]
        indptr = torch.zeros(num_dst + 1, dtype=torch.int64, device=src_ids.device)
        torch.cumsum(torch.bincount(dst_rows[edges], minlength=num_dst), 0, out=indptr[1:])
        num_rows = sources.num_own(rank) if peer == rank else needed.numel()
        found.append(
            OwnerEdges(
                needed,
                indptr.to(smallest_index_dtype(edges.numel())),
                src_rows.to(smallest_index_dtype(num_rows)),
            )
        )
    return found, order


def shards_of_owners(owners: Sequence[OwnerEdges], blocks: Sequence[Block], num_dst: int) -> EdgeShards:
    """One shard for each block. The edge list has the edges of one owner after those of another; nothing is copied.

    Where an owner's rows come in several blocks, its edges are sorted out by block, which copies them.

    Args:
        owners: the edges from each rank's nodes, in the order of the ranks.
        blocks: the own block first.
    """
    sizes = [len(edges.needed) for edges in owners]
    first_rows = list(accumulate(sizes, initial=blocks[0].num_rows))
    first_edges = list(accumulate((edges.src_rows.numel() for edges in owners), initial=0))
    shards = []
    for number, block in enumerate(blocks):
        edges, first = owners[block.owner], first_edges[block.owner]
        if number == 0 or block.num_rows == sizes[block.owner]:
            span = slice(first, first_edges[block.owner + 1])
            shards.append(Shard(block, edges.indptr, edges.src_rows, span))
        else:
            shards.append(_some(edges, block, block.start - first_rows[block.owner], first))
    return EdgeShards(tuple(shards), num_dst, first_edges[-1])


def _some(edges: OwnerEdges, block: Block, low: int, first: int) -> Shard:
    """The edges from the rows ``[low, low + block.num_rows)`` of those that are needed of an owner."""

    def inside() -> Tensor:
        return (edges.src_rows >= low) & (edges.src_rows < low + block.num_rows)

    rows = LazyTensor(lambda: inside().nonzero().view(-1) + first)
    chosen = inside()
    return Shard(block, running(chosen)[edges.indptr], edges.src_rows[chosen] - low, rows)
