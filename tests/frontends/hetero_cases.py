"""The models on graphs of several types that must be exact, with how to call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import nn

from shardpass.testing import awkward_hetero_graph
from shardpass.testing.parity import HeteroCaller, Tensors

GRAPH = awkward_hetero_graph(channels=5, edge_channels=3)
METADATA = GRAPH.metadata
Case = tuple[Callable[[], nn.Module], HeteroCaller]


def by_type(fields: Tensors, name: str) -> dict[Any, Any]:
    """The field `name` of each type that has it."""
    return {kind: own[name] for kind, own in fields.items() if name in own}


def _plain(m: nn.Module, fields: Tensors, graph: Any) -> Any:
    return m(by_type(fields, "x"), graph)


def _attr(m: nn.Module, fields: Tensors, graph: Any) -> Any:
    return m(by_type(fields, "x"), graph, edge_attr_dict=by_type(fields, "edge_attr"))


def _weight(m: nn.Module, fields: Tensors, graph: Any) -> Any:
    return m(by_type(fields, "x"), graph, edge_weight_dict=by_type(fields, "edge_weight"))


def _weight_in_place(m: nn.Module, fields: Tensors, graph: Any) -> Any:
    return m(by_type(fields, "x"), graph, by_type(fields, "edge_weight"))


def hetero_conv(make: Callable[[], nn.Module], aggr: str | None = "sum") -> Callable[[], nn.Module]:
    """A layer of its own for each edge type."""
    return lambda: gnn.HeteroConv({kind: make() for kind in METADATA[1]}, aggr)


def _mixed() -> nn.Module:
    makes = [
        lambda: gnn.SAGEConv((5, 5), 4, aggr="max"),
        lambda: gnn.GATConv((5, 5), 2, heads=2, add_self_loops=False),
        lambda: gnn.GraphConv((5, 5), 4),
        lambda: gnn.GATv2Conv((5, 5), 2, heads=2, add_self_loops=False),
        lambda: gnn.TransformerConv((5, 5), 2, heads=2),
    ]
    convs = {kind: makes[i % len(makes)]() for i, kind in enumerate(METADATA[1])}
    convs["paper", "cites", "paper"] = gnn.GCNConv(5, 4)  # adds self-loops
    return gnn.HeteroConv(convs, "mean")


class Homogeneous(nn.Module):
    """A model for one type, as `to_hetero` takes it: two layers, a norm over nodes, a skip connection."""

    def __init__(self, make: Callable[[int, int], nn.Module], norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = make(5, 6), make(6, 4)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.skip = gnn.Linear(6, 4)

    def forward(self, x: Any, edge_index: Any) -> Any:
        x = self.norm(self.first(x, edge_index)).relu()
        return self.second(x, edge_index) + self.skip(x)


class Weighted(nn.Module):
    """The same with edge weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GraphConv((5, 5), 4)

    def forward(self, x: Any, edge_index: Any, edge_weight: Any) -> Any:
        return self.conv(x, edge_index, edge_weight)


def _bases(make: Callable[[int, int], nn.Module], num_bases: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = gnn.to_hetero_with_bases(Homogeneous(make), METADATA, num_bases, in_channels={"x": 5})
        with torch.no_grad():  # lazy linear layers
            model({kind: own["x"].float() for kind, own in GRAPH.node.items()}, dict(GRAPH.edges))
        return model

    return build


class TwoLayers(nn.Module):
    """Layers one after the other, with a linear layer per type in front."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.inputs = gnn.HeteroDictLinear(5, 8, METADATA[0])
        self.first, self.second = make(8, 8), make(8, 6)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        x_dict = {kind: x.tanh() for kind, x in self.inputs(x_dict).items()}
        x_dict = {kind: x for kind, x in self.first(x_dict, edge_index_dict).items() if x is not None}
        return self.second(x_dict, edge_index_dict)


def _two(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: TwoLayers(lambda width, out: kind(width, out, METADATA, **options))


LAYERS: dict[str, Case] = {
    "HeteroConv SAGE": (hetero_conv(lambda: gnn.SAGEConv((5, 5), 4)), _plain),
    "HeteroConv GAT": (
        hetero_conv(lambda: gnn.GATConv((5, 5), 2, heads=2, add_self_loops=False, edge_dim=3), "max"),
        _attr,
    ),
    "HeteroConv GATv2": (
        hetero_conv(lambda: gnn.GATv2Conv((5, 5), 2, heads=2, add_self_loops=False, edge_dim=3), "cat"),
        _attr,
    ),
    "HeteroConv GraphConv": (hetero_conv(lambda: gnn.GraphConv((5, 5), 4), "min"), _weight),
    "HeteroConv mixed": (_mixed, _plain),
    "HGTConv": (lambda: gnn.HGTConv(5, 6, METADATA, heads=2), _plain),
    "HANConv": (lambda: gnn.HANConv(5, 6, METADATA, heads=2), _plain),
}

MODELS: dict[str, Case] = {
    "to_hetero SAGE": (
        lambda: gnn.to_hetero(Homogeneous(lambda i, o: gnn.SAGEConv((i, i), o), norm=True), METADATA),
        _plain,
    ),
    "to_hetero GATv2": (
        lambda: gnn.to_hetero(
            Homogeneous(lambda i, o: gnn.GATv2Conv((i, i), o, add_self_loops=False)), METADATA, aggr="max"
        ),
        _plain,
    ),
    "to_hetero weighted": (lambda: gnn.to_hetero(Weighted(), METADATA, aggr="mean"), _weight_in_place),
    "to_hetero_with_bases SAGE": (_bases(lambda i, o: gnn.SAGEConv(i, o), 3), _plain),
    "to_hetero_with_bases GraphConv max": (_bases(lambda i, o: gnn.GraphConv(i, o, aggr="max"), 2), _plain),
    "HGT": (_two(gnn.HGTConv, heads=2), _plain),
    "HAN": (_two(gnn.HANConv, heads=2), _plain),
}
