"""The PyG layers and models that must be exact, with how to call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.utils import softmax

from shardpass.testing import WholeGraph, awkward_graph

GRAPH: WholeGraph = awkward_graph(channels=5, edge_channels=3)
_DEGREES = torch.bincount(torch.bincount(GRAPH.edge_index[1], minlength=GRAPH.num_nodes))

Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, dict[str, Tensor], Any], Tensor]]


def mlp(channels: int, out: int) -> nn.Sequential:
    """Two layers with a ReLU: its zeros give ties in max."""
    return nn.Sequential(nn.Linear(channels, 8), nn.ReLU(), nn.Linear(8, out))


class Exchanges(gnn.MessagePassing):
    """One layer that aggregates otherwise in each hop."""

    def __init__(self) -> None:
        super().__init__("mean")
        self.kinds = nn.ModuleList([gnn.MaxAggregation(), gnn.SoftmaxAggregation(learn=True), gnn.StdAggregation()])

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        for kind in self.kinds:
            self.aggr_module = kind
            x = x + self.propagate(edge_index, x=x)
        return x

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sigmoid()


class Decomposed(gnn.MessagePassing):
    """PyG gives it the channels in two parts, one after the other."""

    def __init__(self) -> None:
        super().__init__("max", decomposed_layers=2)
        self.first, self.cut = nn.Linear(5, 8), nn.Parameter(torch.linspace(-0.5, 0.5, 4))

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = self.first(x)
        return x + self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i + self.cut).relu()


class GatedConv(gnn.MessagePassing):
    """A user's layer: learnable parameters in message(), a softmax of its own, and a captured non-leaf tensor."""

    def __init__(self, channels: int, edge_channels: int) -> None:
        super().__init__(aggr="sum")
        self.gate = nn.Linear(2 * channels + edge_channels, 1)
        self.scale = nn.Parameter(torch.ones(channels))
        self.mix = nn.Bilinear(channels, edge_channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        self._strength = self.scale.sigmoid() * 2  # made outside message(), not a leaf
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, x_i: Tensor, edge_attr: Tensor, index: Tensor, dim_size: int) -> Tensor:
        score = self.gate(torch.cat([x_i, x_j, edge_attr], dim=-1))
        weight = softmax(torch.tanh(score), index, num_nodes=dim_size)
        return weight * self.mix(x_j, edge_attr) * self._strength + x_j * self.scale


def _plain(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g)


def _weight(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, i["edge_weight"])


def _attr(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, edge_attr=i["edge_attr"])


def _pna() -> nn.Module:
    scalers = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
    return gnn.PNAConv(5, 6, ["mean", "min", "max", "std", "var", "sum"], scalers, _DEGREES, edge_dim=3)


LAYERS: dict[str, Case] = {
    "GCNConv": (lambda: gnn.GCNConv(5, 6), _plain),
    "GCNConv weighted": (lambda: gnn.GCNConv(5, 6), _weight),
    "GCNConv cached": (lambda: gnn.GCNConv(5, 6, cached=True), _plain),
    "SAGEConv mean": (lambda: gnn.SAGEConv(5, 6, project=True), _plain),
    "SAGEConv max": (lambda: gnn.SAGEConv(5, 6, aggr="max"), _plain),
    "SAGEConv min": (lambda: gnn.SAGEConv(5, 6, aggr="min"), _plain),
    "SAGEConv mul": (lambda: gnn.SAGEConv(5, 6, aggr="mul"), _plain),
    "SAGEConv list": (lambda: gnn.SAGEConv(5, 6, aggr=["mean", "max", "std", "softmax"]), _plain),
    "GINConv": (lambda: gnn.GINConv(mlp(5, 6), train_eps=True), _plain),
    "GINEConv": (lambda: gnn.GINEConv(mlp(5, 6), edge_dim=3), _attr),
    "GATConv": (lambda: gnn.GATConv(5, 4, heads=2), _plain),
    "GATConv edges": (lambda: gnn.GATConv(5, 4, heads=2, edge_dim=3, fill_value="mean", concat=False), _attr),
    "GATv2Conv": (lambda: gnn.GATv2Conv(5, 4, heads=2, edge_dim=3), _attr),
    "TransformerConv": (lambda: gnn.TransformerConv(5, 4, heads=2, edge_dim=3, beta=True), _attr),
    "GraphConv": (lambda: gnn.GraphConv(5, 6), _weight),
    "EdgeConv": (lambda: gnn.EdgeConv(mlp(10, 6)), _plain),
    "PNAConv": (_pna, _attr),
    "APPNP": (lambda: gnn.APPNP(3, 0.1), _weight),
    "ARMAConv": (lambda: gnn.ARMAConv(5, 6, num_stacks=2, num_layers=2), _weight),
    "GENConv": (lambda: gnn.GENConv(5, 6, aggr="softmax", learn_t=True, edge_dim=3), _attr),
    "user's layer": (lambda: GatedConv(5, 3), _attr),
}

_NORM: dict[str, Any] = {"norm": "batch_norm"}
MODELS: dict[str, Case] = {
    "aggregations exchanged": (Exchanges, _plain),
    "channels decomposed": (Decomposed, _plain),
    "GCN": (lambda: gnn.GCN(5, 8, 3, 4, **_NORM), _plain),
    "GraphSAGE": (lambda: gnn.GraphSAGE(5, 8, 3, 4, **_NORM), _plain),
    "GAT": (lambda: gnn.GAT(5, 8, 3, 4, heads=2, **_NORM), _plain),
    "GAT v2": (lambda: gnn.GAT(5, 8, 3, 4, heads=2, v2=True, jk="cat", **_NORM), _plain),
    "GIN": (lambda: gnn.GIN(5, 8, 2, 4, **_NORM), _plain),
    "PNA": (
        lambda: gnn.PNA(5, 8, 2, 4, aggregators=["mean", "max"], scalers=["identity"], deg=_DEGREES, **_NORM),
        _plain,
    ),
    "EdgeCNN": (lambda: gnn.EdgeCNN(5, 8, 2, 4), _plain),
    "EdgeCNN with BatchNorm": (lambda: gnn.EdgeCNN(5, 8, 2, 4, **_NORM), _plain),
}
