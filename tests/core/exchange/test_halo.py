"""Halo plans against brute force; a bipartite relation against a dense computation, forward and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardpass.core.aggregation.sharded_call import aggregate
from shardpass.core.exchange.halo import build_halo_plan
from shardpass.core.exchange.transfer import halo_fetch
from shardpass.core.graphs.graph import build_relation
from shardpass.core.ranks.options import Options
from shardpass.core.sharding.ownership import Ownership
from shardpass.core.tracing.program import Program
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory
from shardpass.testing.run import run


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
        plan.schedule.validate()
        assert plan.schedule == results[0][0].schedule
        covered = sorted(row for b in plan.blocks for row in range(b.start, b.stop))
        assert covered == list(range(plan.num_src)) and plan.blocks[0] == (rank, 0, len(own))
        assert all(b.owner != rank and b.num_rows <= (block_rows or 99) for b in plan.blocks[1:])
        assert all(b.num_rows == 0 or owner[numbering[b.start]] == b.owner for b in plan.blocks)


NUM_SRC, NUM_DST, NUM_EDGES = 11, 7, 40


def bipartite(kind, ranks):
    """Edges from 11 sources to 7 destinations, and counts of both per rank."""
    generator = torch.Generator().manual_seed(ranks)
    src = torch.randint(0, NUM_SRC, (NUM_EDGES,), generator=generator)
    dst = torch.randint(0, NUM_DST, (NUM_EDGES,), generator=generator)
    src_counts = torch.bincount(torch.randint(0, ranks, (NUM_SRC,), generator=generator), minlength=ranks)
    dst_counts = torch.bincount(torch.randint(0, ranks, (NUM_DST,), generator=generator), minlength=ranks)
    if kind == "no sources on rank 0" and ranks > 1:
        src_counts[1] += src_counts[0].item()
        src_counts[0] = 0
    elif kind == "no destinations on the last rank" and ranks > 1:
        dst_counts[0] += dst_counts[-1].item()
        dst_counts[-1] = 0
    elif kind == "no edges on rank 0":
        first = int(dst_counts[0])
        if first < NUM_DST:
            dst[dst < first] = first
    return src, dst, src_counts.tolist(), dst_counts.tolist()


def attention(x_j, z_i, w, index, num_dst):
    """A message with a softmax over in-edges: two stages, an edge input, both node inputs."""
    logit = torch.tanh((x_j * z_i).sum(-1, keepdim=True)) * w.view(-1, 1)
    weight = logit.exp()
    total = weight.new_zeros((num_dst, 1)).index_add(0, index, weight)
    return weight / total.index_select(0, index) * x_j


@pytest.mark.parametrize("mode", ["sar", "keep", "halo"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "kind", ["any", "no sources on rank 0", "no destinations on the last rank", "no edges on rank 0"]
)
def test_bipartite_relation(kind, ranks, mode):
    src, dst, src_counts, dst_counts = bipartite(kind, ranks)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SRC, 4, generator=generator, dtype=torch.float64)
    z = torch.randn(NUM_DST, 4, generator=generator, dtype=torch.float64)
    w = torch.rand(NUM_EDGES, generator=generator, dtype=torch.float64)
    weights = torch.randn(NUM_DST, 4, generator=generator, dtype=torch.float64)

    whole = [t.clone().requires_grad_() for t in (x, z, w)]
    message = attention(whole[0][src], whole[1][dst], whole[2], dst, NUM_DST)
    expected = torch.zeros(NUM_DST, 4, dtype=torch.float64).index_add(0, dst, message)
    (expected * weights).sum().backward()

    sources, targets = Ownership.from_counts(src_counts), Ownership.from_counts(dst_counts)
    options = Options(mode=mode, block_rows=2, chunk_bytes=200)

    def work(comm):
        mine = (targets.owner_of(dst) == comm.rank).nonzero().view(-1)
        rows = slice(targets.offsets[comm.rank], targets.offsets[comm.rank + 1])
        own = slice(sources.offsets[comm.rank], sources.offsets[comm.rank + 1])
        relation = build_relation(
            comm, sources, src[mine], dst[mine] - rows.start, rows.stop - rows.start, mine, {"w": w[mine]}, options
        )
        assert torch.equal(relation.fields["w"], w[relation.edge_ids])
        a, b, c = (t.clone().requires_grad_() for t in (x[own], z[rows], relation.fields["w"]))

        def body(inputs):
            return attention(inputs.src["x"], inputs.dst["z"], inputs.edge["w"], inputs.index, inputs.num_dst)

        def reduce(message, inputs):
            return message.new_zeros((inputs.num_dst, 4)).index_add(0, inputs.index, message)

        program = Program("bipartite", {"x": a}, {"z": b}, {"w": c}, body, reduce)
        out = aggregate(program, relation.plan, relation.shards)
        (out * weights[rows]).sum().backward()
        return out.detach(), a.grad, b.grad, c.grad, relation.edge_ids

    results = run(work, ranks)
    found = [torch.cat([r[i] for r in results]) for i in range(3)]
    by_edge = torch.zeros(NUM_EDGES, dtype=torch.float64)
    for *_, grad, ids in results:
        by_edge[ids] = grad
    for mine, right in zip((*found, by_edge), (expected.detach(), *(t.grad for t in whole))):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["empty part", "no edges"])
def test_ranks_without_nodes_or_edges_still_send(kind, ranks):
    graph = awkward_graph()
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)[kind]

    def work(comm):
        sharded = shard_in_memory(graph, owners, comm)
        rows = halo_fetch(sharded.x, sharded.relation.plan, "x")
        src = sharded.edge_index.plain[0]
        return sharded.num_nodes, sharded.num_edges, rows[src], sharded.edge_ids

    results = run(work, ranks)
    assert results[-1][1] == 0 and (results[-1][0] == 0) == (kind == "empty part")
    for _, _, rows, edge_ids in results:
        assert torch.equal(rows, graph.node["x"][graph.edge_index[0, edge_ids]])


def test_source_ids_outside_are_named():
    with pytest.raises(ValueError, match=r"node id 9 lies outside \[0, 4\)"):
        run(lambda comm: build_halo_plan(comm, Ownership((0, 2, 4)), torch.tensor([0, 9]), 2, Options()), 2)
