"""Whole models by way of Triton's kernels, interpreted: the path that tensors of a GPU take, proven without one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.testing import WholeGraph, assert_exact, assignments

from .how_much import one_each

NUM_NODES = 13


def small_graph():
    """Self-loops, edges twice, a hub, an isolated node; few rows, since the interpreter takes milliseconds for each."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, NUM_NODES - 1, (2, 50), generator=generator)
    ends[1, :15], ends[:, 15:18], ends[:, 18:20] = 2, torch.arange(3), ends[:, 20:22]
    x = torch.randn(NUM_NODES, 4, generator=generator, dtype=torch.float64)
    weights = torch.rand(50, generator=generator, dtype=torch.float64)
    return WholeGraph(NUM_NODES, ends, {"x": x}, {"edge_weight": weights})


class GAT(nn.Module):
    """Two layers of attention in closed form."""

    def __init__(self):
        super().__init__()
        self.first, self.second = gnn.GATConv(4, 3, heads=2), gnn.GATv2Conv(6, 5)

    def forward(self, x, edge_index, edge_weight):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Others(nn.Module):
    """Sums of plain and weighted copies, max, the gradients of weights, and scores that the body computes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = gnn.SAGEConv(4, 6, aggr=["sum", "max"]), gnn.GCNConv(6, 4)
        self.third = gnn.TransformerConv(4, 3, heads=2, edge_dim=1)

    def forward(self, x, edge_index, edge_weight):
        x = self.second(self.first(x, edge_index).relu(), edge_index, edge_weight)
        return self.third(x, edge_index, edge_weight.view(-1, 1))


OPTIONS = {
    "push": sp.Options(backward="push"),
    "pull": sp.Options(backward="pull"),
    "keep": sp.Options(mode="keep", block_rows=3),
}


@pytest.mark.parametrize(("options", "made"), one_each(OPTIONS, [GAT, Others]))
def test_models_equal_the_whole_graph(triton_device, made, options):
    if triton_device.type == "cuda":
        pytest.skip("ranks that are threads have tensors on the CPU")
    torch.manual_seed(0)
    model, graph = made().double(), small_graph()

    def call(model, inputs, graph):
        where = graph if isinstance(graph, torch.Tensor) else graph.edge_index
        return model(inputs["x"], where, inputs["edge_weight"])

    owners = {"random": assignments(NUM_NODES, 2, graph.edge_index)["random"]}
    chosen = OPTIONS[options]
    assert_exact(model, graph, call, sp.pyg.wrap, ranks=2, modes=(chosen.mode,), owners=owners, options=chosen)
