"""Training on real graphs of several types: the loss curve is that of plain PyG in one process, to rounding."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.data import EdgeArrays, read
from shardpass.testing import run

DATA = Path(__file__).parents[3] / "shared" / "data"
LABELLED = {"acm_hetero": "paper", "dblp_hetero": "author"}
EPOCHS, WIDTH = 20, 32


class WithSelf(torch.nn.Module):
    """HAN is made for paths from a type to itself; on single relations a node's own row must be added."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x_dict, edge_index_dict):
        return {kind: rows + x_dict[kind] for kind, rows in self.layer(x_dict, edge_index_dict).items()}


LAYERS = {
    "sage": lambda types: gnn.HeteroConv({kind: gnn.SAGEConv((WIDTH, WIDTH), WIDTH) for kind in types[1]}),
    "hgt": lambda types: gnn.HGTConv(WIDTH, WIDTH, types, heads=4),
    "han": lambda types: WithSelf(gnn.HANConv(WIDTH, WIDTH, types, heads=4)),
}


class Model(torch.nn.Module):
    """Two layers between linear ones; what R-GCN is with a layer per relation."""

    def __init__(self, layer, widths, types, classes, labelled):
        super().__init__()
        self.inputs, self.outputs = gnn.HeteroDictLinear(widths, WIDTH), gnn.Linear(WIDTH, classes)
        self.first, self.second = LAYERS[layer](types), LAYERS[layer](types)
        self.labelled = labelled

    def forward(self, x_dict, edge_index_dict):
        hidden = self.inputs(x_dict)
        for layer in (self.first, self.second):
            hidden = layer({kind: x.relu() for kind, x in hidden.items()}, edge_index_dict)
        return self.outputs(hidden[self.labelled].relu())


def whole_graph(name):
    """The graph with edges in both directions; features in float64, one-hot where a type has none."""
    raw = read(DATA / f"{name}.npz").validate()
    back = {(d, f"rev_{r}", s): EdgeArrays(ends.dst, ends.src) for (s, r, d), ends in raw.edges.items()}
    nodes = {}
    for kind, fields in raw.node_fields.items():
        x = fields["x"] if "x" in fields else torch.eye(raw.num_nodes[kind])
        x = x if isinstance(x, torch.Tensor) else x.to_dense()
        nodes[kind] = {**fields, "x": x.double()}
    return replace(raw, edges={**raw.edges, **back}, node_fields=nodes, edge_fields={})


def steps(model, forward, loss_of, sync=None):
    """The loss of each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    losses = []
    for _ in range(EPOCHS):
        loss = loss_of(forward())
        optimizer.zero_grad()
        loss.backward()
        if sync is not None:
            sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_plain(model, graph, labelled):
    """``(losses, test accuracy)`` of PyG in one process."""
    x_dict = {kind: fields["x"] for kind, fields in graph.node_fields.items()}
    edges = {kind: torch.stack([ends.src.long(), ends.dst.long()]) for kind, ends in graph.edges.items()}
    own = graph.node_fields[labelled]
    y, train, test = own["y"].long(), own["train_mask"], own["test_mask"]
    losses = steps(model, lambda: model(x_dict, edges), lambda out: F.cross_entropy(out[train], y[train]))
    with torch.no_grad():
        right = model(x_dict, edges)[test].argmax(1) == y[test]
    return losses, float(right.double().mean())


def train_sharded(model, store, ranks, labelled):
    """The same on several ranks."""

    def work(comm):
        graph = sp.load(store, comm)
        own, mine = graph[labelled], sp.pyg.wrap(copy.deepcopy(model), comm)
        losses = steps(
            mine,
            lambda: mine(graph.x_dict, graph),
            lambda out: sp.cross_entropy(out, own.y, own.train_mask, comm),
            lambda: sp.sync_gradients(mine, comm),
        )
        with torch.no_grad():
            return losses, sp.accuracy(mine(graph.x_dict, graph), own.y, own.test_mask, comm)

    return run(work, ranks, timeout=480.0)[0]


@pytest.fixture(scope="module", params=LABELLED)
def real(request, tmp_path_factory):
    if not (DATA / f"{request.param}.npz").is_file():
        pytest.skip("the real graphs are not beside this checkout")
    graph = whole_graph(request.param)
    store = tmp_path_factory.mktemp("store") / "parts"
    sp.partition(graph, store, 4, "random")
    return request.param, graph, store


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_loss_curve_is_that_of_plain_pyg(real, layer):
    name, graph, store = real
    labelled = LABELLED[name]
    widths = {kind: fields["x"].size(1) for kind, fields in graph.node_fields.items()}
    classes = int(graph.node_fields[labelled]["y"].max()) + 1
    torch.manual_seed(0)
    model = Model(layer, widths, (list(widths), list(graph.edges)), classes, labelled).double()
    expected, accuracy = train_plain(copy.deepcopy(model), graph, labelled)
    assert expected[-1] < expected[0]
    for ranks in (1, 4):
        losses, found = train_sharded(model, store, ranks, labelled)
        error = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"{name} {layer} {ranks} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}, error {error:.1e}; ", end="")
        print(f"test accuracy {found:.4f}, plain {accuracy:.4f}")
        assert error < 1e-9
        assert found == pytest.approx(accuracy, abs=1e-3)
