"""The self-check without a frontend of a library: it accepts what is exact in pieces, and names what is not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from shardpass.core.selfcheck import Frontend, check_model, copy_for_check
from torch import nn

from shardpass.core.aggregation import aggregate
from shardpass.core.graphs import ShardedGraph
from shardpass.core.sharding import EDGE, NODE
from shardpass.core.tracing import Program
from shardpass.errors import RefusedError
from shardpass.testing import assignments, awkward_graph, run, shard_in_memory
from shardpass.testing.hetero import shard_by_type

GRAPH = awkward_graph(channels=4)
FRONTEND = Frontend(
    wrap=lambda model, comm: model,
    run=run,
    shard=shard_by_type,
    core_of=lambda leaf: leaf if isinstance(leaf, ShardedGraph) else None,
    fields_of=lambda graph: {NODE: dict(graph.node), EDGE: dict(graph.edge)},
    whole=lambda num_nodes, edges, fields: edges[EDGE],
    sharded=lambda share, fields: share,
)


class Sum(nn.Module):
    """The sum of mapped neighbours, on an ``edge_index`` or on a sharded graph."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x, graph):
        h = self.lin(x)
        if isinstance(graph, torch.Tensor):
            return torch.zeros_like(h).index_add(0, graph[1], h[graph[0]])

        def reduce(messages, inputs):
            return messages.new_zeros((inputs.num_dst, 3)).index_add(0, inputs.index, messages)

        program = Program("sum", {"h": h}, {}, {}, lambda inputs: inputs.src["h"], reduce)
        return aggregate(program, graph.relation.plan, graph.relation.shards)


class Shifted(nn.Module):
    """A sum, and then `change` of all rows at once."""

    def __init__(self, change):
        super().__init__()
        self.sum, self.change = Sum(), change

    def forward(self, x, graph):
        return self.change(self.sum(x, graph))


def checked(make):
    """The self-check of a model on two ranks."""
    owners = assignments(GRAPH.num_nodes, 2, GRAPH.edge_index)["random"]
    torch.manual_seed(0)
    model = make().double()

    def work(comm):
        graph, mine = shard_in_memory(GRAPH, owners, comm), copy.deepcopy(model)
        state = torch.random.get_rng_state()
        check_model(FRONTEND, copy_for_check(mine), mine, comm, (graph.x, graph), {})
        return bool(torch.equal(state, torch.random.get_rng_state())), [p.grad for p in mine.parameters()]

    return run(work, 2)


@pytest.mark.parametrize("make", [Sum, lambda: Shifted(torch.relu), lambda: Shifted(lambda h: h.log_softmax(1))])
def test_what_takes_each_row_alone_is_accepted_and_leaves_no_trace(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same_random_state, grads in checked(make):
            assert same_random_state and grads == [None, None]


@pytest.mark.parametrize("change", [lambda h: h - h.mean(0), lambda h: h.softmax(0)], ids=["mean", "softmax"])
def test_what_mixes_rows_is_refused_on_every_rank(change):
    with pytest.raises(RefusedError, match=r"self-check: .* Shifted .* it is in forward\(\) itself"):
        checked(lambda: Shifted(change))


def test_the_part_that_differs_is_named():
    class Centred(nn.Module):
        def forward(self, h):
            return h - h.mean(0)

    with pytest.raises(RefusedError, match=r"The first part whose output differs is 'change'\."):
        checked(lambda: Shifted(Centred()))
