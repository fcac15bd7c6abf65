"""Backward by pulling equals backward by pushing and the whole graph, moves what the formula says, and is chosen so."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core import aggregate as core_aggregate
from shardpass.testing.graphs import assignments, awkward_graph
from shardpass.testing.parity import differences, evaluate_sharded, evaluate_whole

GRAPH = awkward_graph()
UNCHECKED = partial(sp.pyg.wrap, check=False)
LAYERS = {
    "SAGE": lambda: gnn.SAGEConv(5, 4, project=True),
    "GIN": lambda: gnn.GINConv(torch.nn.Linear(5, 4), train_eps=True),
    "GAT": lambda: gnn.GATConv(5, 4, heads=2),
    "GATv2": lambda: gnn.GATv2Conv(5, 4, heads=2),
    "GATv2 shared": lambda: gnn.GATv2Conv(5, 4, heads=2, share_weights=True),
    "Transformer": lambda: gnn.TransformerConv(5, 4, heads=2),
}


@pytest.fixture
def pulled(monkeypatch):
    """Whether each call pulled, noted as ranks choose."""
    found = []

    def noted(*args):
        found.append(choose(*args))
        return found[-1]

    choose = core_aggregate.choose_pull
    monkeypatch.setattr(core_aggregate, "choose_pull", noted)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_pulling_equals_the_whole_graph(name, ranks, pulled):
    torch.manual_seed(0)
    model = LAYERS[name]().double()
    call = lambda m, inputs, graph: m(inputs["x"], graph)  # noqa: E731
    whole = evaluate_whole(model, GRAPH, call)
    for where, owners in assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).items():
        for mode in ("sar", "keep", "halo"):
            options = sp.Options(mode=mode, backward="pull", chunk_bytes=300, block_rows=3 if ranks == 3 else None)
            sharded = evaluate_sharded(model, GRAPH, call, owners, ranks, UNCHECKED, options, whole)
            wrong = {key: error for key, error in differences(whole, sharded).items() if not error <= 1e-10}
            assert not wrong, f"{where}, {mode}: {wrong}"
    assert pulled and None not in pulled
