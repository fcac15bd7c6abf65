"""`infer` computes what stands between layers block by block: the outputs are exact, and memory holds two layers."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.nn import models

import shardpass as sp
from shardpass.core.inference import journal, row_sources
from shardpass.testing import awkward_graph, awkward_hetero_graph, hetero_assignments, shard_hetero_in_memory

from .how_much import one_each
from .on_ranks import share

GRAPH = awkward_graph(channels=5)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(row_sources, "_BLOCK_BYTES", 100)


class Between(nn.Module):
    """Between its layers stands code that treats rows one by one, and code that does not."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([gnn.SAGEConv(5, 6), gnn.GraphConv(6, 6), gnn.ResGatedGraphConv(6, 6)])
        self.norms = nn.ModuleList([gnn.PairNorm(), gnn.GraphNorm(6), nn.LayerNorm(6)])
        self.skip = nn.Linear(5, 6)

    def forward(self, x, edge_index):
        skip = self.skip(x)
        for conv, norm in zip(self.convs, self.norms):
            x = conv(x, edge_index)
            x = norm(x).view(-1, 2, 3).flatten(1)
            x = torch.relu_(x) + skip
        return x.log_softmax(dim=-1)


class Writes(nn.Module):
    """It writes into rows in ways that cannot be deferred."""

    def __init__(self):
        super().__init__()
        self.first, self.last = gnn.SAGEConv(5, 6), gnn.SAGEConv(6, 3)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        twice = x * 2
        torch.add(x, twice, out=twice)
        x.masked_fill_(x < 0, 0.5)
        return self.last(x + twice, edge_index)


class OverEdges(nn.Module):
    """Rows of edges between its layers, and a number of rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = gnn.GATv2Conv(5, 3, heads=2), gnn.GCNConv(6, 4)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        row, col = edge_index
        scores = (x[row] * x[col]).sum(-1).sigmoid()
        return self.last(x, edge_index, scores) / 2


MODELS = {
    "gcn": lambda: models.GCN(5, 6, 3, 4, norm="batch_norm"),
    "gat": lambda: models.GAT(5, 6, 3, 4, heads=2, jk="cat"),
    "gin": lambda: models.GIN(5, 6, 2, 4, norm="layer_norm", act="elu"),
    "pna": lambda: models.PNA(5, 6, 2, 4, aggregators=["mean", "max", "std"], scalers=["identity"], deg=torch.ones(9)),
    "appnp": lambda: gnn.APPNP(3, 0.1),
    "sg": lambda: gnn.SGConv(5, 4, 2, cached=True),
    "gcn2": lambda: gnn.Sequential(
        "x, e", [(gnn.GCN2Conv(5, 0.1), "x, x, e -> h"), (gnn.GCN2Conv(5, 0.1), "h, x, e -> h")]
    ),
    "max": lambda: models.GraphSAGE(5, 6, 3, 4, aggr="max", jk="lstm"),
    "between": Between,
    "writes": Writes,
    "over edges": OverEdges,
}  # fmt: skip


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double().eval()


@pytest.mark.parametrize(("name", "where"), one_each(MODELS, [(3, "sar"), (1, "keep"), (3, "halo"), (1, "sar")]))
def test_the_outputs_are_those_of_one_process(name, where, tmp_path):
    ranks, mode = where
    path, plain = tmp_path / "rows.npy", built(name)

    def work(comm):
        graph = share(GRAPH, comm, mode=mode)
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        x = graph.x.clone()
        sp.infer(model, graph, path, x, graph)
        assert torch.equal(x, graph.x)
        with torch.no_grad():
            again = model(graph.x, graph)  # which meets what layers have cached
        assert isinstance(again, Tensor)

    sp.spawn(work, ranks)
    with torch.no_grad():
        expected = plain(GRAPH.node["x"], GRAPH.edge_index)
    assert np.abs(np.load(path) - expected.numpy()).max() < 1e-10


def test_types_of_nodes_have_blocks_of_their_own(tmp_path):
    whole = awkward_hetero_graph()
    kinds = list(whole.edges)
    torch.manual_seed(3)

    class Typed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = gnn.HeteroConv({kind: gnn.SAGEConv((5, 5), 6) for kind in kinds})
            self.last = gnn.HeteroConv({kind: gnn.GATv2Conv((6, 6), 3, add_self_loops=False) for kind in kinds})

        def forward(self, x_dict, edge_index_dict):
            x_dict = {kind: x.relu() for kind, x in self.first(x_dict, edge_index_dict).items()}
            return self.last(x_dict, edge_index_dict)

    plain = Typed().double().eval()
    with torch.no_grad():
        expected = plain({kind: fields["x"] for kind, fields in whole.node.items()}, whole.edges)

    def work(comm):
        graph = shard_hetero_in_memory(whole, hetero_assignments(whole, comm.size)["random"], comm)
        sp.infer(sp.pyg.wrap(copy.deepcopy(plain), comm), graph, tmp_path / "rows.npy")

    sp.spawn(work, 2)
    for kind, rows in expected.items():
        assert np.abs(np.load(tmp_path / f"rows.{kind}.npy") - rows.numpy()).max() < 1e-10


@pytest.mark.parametrize(
    "kind", [models.GraphSAGE, *(pytest.param(kind, marks=pytest.mark.long) for kind in (models.GIN, models.GCN))]
)
def test_two_layers_are_in_memory_at_most(kind, tmp_path, monkeypatch, few_objects):
    """When a call has reduced, what it read and what it made are there; before and after it less."""
    nodes, channels = 160, 8
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, 900), generator=generator)
    x = torch.randn(nodes, channels, generator=generator)
    sp.partition({"edge_index": edges, "x": x}, tmp_path / "store", parts=1, method="random")
    del x
    found = []

    def count(*_):
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) is Tensor and one.shape == (nodes, channels)]
        found.append(len({one.data_ptr() for one in tensors if not one.is_meta and one.stride(0)}))

    reduced = journal.Journal.deferred
    monkeypatch.setattr(journal.Journal, "deferred", lambda self, rows: [count(), reduced(self, rows)][1])

    def work(comm):
        graph = sp.load(tmp_path / "store", comm)
        model = sp.pyg.wrap(kind(channels, channels, 4, channels), comm)
        mapped = graph.x  # of the file
        sp.infer(model, graph, tmp_path / "rows.npy", progress=count)
        assert mapped is graph.x

    sp.spawn(work, 1)
    assert len(found) == 8 and max(found) <= 3, found  # the mapped features, and two layers
