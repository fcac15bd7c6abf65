"""Every layer of `dgl.nn` is exact on a sharded graph: outputs, gradients of inputs, edges and parameters, buffers."""

import pytest

pytest.importorskip("dgl")

from .dgl_cases import CONVS, FLOAT32, graph_of
from .dgl_parity import BOUND, assert_dgl_exact, float64  # noqa: F401
from .how_much import in_turn

QUICK = (
    "GraphConv both", "GraphConv left", "GraphConv weighted", "GraphConv of WeightBasis", "SAGEConv gcn",
    "SAGEConv lstm", "SAGEConv mean weighted", "SAGEConv pool pair", "GATConv weighted", "EdgeGATConv",
    "EGATConv attention", "GINConv max", "GINConv max weighted", "GINConv with BatchNorm", "GINEConv",
    "EdgeConv with BatchNorm", "EdgeConv evaluated", "NNConv max", "NNConv residual", "GMMConv max",
    "GMMConv residual", "CFConv", "APPNPConv weighted", "SGConv weighted", "TAGConv", "GCN2Conv two weights",
    "GCN2Conv weighted", "ChebConv", "ChebConv lambda_max list", "EdgeWeightNorm both",
    "TWIRLSUnfoldingAndAttention attention", "TWIRLSUnfoldingAndAttention plain", "GatedGraphConv rare types",
    "RelGraphConv basis", "RelGraphConv bdd", "RelGraphConv presorted", "HGTConv", "HGTConv presorted",
    "EGNNConv edges", "PNAConv", "PNAConv evaluated", "DGNConv", "AtomicConv", "AtomicConv features",
    "LabelPropagation reset", "LabelPropagation multi-label", "JumpingKnowledge lstm", "Sequential",
    "GroupRevRes edges", "EdgePredictor", "TransR",
)  # fmt: skip
"""Each class, and the options that take another way. Layers that are an attention: test_dgl_attention.py."""


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(CONVS, only=QUICK))
def test_layer_equals_the_whole_graph(name, ranks, modes):
    assert_dgl_exact(CONVS[name], graph_of(name), ranks, modes, 1e-5 if name.split()[0] in FLOAT32 else BOUND)
