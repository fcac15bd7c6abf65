"""Dry runs: a made-up rank has the sizes it was told, its communicator answers alone, the tracker counts storages."""

import pytest
import torch

from shardpass.core.dryrun import EdgeSizes, Field, NodeSizes, RankSizes
from shardpass.core.dryrun.communicator import DryCommunicator
from shardpass.core.dryrun.rank import made_up_edges, made_up_rank
from shardpass.core.dryrun.tracker import MemoryTracker
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, NODE

SIZES = RankSizes(4, {NODE: NodeSizes(500, {"x": Field((8,))})}, {EDGE: EdgeSizes(4000, cut=1500, halo_rows=300)})
WRITES = ("author", "writes", "paper")
TYPES = RankSizes(
    2,
    {"author": NodeSizes(30), "paper": NodeSizes(50, {"x": Field((8,))}, 5)},
    {
        WRITES: EdgeSizes(400, 150, 20, {"year": Field((), torch.int64)}),
        ("paper", "cites", "paper"): EdgeSizes(9, 0, 0),
    },
)


def test_the_rank_has_the_sizes_it_was_told():
    graph = made_up_rank(SIZES, Ranks(DryCommunicator(4)), Options(), made_up_edges(SIZES))
    assert (graph.num_own_nodes, graph.num_own_edges, graph.x.shape) == (500, 4000, (500, 8))
    assert graph.num_halo == pytest.approx(300, abs=2)
    assert sum(shard.num_edges for shard in graph.relation.shards.shards[1:]) == 1500


def test_a_smaller_rank_is_smaller_in_proportion():
    small = SIZES.scaled(0.1)
    assert small.nodes[NODE].count == 50 and small.edges[EDGE] == EdgeSizes(400, 150, 30)
    assert SIZES.scaled(1e-9).num_nodes == 1 and TYPES.scaled(1e-9).num_nodes == 2


def test_a_rank_of_several_types_has_the_sizes_it_was_told():
    graph = made_up_rank(TYPES, Ranks(DryCommunicator(2)), Options(), made_up_edges(TYPES))
    assert graph.node_types == ["author", "paper"] and graph["paper"].x.shape == (50, 8)
    relation = graph.relations[WRITES]
    assert (relation.plan.num_own_src, relation.plan.num_dst, relation.plan.num_halo) == (30, 50, 20)
    assert relation.shards.num_edges == 400 and relation.fields["year"].shape == (400,)
    assert graph.relations["paper", "cites", "paper"].plan.num_halo == 0


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
