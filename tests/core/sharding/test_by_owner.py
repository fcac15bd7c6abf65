"""Edges by the owner of their sources, and their shards where rows come whole or in pieces."""

import pytest
import torch

from shardpass.core.sharding import Block, Ownership, edges_by_owner, shards_of_owners

OWNED = Ownership.from_counts([4, 5, 3])


@pytest.mark.parametrize("step", [None, 1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_shards_of_owners_are_the_edges(rank: int, step: int | None) -> None:
    generator = torch.Generator().manual_seed(rank)
    num_dst = OWNED.num_own(rank)
    src_ids = torch.randint(0, OWNED.num_total, (40,), generator=generator)
    dst_rows = torch.randint(0, num_dst, (40,), generator=generator)
    owners, order = edges_by_owner(OWNED, rank, src_ids, dst_rows, num_dst)
    blocks, first, ids = [Block(rank, 0, num_dst)], num_dst, [torch.arange(num_dst) + OWNED.offsets[rank]]
    for peer, edges in enumerate(owners):
        assert edges.src_rows.dtype == edges.indptr.dtype == torch.int32
        rows = edges.needed.numel()
        ids.append(edges.needed + OWNED.offsets[peer])
        pieces = range(0, rows, step or max(rows, 1))
        blocks += [Block(peer, first + start, first + min(start + (step or rows), rows)) for start in pieces]
        first += rows
    shards = shards_of_owners(owners, blocks, num_dst)
    assert torch.equal(torch.cat(ids)[shards.row(0)], src_ids[order])
    assert torch.equal(shards.row(1), dst_rows[order])
    assert torch.equal(shards.degrees(), torch.bincount(dst_rows, minlength=num_dst))
    if step is None:  # nothing is copied
        assert {id(shard.src_rows) for shard in shards.shards} <= {id(edges.src_rows) for edges in owners}
