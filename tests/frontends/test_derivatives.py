"""Every layer can be differentiated twice: losses that hold gradients by features, as forces are, are exact."""

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric.nn import MessagePassing

import shardpass as sp
from shardpass.core.aggregation.weighted_sums import WeightedSum
from shardpass.testing import assert_exact

from . import hetero_cases
from .conv_cases import CONVS
from .how_much import MODES, each_way, one_each, owners_of
from .model_cases import MORE_MODELS
from .pyg_cases import GRAPH, MODELS

NOT_BY_TORCH = {"SAGEConv mul"}  # which cannot differentiate a product of zeros twice
CASES = {name: case for name, case in {**CONVS, **MODELS, **MORE_MODELS}.items() if name not in NOT_BY_TORCH}
TYPED = {**hetero_cases.LAYERS, **hetero_cases.MODELS}
DEFAULT = {
    "GCNConv weighted", "SAGEConv max", "SAGEConv list", "GATConv edges", "GATv2Conv", "TransformerConv", "EdgeConv",
    "EdgeCNN with BatchNorm",
        "PNAConv", "GENConv", "user's layer", "aggregations exchanged", "GAT", "PNA", "GCNConv against the edges",
    "HGT", "HeteroConv mixed", "to_hetero GATv2",
}  # fmt: skip
assert {*CASES, *TYPED} >= DEFAULT


def check(case, graph, wrap, ranks, mode, order=2):
    make, call = case
    torch.manual_seed(0)
    owners = owners_of(graph, ranks)
    name = [*owners][min(MODES.index(mode), len(owners) - 1)]
    options = sp.Options(chunk_bytes=1200)
    own = {name: owners[name]}
    assert_exact(
        make().double(), graph, call, wrap, ranks=ranks, modes=(mode,), owners=own, options=options, relative=True,
        order=order,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "mode"), each_way(CASES, DEFAULT))
def test_layers_and_models_of_pyg(name, ranks, mode):
    check(CASES[name], GRAPH, sp.pyg.wrap, ranks, mode)


@pytest.mark.parametrize(("name", "ranks", "mode"), each_way(TYPED, DEFAULT))
def test_models_of_typed_graphs(name, ranks, mode):
    check(TYPED[name], hetero_cases.GRAPH, sp.pyg.wrap, ranks, mode)


@pytest.mark.parametrize("name", ["GCNConv weighted", "GATv2Conv", "PNAConv", "EdgeConv", "user's layer"])
def test_third_order(name):
    check(CASES[name], GRAPH, sp.pyg.wrap, 3, "sar", order=3)


class Weighted(MessagePassing):
    """Sums of rows times weights of edges: one for all channels, one for each of two heads, or one for each channel."""

    def __init__(self, heads):
        super().__init__(node_dim=0)
        self.heads, self.weigh, self.first = heads, torch.nn.Linear(3, heads), torch.nn.Linear(5, 4)

    def forward(self, x, edge_index, edge_attr):
        weight = self.weigh(edge_attr).tanh()
        x = self.first(x).tanh().view(-1, self.heads, 4 // self.heads)
        return self.propagate(edge_index, x=x, weight=weight).flatten(1)

    def message(self, x_j, weight):
        return weight.unsqueeze(-1) * x_j


@pytest.mark.parametrize(("heads", "way"), one_each([1, 2, 4], [(3, "keep"), (4, "halo"), (1, "sar")]))
def test_weighted_sums(heads, way, monkeypatch):
    used, (ranks, mode) = [], way
    by = WeightedSum.by
    monkeypatch.setattr(WeightedSum, "by", lambda self, *args: used.append(self) or by(self, *args))
    case = lambda: Weighted(heads), lambda m, i, g: m(i["x"], g, i["edge_attr"])
    for order in (2, 3):
        check(case, GRAPH, sp.pyg.wrap, ranks, mode, order=order)
    assert used
