"""Every layer of DGL trains for six epochs on features that do not change as plain DGL does: the engine keeps sums."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("dgl")

import shardpass as sp
from shardpass.testing.graphs import assignments, shard_in_memory
from shardpass.testing.run import run

from .dgl_cases import CONVS, graph_of
from .dgl_parity import dgl_graph, float64  # noqa: F401
from .how_much import some_by_default
from .six_epochs import trained

# PNAConv has standard deviations, which amplify rounding: plain DGL with parameters 1e-15 apart differs by 6e-7.
QUICK = ("GraphConv both", "SAGEConv mean", "GATConv", "EdgeGATConv", "RelGraphConv", "TAGConv weighted")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", some_by_default(CONVS, *QUICK))
def test_six_epochs_are_those_of_the_plain_layer(name, ranks):
    (make, call), whole = CONVS[name], graph_of(name)
    torch.manual_seed(0)
    plain = make().double()
    if not list(plain.parameters()):
        pytest.skip("nothing to train")

    def on_graph(model, inputs, g):
        return call(model, g, inputs)

    g = dgl_graph(whole.edge_index, whole.num_nodes)
    expected = trained(copy.deepcopy(plain), on_graph, {**whole.node, **whole.edge}, g)
    owners = assignments(whole.num_nodes, ranks, whole.edge_index)["random"]

    def work(comm):
        graph = shard_in_memory(whole, owners, comm)
        model, inputs = sp.dgl.wrap(copy.deepcopy(plain), comm), {**dict(graph.node), **dict(graph.edge)}
        return trained(model, on_graph, inputs, sp.dgl.graph(graph), lambda: sp.sync_gradients(model, comm))

    found = torch.stack(run(work, ranks)).sum(0)
    bound = 1e-7 if name.startswith("PNAConv") else 1e-9
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
