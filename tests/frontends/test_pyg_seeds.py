"""``torch.manual_seed`` in every rank gives what it gives in one process, also where ranks are threads."""

import random
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.testing.graphs import shard_in_memory
from shardpass.testing.run import run

from .pyg_cases import GRAPH

OWNERS = torch.arange(GRAPH.num_nodes) % 4


class Drawn(nn.Module):
    """Draws some of its parameters from NumPy and Python."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.SAGEConv(5, 3)
        self.scale = nn.Parameter(torch.tensor(np.random.rand(3)).float())  # noqa: NPY002
        self.shift = nn.Parameter(torch.tensor([random.random() for _ in range(3)]))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) * self.scale + self.shift


MODELS = {
    "GCN": lambda: gnn.GCN(5, 64, 3, 3, dropout=0.5),
    "GAT": lambda: gnn.GAT(5, 64, 3, 3, heads=4, norm="batch"),
    "GIN": lambda: gnn.GIN(5, 64, 3, 3),
    "of three generators": Drawn,
}


def built(name, seed=0):
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    return MODELS[name]().double()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(found, expected):
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_one_process(name, ranks):
    def body(comm):
        graph = shard_in_memory(GRAPH, OWNERS % comm.size, comm)
        model = built(name)
        before = values(model)
        model = sp.pyg.wrap(model, comm)
        return before, values(model), model(graph.x, graph).shape

    expected = values(built(name))
    for before, wrapped, _ in run(body, ranks):
        assert_same(before, expected)
        assert_same(wrapped, expected)


def test_models_may_be_built_after_another_is_wrapped():
    def body(comm):
        graph = shard_in_memory(GRAPH, OWNERS, comm)
        first = sp.pyg.wrap(built("GCN"), comm)
        second = built("GAT", 1)
        found = values(first), values(second)
        second = sp.pyg.wrap(second, comm)
        (first(graph.x, graph) + second(graph.x, graph)).sum().backward()
        with sp.seed(2, comm):  # after the first forward, ranks run at once
            third = MODELS["GIN"]().double()
        return *found, values(third)

    expected = values(built("GCN")), values(built("GAT", 1)), values(built("GIN", 2))
    for found in run(body, 4):
        for ours, theirs in zip(found, expected):
            assert_same(ours, theirs)


def test_after_wrap_ranks_draw_what_processes_draw():
    """Each has numbers of its own, which are the same in every run."""

    def body(comm):
        sp.pyg.wrap(built("GCN"), comm)
        return torch.rand(3)

    first, again = run(body, 3), run(body, 3)
    assert_same(first, again)
    assert len({tuple(drawn.tolist()) for drawn in first}) == 3


def test_training_is_parallel():
    together = threading.Barrier(3)

    def body(comm):
        graph = shard_in_memory(GRAPH, OWNERS % 3, comm)
        model = sp.pyg.wrap(built("GCN"), comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            out = model(graph.x, graph)
            together.wait(60)  # which no rank passes that runs alone
            out.sum().backward()
            together.wait(60)
            optimizer.step()
        return True

    assert run(body, 3) == [True] * 3


def test_batches_are_made_while_ranks_take_turns():
    """A rank waits for its batch, for which the threads of all ranks work together."""
    together = threading.Barrier(2)

    def body(comm):
        graph = shard_in_memory(GRAPH, OWNERS % 2, comm)
        model = built("GIN")
        found = values(model)
        loader = sp.pyg.NeighborLoader(graph, [3, 3], batch_size=4)
        for _ in range(2):
            for batch in loader:
                model(batch.x, batch.edge_index).sum().backward()
                sp.sync_gradients(model, comm)
                together.wait(60)
        return found

    for found in run(body, 2):
        assert_same(found, values(built("GIN")))
