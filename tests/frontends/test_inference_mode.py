"""A script that first reads a graph, or calls a model, in ``torch.inference_mode``, and trains afterwards."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.utils import add_remaining_self_loops

import shardpass as sp
from shardpass.testing import run

from .device_callers import GIVEN, data, trained
from .how_much import ONE_OR_THREE
from .on_ranks import on_ranks


class OfFields(nn.Module):
    """Reads the fields of `data`, and writes into a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.GCNConv(6, 3)

    def forward(self, data):
        x = data.x * 1
        x.mul_(2)
        return self.conv(x, data.edge_index, data.edge_weight).relu_() * data.train_mask[:, None]


class Pooled(nn.Module):
    """A norm and readouts by ``graph.batch``."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = gnn.GCNConv(6, 8), gnn.GraphNorm(8), nn.Linear(8, 3)

    def forward(self, x, edges, batch):
        h = self.norm(self.conv(x, edges), batch)
        return self.last(h + gnn.global_mean_pool(h, batch)[batch] + gnn.global_max_pool(h, batch)[batch])


_LOCK = threading.Lock()


def made(make):
    """A model, the same on all ranks, which are threads and share a generator."""
    with _LOCK:
        torch.manual_seed(0)
        return make().double()


def plain(graph):
    return graph.x, graph


PYG = {
    "GCN": (lambda: gnn.GCN(6, 8, 2, 3), plain),
    "GAT": (lambda: gnn.GAT(6, 8, 2, 3, heads=2), plain),
    "GAT v2 of computed rows": (lambda: gnn.GAT(6, 8, 2, 3, v2=True), lambda g: (g.x * 2, g)),
    "GraphSAGE max": (lambda: gnn.GraphSAGE(6, 8, 2, 3, aggr="max"), plain),
    "GIN with BatchNorm": (lambda: gnn.GIN(6, 8, 2, 3, norm="batch_norm"), plain),
    "EdgeCNN": (lambda: gnn.EdgeCNN(6, 8, 2, 3), plain),
    "TransformerConv": (lambda: gnn.TransformerConv(6, 3), plain),
    "GENConv": (lambda: gnn.GENConv(6, 3, aggr="softmax", learn_t=True), plain),
    "fields": (OfFields, lambda g: (g,)),
    "batch": (Pooled, lambda g: (g.x, g, g.batch)),
    **{name: GIVEN[name] for name in ("weights, a copy", "edges, columns", "types of edges, a copy", "integers")},
}


def after(comm, store, wrap, make, given, mode):
    """What training gives after the model has been called in a mode, which reads what it needs."""
    graph = sp.load(store, comm)
    model = wrap(made(make), comm)
    with mode():
        model.eval()
        before = model(*given(graph))
        assert not torch.is_grad_enabled()
    steps = [trained(model.train(), comm, graph, *given(graph)) for _ in range(2)]
    return [before, *steps[0], *steps[1]]


def same(comm, store, wrap, models):
    """The models that train otherwise after `inference_mode` than after `no_grad`."""
    found = []
    for name, (make, given) in models.items():
        right, mine = (after(comm, store, wrap, make, given, m) for m in (torch.no_grad, torch.inference_mode))
        if not all(torch.equal(one, other) for one, other in zip(right, mine, strict=True)):
            found.append(name)
    return found


@pytest.fixture
def store(tmp_path):
    sp.partition(data(), tmp_path / "store", 3, "random")
    return str(tmp_path / "store")


SOME = ("GAT", "fields", "batch", "edges, columns")
OTHERS = tuple(name for name in PYG if name not in SOME)


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, OTHERS), (3, SOME), *(pytest.param(n, PYG, marks=pytest.mark.long) for n in (1, 3))]
)
def test_models_of_pyg(store, ranks, names):
    assert run(same, ranks, args=(store, sp.pyg.wrap, {name: PYG[name] for name in names})) == [[]] * ranks


def test_recomputed_activations(store):
    wrap = partial(sp.pyg.wrap, checkpoint="activations")
    assert run(same, 3, args=(store, wrap, {"GAT": PYG["GAT"]})) == [[]] * 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_models_of_dgl(store, ranks):
    pytest.importorskip("dgl")
    import dgl.nn.pytorch as dgl_nn

    from .device_callers_dgl import Weighted

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = dgl_nn.EdgeWeightNorm("both")
            self.conv = dgl_nn.GraphConv(6, 3, norm="none", allow_zero_in_degree=True)

        def forward(self, g, x, weight):
            return self.conv(g, x, edge_weight=self.norm(g, weight))

    def given(graph):
        return graph, graph.x

    models = {
        "GraphConv": (lambda: dgl_nn.GraphConv(6, 3, allow_zero_in_degree=True), given),
        "GATConv": (lambda: dgl_nn.GATConv(6, 3, 2, allow_zero_in_degree=True), given),
        "GATv2Conv": (lambda: dgl_nn.GATv2Conv(6, 3, 2, allow_zero_in_degree=True), given),
        "SAGEConv": (lambda: dgl_nn.SAGEConv(6, 3, "pool"), lambda graph: (sp.dgl.graph(graph), graph.x)),
        "frames": (lambda: Weighted(lambda g: g.edata["edge_weight"] * 2), given),
        "weights": (Normed, lambda graph: (*given(graph), graph.edge_weight)),
    }
    some = ("GATConv", "frames", "weights")
    models = {name: models[name] for name in models if (name in some) == (ranks == 3)}
    assert run(same, ranks, args=(store, sp.dgl.wrap, models)) == [[]] * ranks


@on_ranks(1, 3)
def test_what_a_graph_gives_is_ordinary(comm, store):
    with torch.inference_mode():
        graph = sp.load(store, comm)
        fields = [graph[name] for name in ("x", "y", "kind", "train_mask", "edge_weight", "edge_type")]
        rest = [graph.node_ids, graph.edge_ids, graph.batch.plain, graph.edge_index.plain]
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert (graph.x * 2).is_inference()
    assert [tensor.is_inference() for tensor in (*fields, *rest)] == [False] * 10


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
def test_what_else_is_first_done_in_inference_mode(store, ranks, tmp_path):
    def case(comm, mode):
        graph = sp.load(store, comm)
        model = sp.pyg.wrap(made(lambda: gnn.SAGEConv(6, 3)), comm)
        ids, path = torch.tensor([3, 1, 4]), tmp_path / f"{mode.__name__}.npy"
        with mode():
            edges = graph.layers(graph.train_mask, 1)
            out = model(graph.x, *edges)
            fetched, pairs = sp.rows(graph, out, ids), sp.node_ids(graph, ids)
            scores = sp.accuracy(out, graph.y, graph.train_mask, comm), sp.f1(out, graph.y, None, comm)
            loader = sp.pyg.NeighborLoader(graph, [3, 2], graph.train_mask, batch_size=8)
            batches = [batch.x.sum() for batch in loader]
            loops = add_remaining_self_loops(graph.edge_index, graph.edge_weight, num_nodes=graph.num_own_nodes)
            sp.infer(model, graph, path)
        loss = sp.sum(model(graph.x, *edges), graph.train_mask, comm)
        out = model(graph.x, graph)
        loss = loss + sp.replicated(out[pairs].sum() + sp.rows(graph, out, ids).sum(), comm)
        loss.backward()
        found = [fetched, *batches, loops[1], loss, *(p.grad for p in model.parameters()), *map(torch.tensor, scores)]
        return [one.detach().clone() for one in found], torch.from_numpy(np.load(path).copy())

    modes = torch.no_grad, torch.inference_mode
    for (right, rows), (mine, others) in zip(*(run(case, ranks, args=(mode,)) for mode in modes)):
        assert torch.equal(rows, others)
        assert all(torch.equal(one, other) for one, other in zip(right, mine, strict=True))


def test_a_script_that_is_all_in_inference_mode(store):
    """Its model is made there too, with running statistics; the model writes into what it is given."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nn.BatchNorm1d(6), gnn.GCNConv(6, 3)

        def forward(self, x, edges):
            return self.conv(self.norm(torch.relu_(x)), edges)

    def case(comm, mode):
        graph = sp.load(store, comm)
        with mode():
            x, model = graph.x * 2, sp.pyg.wrap(made(Writes), comm)
            outs = [model(x, graph) for _ in range(3)]
        return [one.clone() for one in (*outs, x, *model.buffers())]

    modes = torch.no_grad, torch.inference_mode
    for right, mine in zip(*(run(case, 3, args=(mode,)) for mode in modes)):
        assert all(torch.equal(one, other) for one, other in zip(right, mine, strict=True))
