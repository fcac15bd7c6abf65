"""Every layer of DGL trains for six epochs on features that do not change as plain DGL does: the engine keeps sums."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl.nn.pytorch as dnn

import shardpass as sp
from shardpass.testing import (
    WholeHeteroGraph,
    assignments,
    hetero_assignments,
    run,
    shard_hetero_in_memory,
    shard_in_memory,
)

from . import test_dgl_hetero as hetero
from .dgl_cases import CONVS, graph_of
from .dgl_parity import dgl_graph, float64  # noqa: F401
from .how_much import some_by_default
from .six_epochs import trained
from .test_dgl_modules import READOUTS, readout_case

QUICK = ("SAGEConv mean", "GATConv", "RelGraphConv", "TAGConv weighted")
CASES = {**CONVS, **{name: readout_case(name) for name in READOUTS}}
# PNAConv has standard deviations, which amplify rounding: plain DGL with parameters 1e-15 apart differs by 6e-7.
BOUND = {"PNAConv evaluated": 1e-7}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", some_by_default(CASES, *QUICK))
def test_six_epochs_are_those_of_the_plain_layer(name, ranks):
    (make, call), whole = CASES[name], graph_of(name)
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

    assert_alike(run(work, ranks), expected, BOUND.get(name, 1e-9))


TYPED = [name for name, (make, _) in hetero.CASES.items() if isinstance(make(), dnn.HeteroGraphConv)]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", some_by_default(TYPED, "SAGEConv stack"))
def test_six_epochs_are_those_of_the_plain_layer_of_several_types(name, ranks):
    (make, call), whole = hetero.CASES[name], hetero.graph_of(name)
    assert isinstance(whole, WholeHeteroGraph)
    torch.manual_seed(0)
    plain = make().double()
    expected = trained(copy.deepcopy(plain), call, {**whole.node, **whole.edge}, whole.edges)
    owners = hetero_assignments(whole, ranks)["random"]

    def work(comm):
        graph = shard_hetero_in_memory(whole, owners, comm)
        inputs = {kind: graph.fields_of(kind) for kind in graph.node_types}
        inputs |= {kind: relation.fields for kind, relation in graph.relations.items()}
        model = sp.dgl.wrap(copy.deepcopy(plain), comm)
        return trained(model, call, inputs, graph, lambda: sp.sync_gradients(model, comm))

    assert_alike(run(work, ranks), expected, 1e-9)


def assert_alike(parts, expected, bound):
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=bound, atol=bound)
