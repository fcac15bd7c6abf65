"""A rank's share of a graph: what it answers, what it refuses in words, and gathering rows in the original order."""

import pytest
import torch

from shardpass.core.exchange import node_set
from shardpass.core.graphs import OwnFields, gather
from shardpass.core.sharding import NODE
from shardpass.testing import WholeGraph, assignments, awkward_graph, run, shard_in_memory

GRAPH = awkward_graph()


def share(ranks=2, kind="random", graph=GRAPH, options=None):
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)[kind]
    return run(lambda comm: shard_in_memory(graph, owners, comm, options), ranks)


@pytest.fixture(scope="module")
def graph():
    return share()[0]


def test_attributes_that_are_there(graph):
    assert not hasattr(graph, "y") and hasattr(graph, "x") and not hasattr(graph, "__wrapped__")


def test_what_it_says(graph):
    assert repr(graph) == (
        f"ShardedGraph(rank 0 of 2: {graph.num_own_nodes} of 41 nodes, {graph.num_own_edges} of 220 edges, mode='sar')"
    )
    assert graph.is_homogeneous and graph.node_types == ["node"] and graph.edge_types == [("node", "to", "node")]
    assert graph.num_features == 5


def test_fields_are_read_once():
    reads = []

    def place(tensor):
        reads.append(1)
        return tensor + 1

    def read(comm):
        fields = OwnFields({"a": torch.zeros(2), "b": torch.ones(2)}, comm, node_set(NODE, 2), place)
        assert fields["a"] is fields["a"] and len(reads) == 1
        assert list(fields) == ["a", "b"] and len(fields) == 2 and "c" not in fields

    run(read, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["random", "empty part", "no edges"])
def test_edges_and_fields_stand_together(ranks, kind):
    if ranks == 1 and kind != "random":
        pytest.skip("one rank has everything")
    graphs = share(ranks, kind)
    assert torch.equal(torch.cat([g.edge_ids for g in graphs]).sort()[0], torch.arange(220))
    for g in graphs:
        assert torch.equal(g.edge_attr, GRAPH.edge["edge_attr"][g.edge_ids])
        assert torch.equal(g.node_ids[g.edge_index.plain[1]], GRAPH.edge_index[1, g.edge_ids])
        own = g.edge_index.plain[0] < g.num_own_nodes
        ids = g.edge_ids[own]
        assert torch.equal(g.node_ids[g.edge_index.plain[0][own]], GRAPH.edge_index[0, ids])
        assert not torch.isin(GRAPH.edge_index[0, g.edge_ids[~own]], g.node_ids).any()
        degrees = torch.bincount(GRAPH.edge_index[1], minlength=41)[g.node_ids]
        assert torch.equal(g.relation.shards.degrees(), degrees)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("tail", [(), (3,), (2, 2)])
def test_gather_returns_the_original_order(dtype, tail):
    owners = assignments(41, 3, GRAPH.edge_index)["empty part"]
    whole = torch.randint(0, 2 if dtype is torch.bool else 99, (41, *tail)).to(dtype)

    def work(comm):
        g = shard_in_memory(GRAPH, owners, comm)
        rows = whole[g.node_ids]
        return gather(g, rows.requires_grad_() if dtype is torch.float64 else rows)

    first, *others = run(work, 3)
    assert torch.equal(first, whole) and not first.requires_grad and others == [None, None]


def test_no_edges_at_all():
    nothing = WholeGraph(3, torch.empty(2, 0, dtype=torch.int64), {"x": torch.ones(3, 2)})
    graphs = share(2, "random", nothing)
    assert [g.num_own_edges for g in graphs] == [0, 0] and [g.num_halo for g in graphs] == [0, 0]
    assert all(g.edge_index.shape == (2, 0) for g in graphs) and sum(g.num_own_nodes for g in graphs) == 3
