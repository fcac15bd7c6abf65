"""Layers of DGL, differentiated twice. DGL's own softmax over edges is wrong there; shardpass gives what it should."""

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.nn as dnn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assert_exact

from .dgl_cases import CONVS, graph_of
from .dgl_parity import caller
from .how_much import MODES, each_way, owners_of

pytestmark = pytest.mark.usefixtures("doubles")
_SOFTMAX = ("GATConv", "GATv2Conv", "DotGatConv", "AGNNConv", "EdgeGAT", "Sequential")
ATTENTION = {name for name in CONVS if name.startswith(_SOFTMAX)}
BY_DGL = {name for name in CONVS if name.startswith(("EGATConv", "HGTConv"))}  # they call the function of DGL
NOT_TWICE = {  # in DGL: a slope of infinity, labels without gradients, memory that backward frees
    "TWIRLSUnfoldingAndAttention plain", "EGNNConv", "EGNNConv edges", "LabelPropagation", "LabelPropagation reset",
    "LabelPropagation multi-label", "GroupRevRes", "GroupRevRes edges",
}  # fmt: skip
DEFAULT = {
    "GraphConv weighted", "SAGEConv pool", "EdgeConv", "CFConv", "NNConv max", "GINEConv", "GatedGraphConv three types",
    "PNAConv", "RelGraphConv basis",
}  # fmt: skip
assert {*CONVS} >= DEFAULT


@pytest.mark.parametrize(
    ("name", "ranks", "mode"), each_way(sorted({*CONVS} - ATTENTION - BY_DGL - NOT_TWICE), DEFAULT)
)
def test_layers_are_those_of_dgl(name, ranks, mode):
    check(name, ranks, mode)


@pytest.mark.parametrize("name", sorted(BY_DGL))
def test_a_softmax_by_dgl_is_refused(name):
    with pytest.raises(RefusedError, match="DGL's edge_softmax is wrong where its backward is differentiated"):
        check(name, 3, "sar")


def check(name, ranks, mode):
    make, call = CONVS[name][:2]
    graph = graph_of(name)
    torch.manual_seed(0)
    owners = owners_of(graph, ranks)
    assigned = [*owners][min(MODES.index(mode), len(owners) - 1)]
    assert_exact(
        make().double(), graph, caller(call, graph.num_nodes), sp.dgl.wrap, ranks=ranks, modes=(mode,),
        owners={assigned: owners[assigned]}, options=sp.Options(chunk_bytes=1200), relative=True, order=2,
    )  # fmt: skip


LAYERS = {
    "GATConv": lambda: dnn.GATConv(3, 2, 2),
    "GATv2Conv": lambda: dnn.GATv2Conv(3, 2, 2),
    "DotGatConv": lambda: dnn.DotGatConv(3, 2, 2),
    "AGNNConv": lambda: dnn.AGNNConv(),
}


def small() -> dgl.DGLGraph:
    draws = torch.Generator().manual_seed(0)
    ends = torch.randint(0, 8, (2, 20), generator=draws)
    return dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=8))


@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_what_finite_differences_say(name):
    torch.manual_seed(0)
    model, graph = sp.dgl.wrap(LAYERS[name]().double()), sp.shard(small())
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: model(graph, x), (x,))


@pytest.mark.parametrize("name", LAYERS)
def test_attention_on_three_ranks_is_that_on_one(name):
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def work(comm):
        torch.manual_seed(0)
        model, graph = sp.dgl.wrap(models[comm.rank], comm), sp.shard(small(), comm)
        x = graph.own(rows).requires_grad_()
        (slope,) = torch.autograd.grad(model(graph, x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return graph.whole(x.grad), [parameter.grad for parameter in model.parameters()]

    found = []
    for ranks in (1, 3):
        models = []
        for _ in range(ranks):
            torch.manual_seed(0)
            models.append(LAYERS[name]().double())
        found.append(sp.spawn(work, ranks)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
