"""A bipartite relation against a dense computation: outputs, and gradients of sources, destinations and edges."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shardpass.core.aggregation.sharded_call import aggregate
from shardpass.core.graphs.relation import build_relation
from shardpass.core.ranks.options import Options
from shardpass.core.sharding.ownership import Ownership
from shardpass.core.tracing.program import Program
from shardpass.testing.run import run

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


KINDS = ["any", "no sources on rank 0", "no destinations on the last rank", "no edges on rank 0"]
EACH = [(1, "sar"), (2, "halo"), (3, "keep"), (4, "sar")]


@pytest.mark.parametrize(
    ("kind", "ranks", "mode"),
    [(kind, *EACH[(i + k) % 4]) for i, kind in enumerate(KINDS) for k in (0, 2)]
    + [pytest.param(*case, marks=pytest.mark.long) for case in product(KINDS, (1, 2, 3, 4), ("sar", "keep", "halo"))],
)
def test_bipartite_relation(kind, ranks, mode):
    src, dst, src_counts, dst_counts = bipartite(kind, ranks)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SRC, 4, generator=generator, dtype=torch.float64)
    z = torch.randn(NUM_DST, 4, generator=generator, dtype=torch.float64)
    w = torch.rand(NUM_EDGES, generator=generator, dtype=torch.float64)
    weights = torch.randn(NUM_DST, 4, generator=generator, dtype=torch.float64)

    whole = [t.clone().requires_grad_() for t in (x, z, w)]
    messages = attention(whole[0][src], whole[1][dst], whole[2], dst, NUM_DST)
    expected = torch.zeros(NUM_DST, 4, dtype=torch.float64).index_add(0, dst, messages)
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

        def message(inputs):
            return attention(inputs.src["x"], inputs.dst["z"], inputs.edge["w"], inputs.index, inputs.num_dst)

        def reduce(messages, inputs):
            return messages.new_zeros((inputs.num_dst, 4)).index_add(0, inputs.index, messages)

        program = Program("bipartite", {"x": a}, {"z": b}, {"w": c}, message, reduce)
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
