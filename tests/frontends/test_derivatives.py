"""Every layer can be differentiated twice: losses that hold gradients by features, as forces are, are exact."""

import pytest
import torch

pytest.importorskip("torch_geometric")

import shardpass as sp
from shardpass.testing import assert_exact

from . import hetero_cases
from .conv_cases import CONVS
from .how_much import MODES, each_way, owners_of
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
