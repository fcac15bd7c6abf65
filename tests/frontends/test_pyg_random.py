"""Random numbers: those of one process, drawn again alike in backward, or refused."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run, shard_in_memory

from .how_much import MODES, one_each
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH
from .test_pyg_behaviour import OWNERS


@pytest.mark.parametrize(("mode", "name"), one_each(MODES, ["GATConv", "TransformerConv"]))
def test_dropout_inside_messages_is_replayed_in_backward(mode, name):
    """The directional derivative of the loss, with the same random numbers, against the gradient."""
    kind = {"GATConv": gnn.GATConv, "TransformerConv": gnn.TransformerConv}[name]
    torch.manual_seed(0)
    layer = kind(5, 4, heads=2, dropout=0.4).double()
    graph = shard_in_memory(
        GRAPH, torch.zeros_like(OWNERS), sp.connect("local"), sp.Options(mode=mode, chunk_bytes=600)
    )
    model = sp.pyg.wrap(layer, graph.comm)
    direction = torch.randn_like(graph.x)

    def loss(x):
        torch.manual_seed(3)
        return model(x, graph).square().sum()

    x = graph.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    with torch.no_grad():
        assert not torch.equal(loss(x), model(x, graph).square().sum()), "dropout is on"
        step = 1e-6
        slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_dropout_between_layers_on_ranks_of_very_different_size(comm):
    """Threads share torch's generator: the large rank is in its dropout while the small one probes the next layer."""
    owners = (torch.arange(GRAPH.num_nodes) < 5).long()
    make = lambda: gnn.GAT(5, 8, 3, 4, dropout=0.5).double()  # noqa: E731
    graph = shard_in_memory(GRAPH, owners, comm)
    model = sp.pyg.wrap(make(), comm, check=False)
    for _ in range(10):
        model(graph.x, graph).sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("where", ["between layers", "in attention"])
@on_ranks(2)
def test_dropout_within_torch_checkpoint_is_refused_on_threads(comm, where):
    """Backward draws again from a generator that the other rank uses too; wrap's own checkpoint keeps its own."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = gnn.GATConv(5, 6, dropout=0.5 if where == "in attention" else 0.0)

        def block(self, x, edge_index):
            x = x if where == "in attention" else torch.nn.functional.dropout(x, 0.5, self.training)
            return self.conv(x, edge_index)

        def forward(self, x, edge_index):
            return checkpoint(self.block, x, edge_index, use_reentrant=False)

    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(Net().double(), comm, check=False)
    with pytest.raises(RefusedError, match=r"drawn within torch.utils.checkpoint, and ranks that are threads"):
        model(graph.x, graph)
    model.eval()(graph.x, graph).sum().backward()


@on_ranks(2)
def test_random_attention_used_twice_is_refused(comm):
    graph = share(GRAPH, comm)
    layer = sp.pyg.wrap(gnn.GATConv(5, 6, dropout=0.5).double(), comm)
    with pytest.raises(RefusedError, match="used a second time, but it holds random numbers"):
        layer(graph.x, graph, return_attention_weights=True)
    layer.eval()(graph.x, graph, return_attention_weights=True)


def _draws(seeded):
    """A model that draws at one place, and whether it seeds torch's generator before."""

    class Drawing(torch.nn.Module):
        def __init__(self, draw):
            super().__init__()
            self.conv, self.draw = gnn.GCNConv(5, 4), draw

        def forward(self, x, edge_index):
            h = self.conv(x, edge_index)
            if seeded:
                torch.manual_seed(5)
            return self.draw(h)

    return Drawing


def own(seed=1):
    return torch.Generator().manual_seed(seed)


SEEDED = {  # seeded before?, what is drawn
    "manual_seed, rand_like": (True, lambda h: h * torch.rand_like(h)),
    "manual_seed, dropout": (True, lambda h: torch.nn.functional.dropout(h, 0.5)),
    "manual_seed, sized": (True, lambda h: h + torch.rand(h.size(0), 1).to(h)),
    "generator": (False, lambda h: h * torch.rand(h.shape, generator=own()).to(h)),
}
FINE = {
    "dropout": (False, lambda h: torch.nn.functional.dropout(h, 0.5)),
    "the same noise on every rank": (False, lambda h: h + torch.randn(4, generator=own()).to(h)),
    "a branch that is the same": (False, lambda h: h if torch.rand((), generator=own()) < 0.5 else 2 * h),
}


@pytest.mark.parametrize(("what", "ranks"), one_each([*SEEDED, *FINE, "a branch of its own"], (1, 3)))
def test_numbers_from_a_seed_of_the_model(what, ranks):
    branch = (False, lambda h: h if torch.rand(()) < 0.5 else 2 * h)
    seeded, draw = {**SEEDED, **FINE}.get(what, branch)

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm)
        sp.pyg.wrap(_draws(seeded)(draw).double(), comm)(graph.x, graph)

    if what in FINE or (what not in SEEDED and ranks == 1):
        run(work, ranks)
        return
    reason = "draws random numbers for .* from a seed" if what in SEEDED else "a random number decides"
    with pytest.raises(RefusedError, match=rf"test_pyg_random.py:\d+: .*{reason}"):
        run(work, ranks)


FOUR = torch.arange(GRAPH.num_nodes) % 4


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


@pytest.mark.parametrize(("name", "ranks"), one_each(MODELS, (3, 1)))
def test_parameters_are_those_of_one_process(name, ranks):
    def body(comm):
        graph = shard_in_memory(GRAPH, FOUR % comm.size, comm)
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
        graph = shard_in_memory(GRAPH, FOUR, comm)
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
        graph = shard_in_memory(GRAPH, FOUR % 3, comm)
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
        graph = shard_in_memory(GRAPH, FOUR % 2, comm)
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
