"""Shards: every edge once, chunks within bounds, transposes, against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardpass.core.sharding import Block, Transposes, build_shards, smallest_index_dtype
from shardpass.core.sharding.shard import SpreadRows, shard_order

BLOCKS = (Block(1, 0, 4), Block(0, 6, 9), Block(2, 9, 9), Block(0, 4, 6), Block(2, 9, 12))  # round order, not by start
NUM_DST = 5


@st.composite
def edge_lists(draw):
    num_edges = draw(st.integers(0, 40))
    src = draw(st.lists(st.integers(0, 11), min_size=num_edges, max_size=num_edges))
    hub = draw(st.booleans())
    dst = draw(st.lists(st.integers(3 if hub else 0, 3 if hub else 4), min_size=num_edges, max_size=num_edges))
    return torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)


def edges_of(shard):
    """``(position in the edge list, source row, destination row)`` of each edge."""
    position = torch.arange(1000)[shard.edge_rows] if isinstance(shard.edge_rows, slice) else shard.edge_rows
    return list(zip(position.tolist(), (shard.src_rows + shard.block.start).tolist(), shard.dst_rows().tolist()))


@settings(max_examples=60, deadline=None)
@given(edge_lists(), st.booleans())
def test_order_is_by_block_then_destination_then_position(edges, sort_first):
    src, dst = edges
    block_of = [next(i for i, block in enumerate(BLOCKS) if block.start <= row < block.stop) for row in src.tolist()]
    expected = sorted(range(len(src)), key=lambda e: (block_of[e], int(dst[e]), e))
    if sort_first:  # edges that are in order already are not sorted again
        src, dst = src[expected], dst[expected]
        block_of, expected = [block_of[e] for e in expected], list(range(len(src)))
    order, found = shard_order(src, dst, BLOCKS)
    assert order.tolist() == expected and found.tolist() == block_of


@settings(max_examples=60, deadline=None)
@given(edge_lists())
def test_every_edge_stands_in_the_shard_of_its_block(edges):
    src, dst = edges
    built = build_shards(src, dst, BLOCKS, NUM_DST)
    assert built.num_edges == len(src) and len(built.shards) == len(BLOCKS)
    found = []
    for block, shard in zip(BLOCKS, built.shards):
        assert shard.block == block and shard.num_dst == NUM_DST
        assert shard.indptr.dtype == shard.src_rows.dtype == torch.int32
        mine = edges_of(shard)
        assert all(block.start <= s < block.stop for _, s, _ in mine)
        assert [d for *_, d in mine] == sorted(d for *_, d in mine)
        same = [p for p, _, d in mine if mine and d == mine[0][2]]
        assert same == sorted(same), "the sort is stable"
        assert shard.degrees().tolist() == [sum(d == row for *_, d in mine) for row in range(NUM_DST)]
        found += mine
    assert sorted(found) == list(zip(range(len(src)), src.tolist(), dst.tolist()))
    assert built.degrees().tolist() == torch.bincount(dst, minlength=NUM_DST).tolist()


@settings(max_examples=60, deadline=None)
@given(edge_lists(), st.integers(1, 7))
def test_chunks_cover_the_edges_once(edges, max_edges):
    src, dst = edges
    tensor = torch.arange(len(src) * 2).view(-1, 2)
    for shard in build_shards(src, dst, BLOCKS, NUM_DST).shards:
        chunks = shard.chunks(max_edges)
        assert [c.start for c in chunks] == list(range(0, shard.num_edges, max_edges))
        assert [c.stop for c in chunks] == [min(c.start + max_edges, shard.num_edges) for c in chunks]
        rows, written = shard.dst_rows(), torch.zeros_like(tensor)
        for chunk in chunks:
            part = rows[chunk.start : chunk.stop]
            ends = (int(part.min()), int(part.max()) + 1) if len(chunks) > 1 else (0, NUM_DST)
            assert (chunk.low, chunk.high) == ends
            assert torch.equal(shard.dst_rows(chunk), part - chunk.low)
            assert shard.dst_rows(chunk).dtype == torch.int64
            picked = shard.select(tensor, chunk)
            assert torch.equal(picked, shard.select(tensor)[chunk.start : chunk.stop])
            shard.put(written, picked, chunk)
        again = torch.zeros_like(tensor)
        shard.put(again, shard.select(tensor))
        positions = [p for p, *_ in edges_of(shard)]
        expected = torch.zeros_like(tensor)
        expected[positions] = tensor[positions]
        assert torch.equal(written, expected) and torch.equal(again, expected)


def test_an_edge_list_in_order_is_not_copied():
    src, dst = torch.tensor([0, 2, 6, 9]), torch.tensor([0, 1, 1, 0])
    built = build_shards(src, dst, BLOCKS, NUM_DST)
    assert [shard.edge_rows for shard in built.shards] == [
        slice(0, 2), slice(2, 3), slice(3, 3), slice(3, 3), slice(3, 4),
    ]  # fmt: skip
    turned = build_shards(src.flip(0), dst.flip(0), BLOCKS, NUM_DST)
    assert [rows.tolist() for rows in (s.edge_rows for s in turned.shards)] == [[3, 2], [1], [], [], [0]]


def test_a_hub_is_cut():
    shard = build_shards(torch.zeros(10, dtype=torch.int64), torch.full((10,), 3), BLOCKS, NUM_DST).shards[0]
    assert [tuple(c) for c in shard.chunks(4)] == [(0, 4, 3, 4), (4, 8, 3, 4), (8, 10, 3, 4)]


@pytest.mark.parametrize("num_dst", [0, 3])
def test_no_edges(num_dst):
    none = torch.empty(0, dtype=torch.int64)
    built = build_shards(none, none, [Block(0, 0, 0), Block(1, 0, 2)], num_dst)
    assert [s.num_edges for s in built.shards] == [0, 0] and built.degrees().tolist() == [0] * num_dst
    for shard in built.shards:
        assert shard.chunks(3) == [] and shard.dst_rows().tolist() == []
        assert shard.select(torch.ones(0, 2)).shape == (0, 2)
        assert Transposes().of(shard).indptr.tolist() == [0] * (shard.block.num_rows + 1)


def test_index_dtype():
    assert smallest_index_dtype(2**31 - 1) == torch.int32
    assert smallest_index_dtype(2**31) == torch.int64


def test_spread_rows_are_the_places_of_edges():
    rows = SpreadRows(
        5, torch.tensor([0, 3, 4, 9], dtype=torch.int32), torch.tensor([40, 41, 2, 43], dtype=torch.int32)
    )
    places = torch.tensor([40, 5, 6, 41, 2, 7, 8, 9, 10, 43])
    for start in range(11):
        for stop in range(start, 11):
            assert torch.equal(rows.of(slice(start, stop)), places[start:stop].int())
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows.of(order), places[order].int()) and torch.equal(rows.of(order.int()), places[order].int())
