"""The example models of DGL's repository run unchanged on a sharded graph, or are refused at their line."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.nn.pytorch as dnn
import torch.nn.functional as F
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assignments, run, shard_hetero_in_memory, shard_in_memory

from . import dgl_attention_models as attention
from . import dgl_models as models
from .dgl_parity import LOOPED, NUM_EDGES, assert_dgl_exact, edges, float64  # noqa: F401
from .how_much import assert_exact_in, in_turn, some_by_default
from .on_ranks import on_ranks
from .test_dgl_hetero import ETYPES, FULL, typed_graph

NODES = LOOPED.num_nodes
RELATIONS = torch.arange(NUM_EDGES) % 3
RANDOM = assignments(NODES, 3, LOOPED.edge_index)["random"]


def plain(m, g, i):
    return m(g, i["x"])


def held(m, g, i, *names):
    """A model that was made with its graph."""
    m.g = g
    return m(i["x"], *(i[name] for name in names))


def typed_edges(m, g, i, x=None):
    g.edata[dgl.ETYPE], g.edata["norm"] = edges(RELATIONS, g), i["edge_weight"].unsqueeze(1)
    return m(g, i["x"] if x is None else x)


def unindexed(m, g, i):
    g.edata[dgl.ETYPE], g.edata["norm"] = edges(RELATIONS, g), i["edge_weight"].unsqueeze(1)
    return m(g)


def embedded(m, g, i):
    ids = g.ndata[dgl.NID] if dgl.NID in g.ndata else torch.arange(NODES)
    return typed_edges(m, g, i, ids) + i["x"][:, :1]


def proteins(m, g, i):
    g.ndata["feat"], g.edata["feat"] = i["x"], i["edge_attr"]
    return m(g)


def corrected(method, *more):
    """A method of CorrectAndSmooth, with the labels of some nodes."""

    def call(m, g, i):
        labels = F.one_hot((i["x"][:, 1] > 0).long(), 5).double()
        return getattr(m, method)(g, i["x"].softmax(1), labels, i["x"][:, 0] > 0, *more) + i["x"][:, :1]

    return call


def propagated(m, g, i):
    return m(g, F.one_hot((i["x"][:, 1] > 0).long(), 2).double(), i["x"][:, 0] > 0) + i["x"][:, :1]


def conv(make):
    return lambda: models.HoldsGraph(None, [nn.Linear(5, 6), make()], nn.Linear(6, 3))


CASES = {
    "GCN": (lambda: models.GCN(5, 6, 3), plain),
    "GAT": (lambda: attention.GAT(5, 4, 3, [2, 2]), plain),
    "GATv2": (lambda: attention.GAT(5, 4, 3, [2, 2], dnn.GATv2Conv), plain),
    **{f"GraphSAGE {a}": (lambda a=a: models.GraphSAGE(5, 6, 3, a), plain) for a in ("gcn", "mean", "pool")},
    "APPNP": (conv(lambda: dnn.APPNPConv(3, 0.1)), held),
    "SGC": (lambda: dnn.SGConv(5, 3, k=2, cached=True, bias=True), plain),
    "TAGCN": (conv(lambda: dnn.TAGConv(6, 6)), held),
    "ChebNet": (conv(lambda: dnn.ChebConv(6, 6, 2)), held),
    "MoNet": (lambda: models.MoNet(None, 5, 6, 3, 3, 3), lambda m, g, i: held(m, g, i, "edge_attr")),
    "RGCN": (lambda: models.RGCN(5, 3, 3), typed_edges),
    "RGCN with an embedding of ids": (lambda: models.EmbeddedRGCN(NODES, 5, 3, 3), embedded),
    "ogbn-arxiv GAT": (lambda: attention.ArxivGAT(5, 3, 4, 2), plain),
    "ogbn-proteins GAT": (lambda: attention.ProteinsGAT(5, 3, 4, 2, 2, 3, 4), proteins),
    "ARMA": (lambda: models.ARMAConv(5, 3, 2, 2, nn.ReLU()), plain),
    "GCNII": (lambda: models.GCNII(5, 6, 3, 3), plain),
    **{f"JKNet {mode}": (lambda mode=mode: models.JKNet(5, 4, 3, mode), plain) for mode in ("cat", "max", "lstm")},
    "MixHop": (lambda: models.MixHopConv(5, 3), plain),
    "GeniePath": (lambda: attention.GeniePath(5, 3, 4, 2), plain),
    "DAGNN": (lambda: models.DAGNN(3, 5, 6, 4), plain),
    "GRAND": (lambda: models.GRAND(5, 6, 3).eval(), plain),
    "label propagation": (lambda: models.LabelPropagation(3, 0.7, "DAD"), propagated),
    "correct without autoscale": (lambda: models.CorrectAndSmooth(autoscale=False), corrected("scaled", 7)),
    "smooth": (models.CorrectAndSmooth, corrected("smooth")),
}  # fmt: skip


LAYERS = {"GATv2", "GraphSAGE gcn", "GraphSAGE mean", "APPNP", "ChebNet", "JKNet cat", "JKNet max"}
"""Models that differ from others in a layer of DGL only: see test_dgl_convs.py."""


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(CASES, later=(1, 3), only=CASES.keys() - LAYERS))
def test_example_equals_the_whole_graph(name, ranks, modes):
    assert_dgl_exact(CASES[name], LOOPED, ranks, modes)


def _hgt(m, fields, given):
    G = typed_graph(given)
    for kind in G.ntypes:
        G.nodes[kind].data["inp"] = fields[kind]["x"]
    return {"paper": m(G, "paper")}


def _rgcn(m, fields, given):
    return m(typed_graph(given), {kind: fields[kind]["x"] for kind in FULL.num_nodes})


_NUMBERS = (
    {kind: place for place, kind in enumerate(FULL.num_nodes)},
    {k[1]: place for place, k in enumerate(FULL.edges)},
)
TYPED = {
    "HGT": (lambda: attention.HGT(*_NUMBERS, 5, 4, 3, 2, 2), _hgt),
    "R-GCN layer of several types": (lambda: attention.RelGraphConvLayer(5, 4, [k[1] for k in ETYPES], 2), _rgcn),
}


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(TYPED, later=(1, 3), only=[*TYPED][1:]))
def test_example_of_several_types_equals_the_whole_graph(name, ranks, modes):
    make, call = TYPED[name]
    torch.manual_seed(0)
    assert_exact_in(modes, make().double(), FULL, call, sp.dgl.wrap, ranks, sp.Options(chunk_bytes=1000))


@pytest.mark.parametrize("name", some_by_default(["ogbn-arxiv GAT", "ogbn-proteins GAT"], "ogbn-arxiv GAT"))
def test_edge_dropout_runs(name):
    """Which edges are dropped is random, on each rank; a model in evaluation is as above."""
    make, call = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    for layer in model.convs:
        layer.edge_drop = 0.3

    def work(comm):
        graph = shard_in_memory(LOOPED, RANDOM, comm)
        wrapped, x = sp.dgl.wrap(copy.deepcopy(model), comm), graph.node["x"].clone().requires_grad_()
        first, second = (call(wrapped, sp.dgl.graph(graph), {**graph.edge, "x": x}) for _ in range(2))
        first.square().sum().backward()
        return bool(first.isfinite().all() and x.grad.isfinite().all()) and not torch.equal(first, second)

    assert all(run(work, 3))


@on_ranks(3)
def test_a_model_that_was_made_with_the_graph(comm):
    """It may be the graph that `load` returns; `wrap` makes of it what DGL's layers take."""
    whole = dgl.graph(tuple(LOOPED.edge_index), num_nodes=NODES)
    torch.manual_seed(0)
    expected = models.HoldsGraph(whole, [dnn.TAGConv(5, 3)])
    weights, rows = expected.state_dict(), expected(LOOPED.node["x"]).detach()
    graph = shard_in_memory(LOOPED, RANDOM, comm)
    model = models.HoldsGraph(graph, [dnn.TAGConv(5, 3)])
    model.load_state_dict(weights)
    found = sp.dgl.wrap(model, comm)(graph.node["x"])
    torch.testing.assert_close(found, rows[graph.node_ids])
    model.g = whole
    with pytest.raises(RefusedError, match="called with an ordinary DGLGraph or holds one"):
        model(graph.node["x"])


def _metapaths(m, comm):
    g = sp.dgl.graph(shard_hetero_in_memory(FULL, {k: torch.arange(n) % 3 for k, n in FULL.num_nodes.items()}, comm))
    return m([g["cites"], g["cites"]], g.nodes["paper"].data["x"])


def _called(call):
    def run_on(m, comm):
        graph = shard_in_memory(LOOPED, RANDOM, comm)
        return call(m, sp.dgl.graph(graph), {**graph.node, **graph.edge})

    return run_on


_SUMS = "`sum` puts rows together"
REFUSED = {
    "correct": (models.CorrectAndSmooth, _called(corrected("correct")), rf"float\(y_soft.sum.*{_SUMS}"),
    "autoscale": (models.CorrectAndSmooth, _called(corrected("scaled", 7)), rf"sigma = .*{_SUMS}"),
    "GRACE": (lambda: models.Grace(5, 4), _called(plain), r"torch.mm\(z1, z2.t\(\)\).*over the nodes"),
    "DGI": (lambda: models.DGI(None, 5, 4), _called(held), r"features\[perm\].*takes rows by numbers that do not come"),
    "label propagation of classes": (
        lambda: models.LabelPropagation(3, 0.7, "DAD"), _called(lambda m, g, i: m(g, (i["x"][:, 1] > 0).long())),
        "F.one_hot.*without num_classes takes the largest number that the nodes of this rank have",
    ),
    "a changed graph": (lambda: models.TWIRLSLike(5), _called(plain), "add_self_loop.*before partitioning"),
    "an embedding of all nodes": (
        lambda: models.EmbeddedRGCN(NODES, 5, 3, 3), _called(unindexed),
        "has an entry for each of the nodes.* Use shardpass.NodeEmbedding",
    ),
    "HAN": (lambda: attention.HAN(5, 3, 2, 2), _metapaths, r"self.project\(z\).mean\(0\).*: `mean` puts rows together"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(3)
def test_example_is_refused_at_its_line(comm, name):
    make, call, words = REFUSED[name]
    with pytest.raises((RefusedError, dgl.DGLError), match=words):
        with sp.seed(0, comm):
            model = make()
        call(sp.dgl.wrap(model.double(), comm), comm)
