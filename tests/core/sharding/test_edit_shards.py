"""Shards merged from those of a longer or shorter list are those that sorting the list anew gives."""

from __future__ import annotations

import pytest
import torch

from shardpass.core.sharding.edit_shards import edit_shards, rows_left, without
from shardpass.core.sharding.shard import Block, build_shards

BLOCKS = [Block(1, 0, 7), Block(0, 7, 9), Block(2, 9, 9), Block(3, 9, 15)]
NUM_DST = 7


def edge_list(num_edges: int, seed: int, in_order: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, 15, (num_edges,), generator=generator)
    dst = torch.randint(0, NUM_DST - 1, (num_edges,), generator=generator)  # the last node has no edge
    edges = torch.stack([src, dst])
    if in_order:
        block = torch.bucketize(src, torch.tensor([7, 9]), right=True)
        edges = edges[:, torch.argsort(block * NUM_DST + dst, stable=True)]
    return edges


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("drop", ["nothing", "some", "one block", "all", "none given"])
@pytest.mark.parametrize("add", ["nothing", "loops", "edges"])
def test_same_as_sorting_anew(in_order: bool, drop: str, add: str) -> None:
    edges = edge_list(60, 0, in_order)
    base = build_shards(*edges, BLOCKS, NUM_DST)
    kept = torch.ones(60, dtype=torch.bool)
    if drop == "some":
        kept = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.7
    elif drop == "one block":
        kept = edges[0] >= 7
    elif drop == "all":
        kept[:] = False
    added = {"loops": torch.arange(NUM_DST).expand(2, -1), "edges": edge_list(11, 2, False)}.get(add)

    found = edit_shards(
        base, None if drop == "none given" else (~kept).nonzero().view(-1), [] if added is None else [added]
    )
    whole = edges[:, kept] if added is None else torch.cat([edges[:, kept], added], 1)
    expected = build_shards(*whole, BLOCKS, NUM_DST)

    assert (found.num_edges, found.num_dst) == (expected.num_edges, expected.num_dst)
    numbers = torch.arange(whole.size(1)) * 10
    for mine, theirs in zip(found.shards, expected.shards):
        assert mine.block == theirs.block and mine.src_rows.dtype == theirs.src_rows.dtype
        assert mine.indptr.tolist() == theirs.indptr.tolist()
        assert mine.src_rows.tolist() == theirs.src_rows.tolist()
        assert mine.select(numbers).tolist() == theirs.select(numbers).tolist()


def test_untouched_shards_are_not_copied() -> None:
    base = build_shards(*edge_list(60, 3, True), BLOCKS, NUM_DST)
    found = edit_shards(base, None, [torch.arange(NUM_DST).expand(2, -1)])
    assert [a.src_rows is b.src_rows for a, b in zip(found.shards, base.shards)] == [False, True, True, True]


@pytest.mark.parametrize("count", [1, 7, 300])
def test_rows_left(count: int) -> None:
    rows = torch.arange(1000) * 3
    dropped = torch.randperm(1000, generator=torch.Generator().manual_seed(count))[:count].sort().values.int()
    dropped[-1] = 999  # at the end, too
    assert torch.equal(rows_left(rows, dropped), rows[without(dropped, 1000)])
