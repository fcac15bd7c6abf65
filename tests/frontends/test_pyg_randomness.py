"""Random numbers in wrapped models: drawn again alike in backward, on ranks of any size, or refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch.utils.checkpoint import checkpoint

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing.graphs import shard_in_memory
from shardpass.testing.run import run

from .pyg_cases import GRAPH
from .test_pyg_behaviour import OWNERS, on_two_ranks


@pytest.mark.parametrize("mode", ["sar", "keep", "halo"])
@pytest.mark.parametrize("name", ["GATConv", "TransformerConv"])
def test_dropout_inside_messages_is_replayed_in_backward(name, mode):
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


def test_dropout_between_layers_on_ranks_of_very_different_size():
    """Threads share torch's generator: the large rank is in its dropout while the small one probes the next layer."""
    owners = (torch.arange(GRAPH.num_nodes) < 5).long()
    make = lambda: gnn.GAT(5, 8, 3, 4, dropout=0.5).double()  # noqa: E731

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        model = sp.pyg.wrap(make(), comm, check=False)
        for _ in range(10):
            model(graph.x, graph).sum().backward()
            model.zero_grad()
        return True

    assert run(work, 2) == [True, True]


@pytest.mark.parametrize("where", ["between layers", "in attention"])
def test_dropout_within_torch_checkpoint_is_refused_on_threads(where):
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

    def work(comm, graph):
        model = sp.pyg.wrap(Net().double(), comm, check=False)
        with pytest.raises(RefusedError, match=r"drawn within torch.utils.checkpoint, and ranks that are threads"):
            model(graph.x, graph)
        model.eval()(graph.x, graph).sum().backward()
        return True

    assert on_two_ranks(work) == [True, True]


def test_random_attention_used_twice_is_refused():
    def work(comm, graph):
        layer = sp.pyg.wrap(gnn.GATConv(5, 6, dropout=0.5).double(), comm)
        with pytest.raises(RefusedError, match="used a second time, but it holds random numbers"):
            layer(graph.x, graph, return_attention_weights=True)
        layer.eval()(graph.x, graph, return_attention_weights=True)

    on_two_ranks(work)


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


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("what", [*SEEDED, *FINE, "a branch of its own"])
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
    with pytest.raises(RefusedError, match=rf"test_pyg_randomness.py:\d+: .*{reason}"):
        run(work, ranks)
