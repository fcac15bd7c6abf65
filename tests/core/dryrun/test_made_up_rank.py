"""Dry runs: a made-up rank has the sizes it was told, its communicator answers alone, the tracker counts storages."""

from __future__ import annotations

import pytest
import torch

from shardpass.core.dryrun.communicator import DryCommunicator
from shardpass.core.dryrun.rank import Field, RankSizes, made_up_edges, made_up_rank
from shardpass.core.dryrun.tracker import MemoryTracker
from shardpass.core.ranks import Options, Ranks

SIZES = RankSizes(ranks=4, nodes=500, edges=4000, cut_edges=1500, halo_rows=300, node_fields={"x": Field((8,))})


def test_the_rank_has_the_sizes_it_was_told():
    graph = made_up_rank(SIZES, Ranks(DryCommunicator(4)), Options(), made_up_edges(SIZES))
    assert (graph.num_own_nodes, graph.num_own_edges, graph.x.shape) == (500, 4000, (500, 8))
    assert graph.num_halo == pytest.approx(300, abs=2)
    assert sum(shard.num_edges for shard in graph.relation.shards.shards[1:]) == 1500


def test_a_smaller_rank_is_smaller_in_proportion():
    small = SIZES.scaled(0.1)
    assert (small.nodes, small.edges, small.cut_edges, small.halo_rows) == (50, 400, 150, 30)
    assert SIZES.scaled(1e-9).nodes == 1


def test_collectives_answer_as_if_every_rank_did_the_same():
    told = []
    comm = DryCommunicator(3, notify=told.append)
    assert comm.all_reduce(torch.tensor([2.0]), label="a").tolist() == [6.0]
    assert comm.all_reduce(torch.tensor([2.0]), "max").tolist() == [2.0]
    assert [t.tolist() for t in comm.all_gather(torch.tensor([5]))] == [[5]] * 3
    received = torch.ones(4)
    comm.exchange(torch.ones(6), 1, received, 2, tag=0, label="b").wait()
    assert not received.any() and comm.bytes_sent == 24 and told == ["a", "", "", "b"]


def test_the_tracker_counts_what_lives():
    with MemoryTracker() as tracker:
        kept = torch.empty(1000)
        view = kept[10:]
        torch.empty(5000).add_(1)
        assert tracker.live_bytes == 4000
        del kept
        assert tracker.live_bytes == 4000
        del view
        assert tracker.live_bytes == 0
    assert sorted(storage.num_bytes for storage in tracker.storages) == [4000, 20000]
