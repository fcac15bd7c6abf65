"""Parts of a wrapped model that are called by themselves, as ``model.encoder(graph, x)`` is."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.nn.pytorch as dnn
import torch_geometric.nn as gnn
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardpass as sp
from shardpass.testing import run

from .dgl_parity import float64  # noqa: F401
from .how_much import one_each
from .on_ranks import RANKS, assert_refused, assert_rows, on_ranks
from .test_dgl_silent import GRAPH, N, share


class Encoder(nn.Module):
    """A part of a model. `mixes` decides whether it puts rows together."""

    def __init__(self, kind, mixes):
        super().__init__()
        self.conv, self.mixes = kind, mixes

    def forward(self, first, second):
        h = self.conv(first, second)
        return h - h.mean(0) if self.mixes else h

    def embed(self, first, second):
        return self(first, second) * 2


class Whole(nn.Module):
    def __init__(self, enc):
        super().__init__()
        self.enc, self.lin = enc, nn.Linear(4, 2)

    def forward(self, first, second):
        return self.lin(self.enc(first, second))


PARTS = {
    "dgl": (lambda: dnn.GraphConv(5, 4), lambda enc, graph: enc(sp.dgl.graph(graph), graph.node["x"])),
    "dgl, loaded": (lambda: dnn.GraphConv(5, 4), lambda enc, graph: enc(graph, graph.node["x"])),
    "dgl, method": (lambda: dnn.GraphConv(5, 4), lambda enc, graph: enc.embed(graph, graph.node["x"])),
    "pyg": (lambda: gnn.GraphConv(5, 4), lambda enc, graph: enc(graph.x, graph.edge_index)),
    "pyg, loaded": (lambda: gnn.GraphConv(5, 4), lambda enc, graph: enc(graph.x, graph)),
    "pyg, method": (lambda: gnn.GraphConv(5, 4), lambda enc, graph: enc.embed(graph.x, graph)),
}


def part(name, mixes):
    """What a rank does: a part of a wrapped model, called by itself with a sharded graph; and a plain model."""
    torch.manual_seed(0)
    model = Whole(Encoder(PARTS[name][0](), mixes)).double()

    def work(comm):
        graph, wrap = share(comm), sp.dgl.wrap if name.startswith("dgl") else sp.pyg.wrap
        return graph.node_ids, PARTS[name][1](wrap(copy.deepcopy(model), comm).enc, graph)

    return model, work


@pytest.mark.parametrize(("name", "ranks"), one_each(PARTS, (1, 4)))
def test_a_part_of_a_model_is_followed_as_the_model_is(name, ranks):
    assert_refused(part(name, True)[1], "h - h.mean(0)", "`mean` puts rows together", ranks=(ranks,))


@pytest.mark.parametrize(("name", "ranks"), one_each(PARTS, (4, 1)))
def test_a_part_of_a_model_is_exact(name, ranks):
    model, work = part(name, False)
    g, x = dgl.graph(tuple(GRAPH.edge_index), num_nodes=N), GRAPH.node["x"]
    expected = model.enc(g, x) if name.startswith("dgl") else model.enc(x, GRAPH.edge_index)
    assert_rows(work, expected * (2 if "method" in name else 1), ranks=(ranks,))


class Recomputed(Whole):
    def forward(self, first, second):
        return self.lin(checkpoint(self.enc, first, second, use_reentrant=False))


@pytest.mark.parametrize("name", ["dgl", "pyg"])
def test_a_part_that_backward_computes_again_is_no_forward(name):
    torch.manual_seed(0)
    model, x = Recomputed(Encoder(PARTS[name][0](), False)).double(), GRAPH.node["x"]
    g = dgl.graph(tuple(GRAPH.edge_index), num_nodes=N)
    (model(g, x) if name == "dgl" else model(x, GRAPH.edge_index)).square().sum().backward()

    def work(comm):
        graph, mine = share(comm), copy.deepcopy(model)
        mine.zero_grad()
        (sp.dgl if name == "dgl" else sp.pyg).wrap(mine, comm)
        for _ in range(3):  # the last one is not followed
            mine.zero_grad()
            out = mine(graph, graph.node["x"]) if name == "dgl" else mine(graph.x, graph)
            out.square().sum().backward()
        return [parameter.grad for parameter in mine.parameters()]

    for ranks in RANKS:
        for parameter, *parts in zip(model.parameters(), *run(work, ranks)):
            for part in parts:
                torch.testing.assert_close(part, parameter.grad, rtol=0, atol=1e-10)


@on_ranks(3)
def test_copies_of_a_model_have_parts_of_their_own(comm):
    graph = share(comm)
    model = sp.pyg.wrap(Whole(Encoder(gnn.GraphConv(5, 4), False)), comm)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other.enc(graph.x, graph).any() and not other(graph.x, graph).any()
    assert model.enc(graph.x, graph).any() and torch.equal(model.enc(graph.x, graph), model.enc(graph.x, graph))
