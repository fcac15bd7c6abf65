"""What SAR's names mean: ids of the whole graph, kept order, settings that count at once. As processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

dgl = pytest.importorskip("dgl")

from frontends.sar_cases import EDGES, NODES, close, homogeneous, of, whole  # noqa: E402

pytestmark = pytest.mark.processes


def test_collectives(results: list[Any]) -> None:
    every, size = of(results, "collectives"), len(results)
    for rank, found in enumerate(every):
        expected = [torch.full((rank + 1, 2), 10.0 * other + rank) for other in range(size)]
        for name in ("all_to_all", "all_to_all_rounds", "all_to_all_gloo_support", "exchange_tensors", "with sizes"):
            assert all(torch.equal(one, other) for one, other in zip(found[name], expected)), name
        assert torch.equal(found["single"], torch.arange(3.0) + (rank - 1) % size)
        assert f"exchange_tensors on rank {rank}: expected [7" in found["told"]
        assert found["place"][:2] == ("gloo", "127.0.0.1") and found["initialized"]


def test_statistics_are_of_all_ranks(results: list[Any]) -> None:
    g, every = homogeneous(), of(results, "norms")
    ids = [found["orig_id"] for found in every]

    def expected(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = g.ndata["feat"].clone().requires_grad_()
        function(x).sum().backward()
        return x.grad

    bn = nn.BatchNorm1d(8).double()
    close(whole([found["bn"] for found in every], ids), expected(lambda x: bn(x).pow(3)))
    weights, size = torch.arange(8.0), len(results)  # every rank calls backward on the same value
    gradient = {
        "mean": expected(lambda x: x.mean(0) * weights * size),
        "var": expected(lambda x: x.var(0, unbiased=False) * weights * size),
    }
    for name, value in (("mean", g.ndata["feat"].mean(0)), ("var", g.ndata["feat"].var(0, unbiased=False))):
        close(whole([found[name][1] for found in every], ids), gradient[name])
        for found in every:
            close(found[name][0], value)
    for found in every:
        close(found["alone"], nn.BatchNorm1d(8).double()(found["features"]))


def test_seeds_are_ids_of_the_whole_graph_and_keep_their_order(results: list[Any]) -> None:
    g, every = homogeneous(), of(results, "loader")
    ids = torch.cat([found["orig_id"] for found in every])  # by the numbering of node_ranges
    steps = -(-max(found["seeds"].numel() for found in every) // 7)
    for found in every:
        seeds, (first, end) = found["seeds"], found["range"]
        assert found["length"] == len(found["order"]) == steps
        assert torch.equal(torch.cat([blocks[-1]["dst"] for blocks in found["order"]]), seeds)
        assert all(blocks[-1]["dst"].numel() <= 7 for blocks in found["order"])
        for blocks in found["order"]:
            for block in blocks:
                src, dst = (ids[end] for end in block["edges"])
                assert torch.equal(torch.stack(g.find_edges(block["eid"])), torch.stack([src, dst]))
                assert block["names"] == sorted([dgl.EID, *g.edata])
            close(blocks[0]["f"][0], g.ndata["feat"][ids[blocks[0]["src"]]])
            assert torch.equal(blocks[-1]["f"][1], g.ndata["label"][ids[blocks[-1]["dst"]]])
            assert blocks[-1]["f"][0] is None
            assert torch.equal(blocks[-1]["dst"] >= first, blocks[-1]["dst"] < end), "seeds stay on their rank"
        dropped = torch.cat([blocks[-1]["dst"] for blocks in found["drop"]])
        assert torch.equal(dropped, seeds[: dropped.numel()])
        shuffled = torch.cat([blocks[-1]["dst"] for blocks in found["shuffle"]])
        assert torch.equal(shuffled.sort().values, seeds.sort().values) and not torch.equal(shuffled, seeds)
        assert not torch.equal(shuffled, torch.cat(found["epoch 2"]))
        assert [block["dst"].tolist() for block in found["default"]] == [[seed] for seed in seeds[:2].tolist()]
        assert all(block["names"] == [dgl.EID] for block in found["default"])
        assert all(torch.equal(one, other) for one, other in found["typed"])
        (elsewhere,), warned = found["foreign"]
        assert torch.equal(elsewhere, (seeds[:5] + 30) % 60)
        num = int(((elsewhere < first) | (elsewhere >= end)).sum())
        assert [f"{num} of 5 seed nodes are nodes of other ranks" in text for text in warned] == [True] * (num > 0)
        (weighted,) = found["weighted"]
        assert torch.equal(weighted["dst"], seeds) and weighted["eid"].numel() and not (weighted["eid"] % 3).any()
    assert "rows of this part plus 0: found ids from 60 to 62; expected node ids in [0, 60)" in every[0]["told"][0]
    for found in every[1:]:
        assert "PeerFailure: rank 0 passed wrong seed nodes to DataLoader" in found["told"][0]
        assert "rank 0 has 1 seed nodes for" in found["told"][1]
    most = max(found["seeds"].numel() for found in every)
    assert {len(found["drop"]) for found in every} == {most // 7}


def test_a_graph_knows_its_partition(results: list[Any]) -> None:
    g, every = homogeneous(), of(results, "graphs")
    ids = torch.cat([found["orig_id"] for found in every])
    first = 0
    for found in every:
        own = found["orig_id"].numel()
        assert found["ranges"] == found["own"] == (True, True) and found["book"] and found["is typed"]
        assert found["ids"] == (True, list(range(own)))
        assert not any(types.any() for types in found["types"]) and found["types"][0].numel() == own
        edges = found["sampled"][1].numel()
        assert found["counts"] == (own / 2, 2 * edges, own % 3, -own)
        assert found["global"] == (NODES, EDGES + NODES, 30)
        assert found["typed"][:3] == (54, 90, ["item", "user"])
        assert all(found["srcnodes"])
        sources, (buyers_and_bought, bought) = found["typed sources"], found["bipartite"]
        assert found["typed block"] == (["item", "user"], sum(sources), sources)
        assert buyers_and_bought == sources[1] + bought
        total, sources, seeds, rows = found["block"]
        assert total == sources + seeds and seeds == -(-own // 2) and rows.numel() == sources
        for one, other in (found["block src"], found["block dst"]):
            assert torch.equal(one, other)
        num, src, dst, eid = found["sampled"]
        assert num == NODES and bool(((dst >= first) & (dst < first + own)).all())
        assert torch.equal(torch.stack(g.find_edges(eid)), torch.stack([ids[src], ids[dst]]))
        assert found["shard"].tgt_range == (first, first + own)
        first += own
    assert sum(found["typed"][3] for found in every) == 54
