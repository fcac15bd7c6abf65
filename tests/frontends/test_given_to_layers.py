"""What a layer of PyG or DGL is made with (an activation, a gate, an MLP) is followed, whosever code it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, shard_in_memory
from shardpass.testing.graphs import assignments, awkward_graph
from shardpass.testing.run import run

WHOLE = awkward_graph(channels=4)
GRAPH = WholeGraph(WHOLE.num_nodes, WHOLE.edge_index, {"x": WHOLE.node["x"].double()}, {})
OWNERS = assignments(GRAPH.num_nodes, 2, GRAPH.edge_index)["random"]
Make = Callable[[], nn.Module]


def _gate(last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), last)


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.layer(*args)
        return out


def _refusal(make: Make, wrap: Callable[..., nn.Module], call: Callable[[nn.Module, Any], Any]) -> str:
    def body(comm: sp.Communicator) -> str:
        with sp.seed(0, comm):
            model = Model(make().double())
        graph = shard_in_memory(GRAPH, OWNERS, comm)
        try:
            call(wrap(model, comm), graph)
        except RefusedError as error:
            return str(error)
        return ""

    found: list[str] = run(body, 2)
    return found[0]


PYG_MIXES: dict[str, Make] = {
    "softmax over rows": lambda: gnn.GINConv(_gate(nn.Softmax(0))),
    "attention between rows": lambda: gnn.GINConv(_gate(nn.TransformerEncoderLayer(4, 2, 8, 0.0))),
    "function of torch": lambda: gnn.FiLMConv(4, 3, act=partial(torch.softmax, dim=0)),
}
PYG_EXACT: dict[str, Make] = {
    "softmax over columns": lambda: gnn.GINConv(_gate(nn.Softmax(1))),
    "norm": lambda: gnn.GINConv(_gate(nn.BatchNorm1d(4))),
    "norm of PyG": lambda: gnn.GINConv(_gate(gnn.GraphNorm(4))),
    "function of torch": lambda: gnn.FiLMConv(4, 3, act=partial(torch.softmax, dim=1)),
}


@pytest.mark.parametrize("name", PYG_MIXES)
def test_what_mixes_rows_in_a_layer_of_pyg_is_refused(name: str) -> None:
    def call(model: nn.Module, graph: Any) -> Any:
        return model(graph.x, graph)

    assert "puts rows together, over the nodes" in _refusal(PYG_MIXES[name], sp.pyg.wrap, call)


@pytest.mark.parametrize("name", PYG_EXACT)
def test_what_treats_rows_one_by_one_in_a_layer_of_pyg_passes(name: str) -> None:
    def call(model: nn.Module, graph: Any) -> Any:
        return model(graph.x, graph)

    assert _refusal(PYG_EXACT[name], sp.pyg.wrap, call) == ""


def _dgl_layers() -> dict[str, Make]:
    dglnn = pytest.importorskip("dgl.nn")
    return {
        "activation": lambda: dglnn.SAGEConv(4, 3, "mean", activation=nn.Softmax(dim=0)),
        "norm": lambda: dglnn.SAGEConv(4, 3, "mean", norm=partial(F.normalize, dim=0)),
        "function of torch": lambda: dglnn.GATConv(
            4, 3, 2, activation=partial(F.softmax, dim=0), allow_zero_in_degree=True
        ),
        "mlp": lambda: dglnn.GINConv(_gate(nn.Softmax(0))),
        "norm of PyG": lambda: dglnn.SAGEConv(4, 3, "mean", norm=gnn.PairNorm()),
        "gate of a readout": lambda: dglnn.GlobalAttentionPooling(nn.Sequential(nn.Linear(4, 1), nn.Softmax(0))),
    }


@pytest.mark.parametrize("name", ["activation", "norm", "function of torch", "mlp", "norm of PyG", "gate of a readout"])
def test_what_mixes_rows_in_a_layer_of_dgl_is_refused(name: str) -> None:
    def call(model: nn.Module, graph: Any) -> Any:
        return model(sp.dgl.graph(graph), graph.x)

    assert "puts rows together, over the nodes" in _refusal(_dgl_layers()[name], sp.dgl.wrap, call)
