"""Shards of a list that was edited hold what sorting the list anew gives; what was added has a shard of its own."""

import pytest
import torch

from shardpass.core.sharding import Block, EdgeShards, build_shards
from shardpass.core.sharding.edit_shards import edit_shards, rows_left, without

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


LOOPS = torch.arange(NUM_DST).expand(2, -1)


def with_loops(edges: torch.Tensor, nodes: list[int]) -> torch.Tensor:
    """`edges` without self-loops but for one at each of `nodes`, somewhere among them."""
    plain = edges[:, edges[0] != edges[1]]
    loops = torch.tensor(nodes, dtype=torch.long).expand(2, -1)
    order = torch.randperm(plain.size(1) + len(nodes), generator=torch.Generator().manual_seed(4))
    return torch.cat([plain, loops], 1)[:, order]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("drop", ["nothing", "some", "one block", "loops", "all", "none given"])
@pytest.mark.parametrize("add", ["nothing", "loops", "some loops", "edges"])
@pytest.mark.parametrize("loops", [[], [5, 0, 2], [3, 3]])
def test_shards_hold_the_edges_that_are_left_and_those_added(
    in_order: bool, drop: str, add: str, loops: list[int]
) -> None:
    edges = with_loops(edge_list(60, 0, False), loops)
    if in_order:
        base = build_shards(*edges, BLOCKS, NUM_DST)
        edges = edges[:, torch.cat([torch.arange(edges.size(1))[shard.edge_rows] for shard in base.shards])]
    base = build_shards(*edges, BLOCKS, NUM_DST)
    dropped = {
        "some": torch.rand(edges.size(1), generator=torch.Generator().manual_seed(1)) > 0.7,
        "one block": edges[0] < 7,
        "loops": edges[0] == edges[1],
        "all": torch.ones(edges.size(1), dtype=torch.bool),
    }.get(drop, torch.zeros(edges.size(1), dtype=torch.bool))
    added = {"loops": LOOPS, "some loops": LOOPS[:, [2, 5, 2]], "edges": edge_list(11, 2, False).remainder(7)}.get(
        add, LOOPS[:, :0]
    )

    found = edit_shards(base, None if drop == "none given" else dropped.nonzero().view(-1), [added])

    whole = torch.cat([edges[:, ~dropped], added], 1)
    assert (found.num_edges, found.num_dst) == (whole.size(1), NUM_DST)
    assert torch.equal(torch.stack([found.row(0), found.row(1)]), whole)  # which reads sources, pointers and places
    places = torch.cat([torch.arange(whole.size(1))[shard.edge_rows] for shard in found.shards])
    assert torch.equal(places.sort().values, torch.arange(whole.size(1)))
    assert [found.shards[found.numbers(p)[0]].block for p in range(len(BLOCKS))] == BLOCKS
    assert [found.position(n) for p in range(len(BLOCKS)) for n in found.numbers(p)] == [
        p for p in range(len(BLOCKS)) for _ in found.numbers(p)
    ]


def test_untouched_shards_are_not_copied() -> None:
    def kept(found: EdgeShards) -> list[bool]:
        halo = found.shards[found.num_own :]
        return [a.src_rows is b.src_rows for a, b in zip((found.shards[0], *halo), base.shards, strict=True)]

    edges = with_loops(edge_list(60, 3, True), [1, 4])
    base = build_shards(*edges, BLOCKS, NUM_DST)
    edges = edges[:, torch.cat([torch.arange(edges.size(1))[shard.edge_rows] for shard in base.shards])]
    base = build_shards(*edges, BLOCKS, NUM_DST)
    is_loop = edges[0] == edges[1]
    more = edit_shards(base, None, [LOOPS])
    assert (*more.shards[:1], *more.shards[2:]) == base.shards and more.num_own == 2
    fewer = edit_shards(base, torch.tensor([1]), [])
    assert kept(fewer) == [False, True, True, True]
    again = edit_shards(base, is_loop.nonzero().view(-1), [LOOPS])
    assert kept(again) == [True] * 4 and again.shards[1].num_edges == NUM_DST - 2
    some = edit_shards(base, is_loop.nonzero().view(-1), [LOOPS[:, :2]])  # the loop at 4 does not come again
    assert kept(some) == [False, True, True, True]
    for found, slices in ((more, 5), (fewer, 4), (again, 3), (some, 5)):
        assert sum(isinstance(shard.rows, slice) for shard in found.shards) == slices


@pytest.mark.parametrize("count", [1, 7, 300])
def test_rows_left(count: int) -> None:
    rows = torch.arange(1000) * 3
    dropped = torch.randperm(1000, generator=torch.Generator().manual_seed(count))[:count].sort().values.int()
    dropped[-1] = 999  # at the end, too
    assert torch.equal(rows_left(rows, dropped), rows[without(dropped, 1000)])
