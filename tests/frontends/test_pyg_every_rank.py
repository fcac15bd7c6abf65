"""What every rank has alike beside rows of its own: in norms, in sums over ranks, in lookups by ``batch``."""

import inspect
import re

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch.nn import functional as F

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, assert_exact, run, shard_in_memory

from .how_much import one_each, owners_of
from .on_ranks import on_ranks
from .pyg_cases import GRAPH

MANY = WholeGraph(GRAPH.num_nodes, GRAPH.edge_index, dict(GRAPH.node), dict(GRAPH.edge))
MANY.node["batch"] = (torch.arange(41) * 7 % 3).sort()[0]


class Net(nn.Module):
    """A layer, and `after` it."""

    def __init__(self, after, norm=None):
        super().__init__()
        self.conv, self.after, self.norm = gnn.GCNConv(5, 6), after, norm
        self.kinds, self.head = nn.Parameter(torch.rand(4, 6)), gnn.MLP([6, 6, 2])
        self.comm = None

    def forward(self, x, edge_index, batch):
        return self.after(self, self.conv(x, edge_index), batch)

    def total(self, tensor):
        return tensor if self.comm is None else sp.all_reduce_sum(tensor, self.comm)


def wrapped(model, comm):
    model.comm = comm
    return sp.pyg.wrap(model, comm)


def called(m, i, g):
    """Several times: the third call is not followed."""
    batch = g.batch if hasattr(g, "batch") else i["batch"]
    return sum(m(i["x"], g, batch) for _ in range(3))


def normed(m, h, b):
    """What a norm makes of the readout, at the nodes."""
    return h + m.norm(gnn.global_mean_pool(h, b))[b]


def both(m, h, b):
    """One norm of the nodes, and of a parameter."""
    return m.norm(h) @ m.norm(m.kinds).t()


def flat(m, h, b):
    return (h.view(-1) * 2).relu().view(h.size(0), -1) @ m.kinds.t()


def views(m, h, b):
    return gnn.global_mean_pool(torch.cat([h, h.tanh()]), torch.cat([b, b]))[b]


def summed(m, h, b):
    total = torch.zeros(6, dtype=h.dtype)
    total += m.total(h.sum(0) / 3 + (h * 2).square().sum(0))
    counts = torch.zeros(2, dtype=h.dtype).index_add_(0, (h[:, 0] > 0).long(), torch.ones_like(h[:, 0]))
    return h - total / m.total(counts).sum() + m.total(h.t() @ h)[0].tanh()


EXACT = {
    "BatchNorm of a readout": (normed, lambda: nn.BatchNorm1d(6)),
    "cumulative BatchNorm of a readout": (normed, lambda: gnn.BatchNorm(6, momentum=None)),
    "InstanceNorm of a readout": (normed, lambda: gnn.InstanceNorm(6, track_running_stats=True)),
    "GraphSizeNorm of a readout": (normed, gnn.GraphSizeNorm),
    "DiffGroupNorm of a readout": (normed, lambda: gnn.DiffGroupNorm(6, 2)),
    "BatchNorm of nodes and of a parameter": (both, lambda: nn.BatchNorm1d(6)),
    "a head": (lambda m, h, b: m.head(gnn.global_add_pool(h, b))[b], None),
    "embedding by batch": (lambda m, h, b: F.embedding(b, gnn.global_mean_pool(h, b)), None),
    "gather by batch": (lambda m, h, b: gnn.global_mean_pool(h, b).gather(0, b[:, None].expand(-1, 6)), None),
    "scatter by batch": (lambda m, h, b: h.new_zeros(3, 6).scatter_add_(0, b[:, None].expand(-1, 6), h)[b], None),
    "a table with more rows than graphs": (lambda m, h, b: h * m.kinds[b], None),
    "several views": (views, None),
    "a flat view": (flat, None),
    "sums over ranks": (summed, None),
}


@pytest.mark.parametrize(("name", "where"), one_each(EXACT, [(3, "empty part"), (3, "random"), (1, "random")]))
def test_it_equals_the_whole_graph(name, where):
    ranks, owned = where
    after, norm = EXACT[name]
    torch.manual_seed(0)
    model = Net(after, norm and norm()).double()
    owners = {owned: owners_of(MANY, ranks)[owned]}
    assert_exact(model, MANY, called, wrapped, ranks=ranks, modes=("sar",), owners=owners)


JOINED = r"BatchNorm1d over own rows joined with \d rows that every rank has"
NO_SUM = r"`{}` makes no sum of the nodes.*use a readout over graph\.batch"
ALIKE = "every rank has this tensor .* alike"
REFUSED = {
    "a parameter beside nodes": (lambda m, h, b: m.norm(torch.cat([h, m.kinds]))[:-4], JOINED),
    "constants beside nodes": (lambda m, h, b: m.norm(torch.cat([h, h.new_zeros(2, 6)]) * 2)[:-2], JOINED),
    "a readout beside nodes": (lambda m, h, b: m.norm(torch.cat([gnn.global_mean_pool(h, b), h]))[3:], JOINED),
    "a mean": (lambda m, h, b: h - m.total(h.mean(0)), NO_SUM.format("mean")),
    "a maximum": (lambda m, h, b: h - m.total(h.amax(0)), NO_SUM.format("amax")),
    "a norm": (lambda m, h, b: h / m.total(h.norm()), NO_SUM.format("linalg_vector_norm")),
    "a root of a sum": (lambda m, h, b: h / m.total(h.square().sum(0).sqrt()), NO_SUM.format("sqrt")),
    "a root of one sum": (lambda m, h, b: h / m.total(h.square().sum().sqrt()), NO_SUM.format("sqrt")),
    "a logarithm of one sum": (lambda m, h, b: h / m.total(h.exp().sum().log()), NO_SUM.format("log")),
    "a reciprocal of one sum": (lambda m, h, b: h / m.total(1 / h.exp().sum()), NO_SUM.format("reciprocal")),
    "an exponential of one sum": (lambda m, h, b: h / m.total((h.sum() / 41).exp()), NO_SUM.format("exp")),
    "a positive part of a sum": (lambda m, h, b: h / m.total(h.sum().relu()), NO_SUM.format("relu")),
    "a size of a sum": (lambda m, h, b: h / m.total(h.sum().abs()), NO_SUM.format("abs")),
    "a threshold out of reach": (
        lambda m, h, b: h / m.total(F.hardtanh(h.sum(0), -50.0, 50.0)),
        NO_SUM.format("hardtanh"),
    ),
    "a constant added to a sum": (lambda m, h, b: h / m.total(h.sum(0) + 1e-6), NO_SUM.format("add")),
    "a sum of a softmax": (lambda m, h, b: h / m.total(h.softmax(0).sum(0)), NO_SUM.format("softmax")),
    "rows": (lambda m, h, b: h + m.total(h), "has a row for each of the nodes"),
    "a parameter": (lambda m, h, b: h * m.total(m.kinds[0]), ALIKE),
    "a sum twice": (lambda m, h, b: h * m.total(m.total(h.sum(0))), ALIKE),
    "nodes by batch": (lambda m, h, b: h + h[b], "expected a row for each graph"),
    "written by batch": (
        lambda m, h, b: h + h.new_zeros(3, 6).index_put_((b,), h, accumulate=True).sum(0),
        "`index_put_` on the batch of a sharded graph needs all nodes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_for_its_reason(name):
    after, words = REFUSED[name]

    def work(comm):
        graph = shard_in_memory(MANY, torch.arange(41) % 5 // 2, comm)
        wrapped(Net(after, nn.BatchNorm1d(6)).double(), comm)(graph.x, graph, graph.batch)

    with pytest.raises(RefusedError) as caught:
        run(work, 3)
    text, (lines, first) = str(caught.value), inspect.getsourcelines(after)
    places = [*range(first, first + len(lines)), inspect.getsourcelines(Net.total)[1] + 1]
    line = re.search(r"test_pyg_every_rank\.py:(\d+): ", text)
    assert line and int(line[1]) in places, text
    assert re.search(words, text), text


class OfSources(gnn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, size_j):
        return x_j / size_j


class OfSize(OfSources):
    def message(self, x_j, size):
        return x_j / size[0]


@pytest.mark.parametrize("kind", [OfSources, OfSize])
@on_ranks(3)
def test_the_number_of_sources_is_refused_in_a_message(comm, kind):
    with pytest.raises(RefusedError, match=r"every_rank\.py:\d+: .*size.*are the number of source nodes"):
        graph = shard_in_memory(GRAPH, torch.arange(41) % 3, comm)
        sp.pyg.wrap(kind().double(), comm)(graph.x, graph)
