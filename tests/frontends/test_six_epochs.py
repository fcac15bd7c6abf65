"""Every layer trains for six epochs on features that do not change as plain PyG and DGL do: the engine keeps sums."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.testing import assignments, run, shard_in_memory

from .conv_cases import CONVS, edges
from .how_much import ONE_OR_THREE, some_by_default
from .pyg_cases import GRAPH
from .six_epochs import trained

RELATIONS = torch.arange(GRAPH.edge_index.size(1)) % 4
LAYERS = {
    **CONVS,
    "RGCNConv, sums per relation": (
        lambda: gnn.RGCNConv(5, 6, 4),
        lambda model, inputs, graph: model(inputs["x"], graph, edges(RELATIONS, graph)),
    ),
}


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
@pytest.mark.parametrize(
    "name", some_by_default(LAYERS, "RGCNConv, sums per relation", "GCNConv", "SAGEConv", "GATConv attention weights")
)
def test_six_epochs_are_those_of_the_plain_layer(name, ranks):
    make, call = LAYERS[name]
    torch.manual_seed(0)
    plain = make().double()
    if not list(plain.parameters()):
        pytest.skip("nothing to train")
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in plain.parameters()):
        with torch.no_grad():
            call(plain, {**GRAPH.node, **GRAPH.edge}, GRAPH.edge_index)
    whole = copy.deepcopy(plain)
    expected = trained(whole, call, {**GRAPH.node, **GRAPH.edge}, GRAPH.edge_index)
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"]

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        inputs = {**dict(graph.node), **dict(graph.edge)}
        return trained(model, call, inputs, graph, lambda: sp.sync_gradients(model, comm))

    found = torch.stack(run(work, ranks)).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
