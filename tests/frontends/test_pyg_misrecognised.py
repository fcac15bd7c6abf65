"""Layers that look like an attention or a copy and are not quite: exact all the same. Each was wrong once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, SAGEConv
from torch_geometric.utils import scatter, softmax

import shardpass as sp
from shardpass.testing import WholeGraph, awkward_graph

from .how_much import assert_exact_in, in_turn
from .on_ranks import on_ranks, share

GRAPH = awkward_graph()
ZEROS = WholeGraph(GRAPH.num_nodes, GRAPH.edge_index, {"x": GRAPH.node["x"].clone()}, {})
ZEROS.node["x"][:15] = 0


def call(model, inputs, graph):
    return model(inputs["x"], graph)


class Base(MessagePassing):
    """Attention with two heads, but for `weights` and `values`."""

    def __init__(self):
        super().__init__(node_dim=0)
        self.lin, self.score = nn.Linear(5, 6), nn.Linear(5, 2)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x).view(-1, 2, 3), p=self.score(x)).flatten(1)

    def message(self, x_j, p_j, p_i, index, size_i):
        return self.values(x_j) * self.weights(F.leaky_relu(p_j + p_i, 0.2), index, size_i).unsqueeze(-1)

    def values(self, x_j):
        return x_j

    def weights(self, score, index, size):
        return softmax(score, index, None, size)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def parts(score, index, size):
    top = scatter(score.detach(), index, 0, size, "max")
    exponential = (score - top[index]).exp()
    return exponential, scatter(exponential, index, 0, size), top


class WithoutGrad(Base):
    def weights(self, score, index, size):
        with torch.no_grad():
            return softmax(score, index, None, size)


class TotalWithoutGrad(Base):
    def weights(self, score, index, size):
        exponential, _, _ = parts(score, index, size)
        with torch.no_grad():
            total = scatter(exponential, index, 0, size)
        return exponential / total[index]


class Detached(Base):
    def weights(self, score, index, size):
        return softmax(score, index, None, size).detach_()


class ValueWithoutGrad(Base):
    def values(self, x_j):
        with torch.no_grad():
            return x_j.clone()


class ReversedWeights(Base):
    def weights(self, score, index, size):
        return Reversed.apply(softmax(score, index, None, size))


class ReversedValues(Base):
    def values(self, x_j):
        return Reversed.apply(x_j)


class HookedWeights(Base):
    def weights(self, score, index, size):
        weights = softmax(score, index, None, size)
        if weights.requires_grad:
            weights.register_hook(lambda grad: 3 * grad)
        return weights


class ExchangedValues(Base):
    def values(self, x_j):
        rows = x_j.clone()
        rows.data = rows.data * 2
        return rows


class WrittenThroughData(Base):
    def weights(self, score, index, size):
        score = torch.tanh(score)
        top = scatter(score.detach(), index, 0, size, "max")
        score.data.mul_(2)
        exponential = (score - top[index]).exp()
        return exponential / (scatter(exponential, index, 0, size) + 1e-16)[index]


class ReversedCopy(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return Reversed.apply(x_j)


class TimesTotal(MessagePassing):
    """The sum of the softmax is used once more."""

    def __init__(self, use):
        super().__init__(node_dim=0)
        self.score, self.use = nn.Linear(5, 1), use

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, p=self.score(x))

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size, p_j, p_i):
        exponential, total, top = parts(p_j + p_i, index, dim_size)
        out = scatter(exponential / total[index] * inputs, index, 0, dim_size)
        return out * total if self.use == "total" else out + top


CASES = {
    "GATConv": (lambda: GATConv(5, 3, heads=2), ZEROS),
    "GATv2Conv": (lambda: GATv2Conv(5, 3, heads=2, bias=False, share_weights=True), ZEROS),
    "GATConv mean": (lambda: GATConv(5, 3, aggr="mean"), GRAPH),
    "times total": (lambda: TimesTotal("total"), GRAPH),
    "plus maximum": (lambda: TimesTotal("maximum"), GRAPH),
    **{
        kind.__name__: (kind, GRAPH)
        for kind in (
            *(Base, WithoutGrad, TotalWithoutGrad, Detached, ValueWithoutGrad, ReversedWeights, ReversedValues),
            *(HookedWeights, ExchangedValues, WrittenThroughData, ReversedCopy),
        )
    },
}


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(CASES, ("sar", "keep"), later=(1, 3)))
def test_it_equals_the_whole_graph(name, ranks, modes):
    make, graph = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    assert_exact_in(modes, model, graph, call, sp.pyg.wrap, ranks, sp.Options(chunk_bytes=1000))


@pytest.mark.parametrize("make", [lambda: GATConv(5, 3), lambda: GATv2Conv(5, 3)], ids=["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=lambda g: g.__name__)
@on_ranks(2)
def test_evaluation_without_gradients(comm, make, guard):
    torch.manual_seed(0)
    model = make().double()
    expected = model(GRAPH.node["x"], GRAPH.edge_index).detach()
    graph = share(GRAPH, comm)
    mine = sp.pyg.wrap(copy.deepcopy(model), comm)
    mine(graph.x, graph).sum().backward()
    with guard():
        out = mine(graph.x, graph)
    torch.testing.assert_close(out.clone(), expected[graph.node_ids], rtol=0, atol=1e-12)


WRITES = {
    "data": lambda x: x.data.mul_(3),
    "exchanged data": lambda x: setattr(x, "data", x.data * 3),
    "numpy": lambda x: x.numpy().__imul__(3),
    "rows swapped": lambda x: x.data.copy_(x.data.flip(0)),
    "columns swapped": lambda x: x.data.copy_(x.data.flip(1)),
}


@pytest.mark.parametrize("name", WRITES)
@on_ranks(3)
def test_writes_that_leave_no_version_are_seen_by_the_kept_sums(comm, name):
    model = SAGEConv(5, 6).double()
    graph = share(GRAPH, comm)
    plain = share(GRAPH, comm, cache_constant_inputs=False)
    mine, x = sp.pyg.wrap(copy.deepcopy(model), comm, check=False), graph.fields_of("node")["x"].clone()
    for _ in range(3):
        mine(x, graph)
    if comm.rank == 1:
        WRITES[name](x)
    assert torch.equal(mine(x, graph), mine(x, plain))


@on_ranks(2)
def test_kept_sums_and_inference_mode(comm):
    graph = share(GRAPH, comm)
    mine, x = sp.pyg.wrap(SAGEConv(5, 3).double(), comm, check=False), graph.x.clone()
    outs = []
    for turn in range(12):
        with torch.inference_mode() if turn % 4 > 1 else torch.enable_grad():
            out = mine(x, graph)
            outs.append(out.clone())
        if out.requires_grad:
            out.sum().backward()
    with torch.no_grad():
        assert all(torch.equal(out.detach(), outs[0].detach()) for out in outs)


class PassesTwo(MessagePassing):
    """The second of its source tensors is collected for messages that do not read it, or read it times zero."""

    def __init__(self, reads):
        super().__init__(aggr="add")
        self.first, self.second, self.reads = nn.Linear(5, 3), nn.Linear(5, 3), reads

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.first(x), z=self.second(x))

    def message(self, x_j, z_j):
        return x_j + 0 * z_j if self.reads else x_j


@pytest.mark.parametrize("mode", ["sar", "halo"])
@pytest.mark.parametrize("reads", [False, True])
@on_ranks(2)
def test_a_source_that_no_message_reads_has_no_gradient(comm, reads, mode):
    """None, which optimizers with weight decay leave alone, and not zeros."""
    whole = PassesTwo(reads).double()
    model = copy.deepcopy(whole)
    whole(GRAPH.node["x"], GRAPH.edge_index).sum().backward()
    graph = share(GRAPH, comm, mode=mode)
    mine = sp.pyg.wrap(copy.deepcopy(model), comm, check=False)
    mine(graph.x, graph).sum().backward()
    sp.sync_gradients(mine, comm)
    for expected, found in zip(whole.parameters(), mine.parameters()):
        assert (expected.grad is None) == (found.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-10)
