"""Long edge lists with self-loops added share the shards of the graph; layers on them equal the whole graph."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.sharding import derived
from shardpass.testing import WholeGraph, assert_exact

from .pyg_cases import GRAPH

LAYERS = {
    "GCN": lambda: gnn.GCNConv(5, 4),
    "GAT": lambda: gnn.GATConv(5, 4, heads=2),
    "GAT with edges": lambda: gnn.GATConv(5, 4, heads=2, edge_dim=3, fill_value="mean"),
    "GATv2 with edges": lambda: gnn.GATv2Conv(5, 4, heads=2, edge_dim=3),
    "Cheb": lambda: gnn.ChebConv(5, 4, K=3),
    "PointNet": lambda: gnn.PointNetConv(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)),
}


def call(layer, inputs, edge_index):
    if isinstance(layer, (gnn.GCNConv, gnn.ChebConv)):
        return layer(inputs["x"], edge_index, inputs["edge_weight"])
    if isinstance(layer, gnn.PointNetConv):
        return layer(inputs["x"], inputs["x"][:, :3], edge_index)
    return layer(inputs["x"], edge_index, *([inputs["edge_attr"]] if getattr(layer, "edge_dim", None) else []))


def without_second_loops(has_loops: bool) -> WholeGraph:
    """The graph with at most one self-loop at each node, or with none."""
    src, dst = GRAPH.edge_index
    places = torch.arange(src.numel())
    first = torch.stack([places[(src == s) & (dst == d)].min() for s, d in zip(src, dst)])
    kept = (src != dst) | ((places == first) & has_loops)
    edge = {name: rows[kept] for name, rows in GRAPH.edge.items()}
    return WholeGraph(GRAPH.num_nodes, GRAPH.edge_index[:, kept], GRAPH.node, edge)


GRAPHS = {"doubled loops": GRAPH, "loops": without_second_loops(True), "no loops": without_second_loops(False)}


@pytest.mark.parametrize(
    "graph, backward",
    [
        ("loops", "push"),
        ("no loops", "pull"),
        *(pytest.param(graph, way, marks=pytest.mark.long) for graph in GRAPHS for way in ("pull", "push")),
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_shared_shards_equal_the_whole_graph(name, graph, backward, monkeypatch):
    monkeypatch.setattr(derived, "_LONG", 0)
    torch.manual_seed(0)
    options = sp.Options(backward=backward, chunk_bytes=300)
    for ranks, modes in ((1, ("sar",)), (3, ("sar", "halo"))):
        assert_exact(
            LAYERS[name]().double(), GRAPHS[graph], call, sp.pyg.wrap, ranks=ranks, modes=modes, options=options
        )
