"""Dropout inside messages, differentiated twice: every pass drops the same entries of the same edges."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.ranks import plain_of
from shardpass.errors import RefusedError
from shardpass.testing import shard_in_memory

from .how_much import MODES, one_each
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH


class Twice(gnn.MessagePassing):
    """Cubes of sources with two dropouts, reduced by `aggr`."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return F.dropout(F.dropout(x_j, 0.3) * x_j.square(), 0.4)


class Drawn(Twice):
    def message(self, x_j):
        return x_j.square() * torch.rand_like(x_j)


class OfWeight(gnn.MessagePassing):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5, 5))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j @ F.dropout(self.weight, 0.5)


def slopes(model, x, graph):
    """The gradient of a loss by `x`."""
    return torch.autograd.grad(model(x, graph).square().sum(), x, create_graph=True)[0]


LAYERS = {
    "GATConv": lambda: gnn.GATConv(5, 4, heads=2, dropout=0.4),
    "GATv2Conv": lambda: gnn.GATv2Conv(5, 4, heads=2, dropout=0.4),
    "TransformerConv": lambda: gnn.TransformerConv(5, 4, heads=2, dropout=0.4),
    "two dropouts": Twice,
    "two dropouts, std": lambda: Twice("std"),
}


@pytest.mark.parametrize(("mode", "name"), one_each(MODES, LAYERS))
def test_a_penalty_on_gradients_under_dropout(mode, name):
    """The directional derivative of the penalty, with the same random numbers, against its gradient."""
    torch.manual_seed(0)
    owners, options = torch.zeros(GRAPH.num_nodes, dtype=torch.long), sp.Options(mode=mode, chunk_bytes=600)
    graph = shard_in_memory(GRAPH, owners, sp.connect("local"), options)
    model, direction = sp.pyg.wrap(LAYERS[name]().double(), graph.comm), torch.randn_like(graph.x)

    def penalty(x):
        torch.manual_seed(3)
        return slopes(model, x, graph).square().sum()

    x = graph.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(penalty(x), x)
    step = 1e-6
    slope = (penalty(x + step * direction) - penalty(x - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(3)
def test_all_passes_drop_the_same_entries(comm, mode):
    """Each message is of the third degree, so by Euler's theorem every derivative follows from the one before."""
    graph = share(GRAPH, comm, mode=mode, chunk_bytes=600)
    model, x = sp.pyg.wrap(Twice().double(), comm), graph.x.clone().requires_grad_()
    out = model(x, graph)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(plain_of(second * x), plain_of(2 * first))
    of_sums = sp.all_reduce_sum((first * x).sum(), comm)
    torch.testing.assert_close(sp.all_reduce_sum(3 * out.sum(), comm), of_sums)


@on_ranks(2)
def test_other_random_numbers_inside_a_message_are_refused(comm):
    graph = share(GRAPH, comm)
    x = graph.x.clone().requires_grad_()
    with pytest.raises(RefusedError, match=r"random numbers inside message\(\), other than those of dropout"):
        slopes(sp.pyg.wrap(Drawn().double(), comm), x, graph)


@on_ranks(2)
def test_dropout_of_a_weight_inside_a_message_is_refused(comm):
    graph = share(GRAPH, comm)
    with pytest.raises(RefusedError, match=r"shape \[5, 5\], which has no row per edge"):
        sp.pyg.wrap(OfWeight().double(), comm)(graph.x, graph)
