"""A user's layer that takes means with `torch.scatter_reduce`: exact, by a sum and a count that kernels compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.aggregation import sharded_call
from shardpass.testing import shard_in_memory

from .how_much import SOME_OR_ALL, assert_case_exact
from .pyg_cases import GRAPH


def spread(index, rows):
    return index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)


class MeanConv(gnn.MessagePassing):
    """The mean of transformed neighbours, taken in `aggregate` in one of the ways that torch offers."""

    def __init__(self, kind):
        super().__init__(aggr=None)
        self.kind, self.lin, self.root = kind, nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x), root=self.root(x))

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, root, dim_size):
        rows, into = spread(index, inputs), inputs.new_full((dim_size, 4), 2.0)
        if self.kind == "from messages alone":
            return into.scatter_reduce(0, rows, inputs, "mean", include_self=False)
        if self.kind == "with a constant":
            return torch.scatter_reduce(into, 0, rows, inputs, "mean")
        if self.kind == "in place, last dimension":
            rows = index.expand(4, -1)
            return into.t().clone().scatter_reduce_(-1, rows, inputs.t(), reduce="mean", include_self=False).t()
        if self.kind == "with the node itself":
            return torch.scatter_reduce(root, 0, rows, inputs, "mean", include_self=True)
        return root.clone().scatter_reduce_(0, rows, inputs, reduce="mean", include_self=False)


class CentredConv(gnn.MessagePassing):
    """Messages less the mean of their destination's, squashed: two passes over the edges."""

    def __init__(self, kind):
        super().__init__(aggr="sum")
        self.kind, self.lin, self.root = kind, nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x), root=self.root(x))

    def message(self, x_j, index, size_i, root):
        base = root if "node itself" in self.kind else x_j.new_zeros(size_i, 4)
        mean = base.scatter_reduce(0, spread(index, x_j), x_j, "mean", include_self="node itself" in self.kind)
        return (x_j - mean[index]).tanh() * root[index]  # a rank without nodes has no row to look up


KINDS = {
    "from messages alone": MeanConv,
    "with a constant": MeanConv,
    "in place, last dimension": MeanConv,
    "with the node itself": MeanConv,
    "the node itself where it has no neighbour": MeanConv,
    "in message": CentredConv,
    "in message, with the node itself": CentredConv,
}


def call(model, inputs, graph):
    return model(inputs["x"], graph)


@pytest.mark.parametrize(("ranks", "every_mode"), SOME_OR_ALL)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_whole_graph(kind, ranks, every_mode):
    case, block_rows = (lambda: KINDS[kind](kind), call), 3 if ranks == 3 else None
    assert_case_exact(case, GRAPH, sp.pyg.wrap, ranks, every_mode, chunk_bytes=700, block_rows=block_rows)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind] is MeanConv])
def test_kernels_compute_it(kind, monkeypatch):
    found = []

    def recorded(*args):
        answer = settle(*args)
        found.append(answer[1])
        return answer

    settle = sharded_call.settle
    monkeypatch.setattr(sharded_call, "settle", recorded)
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
    sp.pyg.wrap(MeanConv(kind).double(), comm)(graph.x, graph)
    forms = [reduction.form for structure in found for reduction in structure.reductions]
    assert forms == (["general", "ones"] if "last dimension" in kind else ["copy", "ones"])


def test_means_of_integers_round_down():
    class Rounded(MeanConv):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=(x * 4).long()[:, :4], root=None)

    for kind in ("from messages alone", "with a constant"):
        model = Rounded(kind)
        whole = model(GRAPH.node["x"], GRAPH.edge_index)
        comm = sp.connect("local")
        graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
        found = sp.pyg.wrap(model, comm)(graph.x, graph)
        assert whole.dtype == found.dtype and torch.equal(whole[graph.node_ids], found)
