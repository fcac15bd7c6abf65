"""Halo plans against brute force, on ranks without nodes or edges too."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardpass.backends import RecordingCommunicator
from shardpass.core.dryrun.communicator import DryCommunicator
from shardpass.core.exchange import build_halo_plan, halo_fetch, halo_plan_of, node_set
from shardpass.core.ranks import Options, Ranks, RowSet
from shardpass.core.sharding import NODE, Ownership
from shardpass.errors import InternalError
from shardpass.testing import assignments, awkward_graph, run, shard_in_memory


@st.composite
def plans(draw):
    ranks = draw(st.integers(1, 4))
    sources = Ownership.from_counts(draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)))
    ids = st.lists(st.integers(0, sources.num_total - 1), max_size=15) if sources.num_total else st.just([])
    return ranks, sources, [draw(ids) for _ in range(ranks)], draw(st.sampled_from([None, 1, 2]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_plan_against_brute_force(drawn):
    ranks, sources, ids, block_rows = drawn
    options = Options(block_rows=block_rows)

    def work(comm):
        mine = torch.tensor(ids[comm.rank], dtype=torch.int64)
        plan, rows = build_halo_plan(comm, sources, mine, 3, options)
        own = torch.arange(sources.num_own(comm.rank)) + sources.offsets[comm.rank]
        fetched = halo_fetch(own, plan, "ids")
        return plan, rows, fetched

    results = run(work, ranks)
    owner = {i: int(sources.owner_of(torch.tensor(i))) for i in range(sources.num_total)}
    for rank, (plan, rows, fetched) in enumerate(results):
        own = list(range(sources.offsets[rank], sources.offsets[rank + 1]))
        halo = sorted({i for i in ids[rank] if owner[i] != rank})  # by owner, since owners hold ranges
        numbering = own + halo
        assert plan.num_own_src == len(own) and plan.num_halo == len(halo) and plan.num_src == len(numbering)
        assert plan.num_dst == 3
        assert rows.tolist() == [numbering.index(i) for i in ids[rank]]
        assert fetched.tolist() == numbering, "row r holds the node that is numbered r"
        for q in range(ranks):
            theirs = [i for i in halo if owner[i] == q]
            assert plan.halo_start[q + 1] - plan.halo_start[q] == len(theirs)
            sends = [i - sources.offsets[q] for i in theirs]
            assert results[q][0].send_rows[rank].tolist() == sends
            assert plan.schedule.counts[rank][q] == len(theirs)
        assert plan.schedule == results[0][0].schedule
        covered = sorted(row for b in plan.blocks for row in range(b.start, b.stop))
        assert covered == list(range(plan.num_src)) and plan.blocks[0] == (rank, 0, len(own))
        assert all(b.owner != rank and b.num_rows <= (block_rows or 99) for b in plan.blocks[1:])
        assert all(b.num_rows == 0 or owner[numbering[b.start]] == b.owner for b in plan.blocks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["empty part", "no edges"])
def test_ranks_without_nodes_or_edges_still_send(kind, ranks):
    graph = awkward_graph()
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)[kind]

    def work(comm):
        sharded = shard_in_memory(graph, owners, comm)
        rows = halo_fetch(sharded.fields_of("node")["x"], sharded.relation.plan, "x")
        src = sharded.edge_index.plain[0]
        return sharded.num_own_nodes, sharded.num_own_edges, rows[src], sharded.edge_ids

    results = run(work, ranks)
    assert results[-1][1] == 0 and (results[-1][0] == 0) == (kind == "empty part")
    for _, _, rows, edge_ids in results:
        assert torch.equal(rows, graph.node["x"][graph.edge_index[0, edge_ids]])


@pytest.mark.ranks(2)
def test_what_a_model_is_told_of_the_rows(comm):
    plan, _ = build_halo_plan(comm, Ownership((0, 3, 5)), torch.tensor([0, 4]), 4, Options())
    typed, count = replace(plan, ends=("paper", "author"), relation=object()), plan.num_own_src
    assert count == (3, 2)[comm.rank] and (plan.source_set, plan.dst_set) == (
        node_set(NODE, count),
        node_set(NODE, 4),
    )
    assert plan.source_set == RowSet("nodes", count, ("nodes", NODE))
    assert (typed.source_set, typed.dst_set) == (node_set("paper", count), node_set("author", 4))
    named = (plan.source_set, plan.dst_set, typed.source_set, typed.dst_set, plan.edge_set(7))
    assert [rows.name for rows in named] == ["nodes", "nodes", "'paper' nodes", "'author' nodes", "edges"]
    assert not node_set("paper", 4).goes_with(node_set("author", 4)) and not node_set(NODE, 4).is_of_edges
    edges = plan.edge_set(7)
    assert edges.is_of_edges and edges == plan.edge_set(7) and edges.goes_with(plan.edge_set(7))
    assert not edges.goes_with(plan.edge_set(8)) and not edges.goes_with(typed.edge_set(7)), "of another graph"
    own = replace(plan, edges=(7, 20))
    assert own.edge_set(7).total == 20 and own.edge_set(8).total is None, "others than those of the graph"
    assert plan.edge_set(2).total == 4 and replace(plan, edges=None).edge_set(2).total is None


def test_counts_that_do_not_agree_are_our_defect():
    class Lying(RecordingCommunicator):
        def all_gather(self, tensor, label=""):
            return [counts + 1 for counts in super().all_gather(tensor, label)]

    def work(comm):
        build_halo_plan(Ranks(Lying(comm)), Ownership((0, 2, 4)), torch.tensor([0]), 2, Options())

    with pytest.raises(InternalError, match=r"rank (0|1) got \d rows to send to rank 0, which needs \d"):
        run(work, 2)


def test_source_ids_outside_are_named():
    with pytest.raises(ValueError, match=r"node id 9 lies outside \[0, 4\)"):
        run(lambda comm: build_halo_plan(comm, Ownership((0, 2, 4)), torch.tensor([0, 9]), 2, Options()), 2)


def test_needed_rows_are_asked_for_as_int64_on_the_device_of_the_ranks():
    """A device without memory stands for a GPU; the numbers that come back are given."""
    inner, asked = DryCommunicator(2), []
    inner.device = torch.device("meta")
    inner.all_to_all = lambda tensors, label: asked.extend(tensors) or [torch.arange(0), torch.arange(2)]
    inner.all_gather = lambda tensor, label: [torch.tensor([0, 2, 5]), torch.tensor([2, 0, 5])]
    needed = [torch.tensor(rows, dtype=torch.int32) for rows in ([], [0, 2])]
    halo_plan_of(Ranks(inner), 3, needed, 3, 5, Options())
    assert [(rows.device.type, rows.dtype) for rows in asked] == [("meta", torch.int64)] * 2
