"""Transposes: sorted a piece at a time, they are those of one stable sort."""

import pytest
import torch

from shardpass.core.sharding import Block, build_shards, transposes

CASES = {"empty": (5, 4, 0), "one row": (1, 1, 7), "no rows": (0, 3, 0), "hub": (9, 1, 40), "many": (30, 20, 200)}


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("case", CASES)
def test_pieces_are_the_whole(case, at_once, monkeypatch):
    num_src, num_dst, num_edges = CASES[case]
    draw = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(0, max(1, count), (num_edges,), generator=draw) for count in (num_src, num_dst))
    (shard,) = build_shards(src, dst, [Block(0, 0, num_src)], num_dst).shards
    monkeypatch.setattr(transposes, "_EDGES_AT_ONCE", at_once)
    found = transposes.transposed(shard, with_order=True)
    order = torch.argsort(shard.src_rows, stable=True)
    assert torch.equal(found.order, order.int())
    assert torch.equal(found.dst_rows, shard.dst_rows()[order].int())
    assert found.indptr.diff().tolist() == torch.bincount(src, minlength=num_src).tolist()
    assert found.indptr.dtype == found.dst_rows.dtype == found.order.dtype == torch.int32
    kept = transposes.Transposes()
    first = kept.of(shard)
    assert first.order is None and torch.equal(kept.of(shard, with_order=True).order, found.order)
    assert kept.of(shard).indptr is first.indptr, "made once"


def test_self_loops_are_their_own_transpose():
    nodes = torch.tensor([0, 2, 2, 5])
    (shard,) = build_shards(nodes, nodes, [Block(0, 0, 6)], 6).shards
    found = transposes.transposed(shard, with_order=True)
    assert found.dst_rows is shard.src_rows and found.indptr is shard.indptr
    assert (found.dst_rows.tolist(), found.order.tolist()) == ([0, 2, 2, 5], [0, 1, 2, 3])
    assert found.indptr.tolist() == [0, 1, 1, 3, 3, 3, 4]
