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


class OfWeight(Twice):
    def __init__(self, rows=5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(rows, 5))

    def message(self, x_j):
        return x_j @ F.dropout(self.weight, 0.5)[:5]


class OfNodes(Twice):
    """Dropout in the node function."""

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size=None):
        return F.dropout(super().aggregate(inputs, index, dim_size=dim_size), 0.5, self.training)


class Masked(Twice):
    """A mask of edges, divided by how many edges of a node are left."""

    def message(self, x_j, index, size_i):
        mask = F.dropout(x_j.new_ones(x_j.size(0), 1), 0.4)
        left = mask.new_zeros(size_i, 1).index_add(0, index, mask).clamp(min=1e-9)
        return mask / left[index]


class Dropped(Twice):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def message(self, x_j):
        return self.drop(x_j * 1)


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
    with pytest.raises(RefusedError, match=r"random numbers inside message\(\), other than those of F.dropout"):
        slopes(sp.pyg.wrap(Drawn().double(), comm), x, graph)


@pytest.mark.parametrize("rows", [5, 16])  # as many as a probe has edges
@on_ranks(2)
def test_dropout_of_more_weights_is_refused_before_rows_travel(comm, rows):
    graph = share(GRAPH, comm, share_memory=False)
    sent = comm.bytes_sent
    with pytest.raises(RefusedError, match="dropout inside a message of a tensor of shape"):
        sp.pyg.wrap(OfWeight(rows).double(), comm)(graph.x, graph)
    assert comm.bytes_sent - sent < graph.edge_index.plan.schedule.counts[comm.rank][1 - comm.rank] * 5 * 8


@on_ranks(1, 3)
def test_dropout_in_the_node_function(comm):
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(OfNodes().double(), comm)
    out = plain_of(model(graph.x, graph).detach())
    whole = plain_of(model.eval()(graph.x, graph).detach())
    assert ((out == 0) | ((out - 2 * whole).abs() < 1e-12)).all()


@on_ranks(1, 3)
def test_a_dropped_constant_is_drawn(comm):
    graph = share(GRAPH, comm)
    out = plain_of(sp.pyg.wrap(Masked().double(), comm)(graph.x, graph).detach())
    assert ((out.abs() < 1e-12) | ((out - 1).abs() < 1e-12)).all(), "the mask adds up to 1, unless all is dropped"
    assert sp.all_reduce_sum(out.sum(), comm) > 0


@pytest.mark.parametrize(
    ("drop", "some"),
    [
        (lambda x: torch.dropout(x, p=0.5, train=True), True),
        (lambda x: torch.dropout(x, 0.5, False), False),
        (lambda x: F.dropout(x, 1.0), True),
        (lambda x: F.dropout(x, 0.5, inplace=True), True),
    ],
)
@on_ranks(2)
def test_ways_to_write_it(comm, drop, some):
    graph = share(GRAPH, comm)
    x = torch.ones_like(graph.x)
    out = plain_of(sp.pyg.wrap(Dropped(drop).double(), comm)(x, graph).detach())
    degrees = plain_of(sp.pyg.wrap(Dropped(lambda x: x).double(), comm)(x, graph).detach())
    assert (out.frac() == 0).all() and torch.equal(out, degrees) != some


@on_ranks(2)
def test_a_probability_that_is_none(comm):
    graph = share(GRAPH, comm)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        sp.pyg.wrap(Dropped(lambda x: F.dropout(x, 1.5)).double(), comm)(graph.x, graph)


@pytest.mark.parametrize("owners", ["random", "empty part"])
@pytest.mark.parametrize("name", LAYERS)
@on_ranks(3)
def test_kernels_and_messages_drop_the_same_entries(comm, name, owners):
    """Backward goes by kernels, and with create_graph=True by the message function."""
    graph = share(GRAPH, comm, owners, chunk_bytes=600)
    with sp.seed(0, comm):
        layer = LAYERS[name]()
    model, x = sp.pyg.wrap(layer.double(), comm), graph.x.clone().requires_grad_()
    loss = model(x, graph).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (again,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(plain_of(again.detach()), plain_of(first), rtol=1e-11, atol=1e-11)
