"""Sparse matrices: stored as edges and their weights, which no layer loses; refused as arguments of a model."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import coalesce, to_torch_csr_tensor

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assignments, run, shard_in_memory

from .pyg_cases import GRAPH

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")

EDGES = coalesce(GRAPH.edge_index)
WEIGHTS = torch.rand(EDGES.size(1), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
X = GRAPH.node["x"]
ADJ = to_torch_csr_tensor(EDGES.flip(0), WEIGHTS, size=41)
LINE = r"test_pyg_adjacency\.py:\d+: "


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A graph that was given as `adj_t`, in four parts."""
    data = ToSparseTensor()(Data(x=X, edge_index=EDGES, edge_weight=WEIGHTS))
    assert "edge_index" not in data and "edge_weight" not in data
    path = tmp_path_factory.mktemp("adjacency") / "parts"
    sp.partition(data, path, parts=4, method="random")
    return path


class GCN2(nn.Module):
    """PyG's example of GCN2Conv on Cora, which is called with `adj_t`, and reads the weights in it unasked."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 6)
        self.convs = nn.ModuleList(gnn.GCN2Conv(6, 0.1, 0.5, layer, normalize=False) for layer in (1, 2))

    def forward(self, x, adj_t, edge_weight=None):
        x = x_0 = self.lin(x).relu()
        for conv in self.convs:
            x = conv(x, x_0, adj_t, edge_weight) if edge_weight is not None else conv(x, x_0, adj_t)
        return x


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_weights_of_a_matrix_are_stored_and_not_lost(parts, ranks):
    torch.manual_seed(0)
    model = GCN2().double()
    right = model(X, ADJ)
    right.square().sum().backward()
    state = model.state_dict()

    def work(comm):
        graph, mine = sp.load(parts, comm), GCN2().double()
        mine.load_state_dict(state)
        sp.pyg.wrap(mine, comm)
        words = r"conv\(x, x_0, adj_t\): GCN2Conv \(convs\.0\) is called without.*pass edge_weight=graph\.edge_weight"
        with pytest.raises(RefusedError, match=words):
            mine(graph.x, graph)
        out = mine(graph.x, graph, graph.edge_weight)
        out.square().sum().backward()
        sp.sync_gradients(mine, comm)
        torch.testing.assert_close(out, right[graph.node_ids], rtol=0, atol=1e-10)
        torch.testing.assert_close(mine.lin.weight.grad, model.lin.weight.grad, rtol=0, atol=1e-10)

    run(work, ranks)


WITHOUT = {
    "GCN": (lambda: gnn.GCN(5, 8, 2, 3), "GCNConv .*pass edge_weight=graph.edge_weight"),
    "GraphConv": (lambda: gnn.GraphConv(5, 3), "pass edge_weight=graph.edge_weight"),
    "GraphSAGE": (lambda: gnn.GraphSAGE(5, 8, 2, 3), "takes no weights, so use a layer that does"),
    "GIN": (lambda: gnn.GINConv(nn.Linear(5, 3)), "takes no weights, so use a layer that does"),
    "GAT": (lambda: gnn.GAT(5, 8, 2, 3), None),  # reads no weights of a matrix
}


@pytest.mark.parametrize("name", WITHOUT)
def test_layers_that_would_read_the_weights_of_a_matrix_are_told_how(parts, name):
    make, words = WITHOUT[name]

    def work(comm):
        graph, model = sp.load(parts, comm), sp.pyg.wrap(make().double(), comm)
        if words is None:
            return model(graph.x, graph)
        with pytest.raises(RefusedError, match=words):
            model(graph.x, graph)
        with pytest.raises(AttributeError, match=r"Pass the graph where adj_t went, .*edge_weight=graph\.edge_weight"):
            _ = graph.adj_t

    run(work, 2)


def test_a_graph_without_the_values_takes_any_layer(tmp_path):
    data = sp.data.read(Data(x=X, adj_t=ADJ), drop=["edge_weight"])
    sp.partition(data, tmp_path / "parts", parts=2, method="random")
    whole = gnn.GraphSAGE(5, 8, 2, 3).double()

    def work(comm):
        graph, model = sp.load(tmp_path / "parts", comm), gnn.GraphSAGE(5, 8, 2, 3).double()
        model.load_state_dict(whole.state_dict())
        out = sp.pyg.wrap(model, comm)(graph.x, graph)
        torch.testing.assert_close(out, whole(X, EDGES)[graph.node_ids], rtol=0, atol=1e-10)

    run(work, 2)


class Multiplies(nn.Module):
    """Multiplies by a matrix that it keeps, or is given."""

    def __init__(self, adj=None, buffer=False):
        super().__init__()
        self.lin = nn.Linear(5, 3)
        if buffer:
            self.register_buffer("adj", adj)
        else:
            self.adj = adj

    def forward(self, x, adj):
        return torch.sparse.mm(self.adj if self.adj is not None else adj, self.lin(x))


SPARSE = {
    "CSR in place of the graph": (Multiplies, lambda m, g: m(g.x, ADJ), r"`adj` is a sparse matrix \(sparse_csr\)"),
    "COO in place of the graph": (
        lambda: gnn.GCN(5, 8, 2, 3),
        lambda m, g: m(g.x, ADJ.to_sparse_coo()),
        r"`edge_index` is a sparse matrix \(sparse_coo\), .*data\.adj_t: it becomes the edges, .*SimpleConv\('sum'\)",
    ),
    "by name": (lambda: gnn.GCN(5, 8, 2, 3), lambda m, g: m(g.x, edge_index=ADJ), "`edge_index` is a sparse matrix"),
    "kept": (lambda: Multiplies(ADJ), lambda m, g: m(g.x, g), r"keeps 'adj', a sparse matrix .*SimpleConv\('sum'\)"),
    "kept as a buffer": (lambda: Multiplies(ADJ, True), lambda m, g: m(g.x, g), "keeps 'adj', a sparse matrix"),
    "features, COO": (
        lambda: gnn.GCN(5, 8, 2, 3),
        lambda m, g: m(g.x.to_sparse(), g),
        r"`x` is sparse \(sparse_coo\), .*pass x\.to_dense\(\)",
    ),
    "features, CSR": (lambda: gnn.GCN(5, 8, 2, 3), lambda m, g: m(g.x.to_sparse_csr(), g), r"`x` is sparse"),
    "weights": (
        lambda: gnn.GCN(5, 8, 2, 3),
        lambda m, g: m(g.x, g, g.edge_weight.to_sparse()),
        "`edge_weight` is sparse",
    ),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", SPARSE)
def test_a_model_that_is_called_with_a_sparse_tensor_is_told_what_to_pass(name, ranks):
    make, call, words = SPARSE[name]
    owners = assignments(41, ranks, GRAPH.edge_index)["random"]

    def work(comm):
        call(sp.pyg.wrap(make().double(), comm), shard_in_memory(GRAPH, owners, comm))

    with pytest.raises(RefusedError) as caught:
        run(work, ranks)
    assert re.search(words, str(caught.value)), caught.value
    assert "kept" in name or re.match(r".*" + LINE, str(caught.value)), caught.value
