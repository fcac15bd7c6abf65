"""Rows of edges belong to one relation. Where those of another are as many, torch cannot tell, and the engine must."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch_geometric.nn as gnn
from dgl.nn.functional import edge_softmax
from torch import nn

import shardpass as sp
from shardpass.testing import WholeGraph, WholeHeteroGraph, shard_hetero_in_memory, shard_in_memory

from .dgl_parity import float64  # noqa: F401
from .how_much import one_each
from .on_ranks import assert_refused, assert_rows

N = 24
STEPS = (1, 5, 7)
FWD, REV = ("n", "fwd", "n"), ("n", "rev", "n")


def _graph():
    """Every node has as many out-edges as in-edges, so both relations have as many edges on every rank."""
    generator = torch.Generator().manual_seed(0)
    start = torch.arange(N).repeat(len(STEPS))
    order = torch.randperm(start.numel(), generator=generator)
    fwd = torch.stack([start, (start + torch.tensor(STEPS).repeat_interleave(N)) % N])[:, order]
    count = fwd.size(1)

    def fields():
        drawn = torch.rand(count, 4, generator=generator, dtype=torch.float64)
        return {"w": drawn[:, 0] + 0.1, "e": drawn[:, 1:], "t": torch.randint(0, 3, (count,), generator=generator)}

    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    order = torch.randperm(count, generator=generator)
    return WholeHeteroGraph(
        {"n": N}, {FWD: fwd, REV: fwd.flip(0)[:, order]}, {"n": {"x": x}}, {FWD: fields(), REV: fields()}
    )


GRAPH = _graph()


def share(comm):
    return shard_hetero_in_memory(GRAPH, {"n": torch.arange(N) % comm.size}, comm)


class Model(nn.Module):
    """A layer, and how it is called with a graph, rows of nodes, and fields of the edges of some relation."""

    def __init__(self, make, call):
        super().__init__()
        self.layer, self.call = make(), call

    def forward(self, g, x, of):
        return self.call(self.layer, g, x, of)


def scaled(layer, g, x, w):
    """As a layer of the user's own does it."""
    with g.local_scope():
        g.ndata["x"], g.edata["w"] = x, w  # update_all
        g.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "o"))
        return layer(g.ndata["o"])


def kept(layer, g, x, of):
    """Stored under a relation, and read there by functions of several relations, of edges and of nodes."""
    with g.local_scope():
        g.ndata["x"] = x
        g.edges["rev"].data["v"] = of["w"]  # kept
        g.multi_update_all({"rev": (fn.u_mul_e("x", "v", "m"), fn.sum("m", "o"))}, "sum")
        g.apply_edges(lambda edges: {"s": edges.src["x"] * edges.data["v"][:, None]}, etype="rev")
        g.update_all(fn.copy_e("s", "m"), lambda nodes: {"p": nodes.mailbox["m"].amax(1)}, etype="rev")
        return layer(g.ndata["o"] + g.ndata["p"])


def attention(layer, g, x, of):
    scores = edge_softmax(g["rev"], of["w"])  # softmax
    return scaled(layer, g["rev"], x, scores)


def taken(layer, index, x, w):
    """By the rows of the index alone."""
    messages = x[index[0]] * w[:, None]  # taken
    return layer(torch.zeros_like(x).index_add(0, index[1], messages))


def linear(*_):
    return nn.Linear(5, 4)


def loop_free(index):
    return index[:, index[0] != index[1]]


class Own(gnn.MessagePassing):
    """A layer of the user's own."""

    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w)  # own layer

    def message(self, x_j, w):
        return x_j * w[:, None]


AGAINST = {"flow": "target_to_source"}
DGL = {
    "GraphConv": (lambda: dnn.GraphConv(5, 4), lambda m, g, x, of: m(g["rev"], x, edge_weight=of["w"])),
    "product": (lambda: dnn.GraphConv(5, 4), lambda m, g, x, of: m(g["rev"], x, edge_weight=of["w"] * 2)),  # product
    "EdgeWeightNorm": (
        dnn.EdgeWeightNorm,
        lambda m, g, x, of: scaled(nn.Identity(), g["rev"], x, m(g["rev"], of["w"])),  # EdgeWeightNorm
    ),
    "SAGEConv": (lambda: dnn.SAGEConv(5, 4, "mean"), lambda m, g, x, of: m(g["rev"], x, edge_weight=of["w"])),
    "GATConv": (lambda: dnn.GATConv(5, 4, 2), lambda m, g, x, of: m(g["rev"], x, edge_weight=of["w"]).flatten(1)),
    "EdgeGATConv": (lambda: dnn.EdgeGATConv(5, 3, 4, 2), lambda m, g, x, of: m(g["rev"], x, of["e"]).flatten(1)),
    "EGATConv": (lambda: dnn.EGATConv(5, 3, 4, 2, 2), lambda m, g, x, of: m(g["rev"], x, of["e"])[0].flatten(1)),
    "GINConv": (lambda: dnn.GINConv(linear(), "sum"), lambda m, g, x, of: m(g["rev"], x, of["w"])),
    "GINEConv": (lambda: dnn.GINEConv(linear()), lambda m, g, x, of: m(g["rev"], x, of["w"][:, None].expand(-1, 5))),
    "NNConv": (lambda: dnn.NNConv(5, 4, nn.Linear(3, 20), "sum"), lambda m, g, x, of: m(g["rev"], x, of["e"])),
    "EGNNConv": (lambda: dnn.EGNNConv(5, 6, 4, 3), lambda m, g, x, of: m(g["rev"], x, x[:, :2], of["e"])[0]),
    "RelGraphConv": (lambda: dnn.RelGraphConv(5, 4, 3), lambda m, g, x, of: m(g["rev"], x, of["t"])),
    "TAGConv": (lambda: dnn.TAGConv(5, 4, 2), lambda m, g, x, of: m(g["rev"], x, of["w"])),
    "HeteroGraphConv": (
        lambda: dnn.HeteroGraphConv({"fwd": dnn.GraphConv(5, 4), "rev": dnn.GraphConv(5, 4)}),
        lambda m, g, x, of: m(g, {"n": x}, mod_args={"rev": (None, of["w"])})["n"],  # HeteroGraphConv
    ),
    "# update_all": (linear, lambda m, g, x, of: scaled(m, g["rev"], x, of["w"])),
    "# kept": (linear, kept),
    "# softmax": (linear, attention),
}
PYG = {
    "GraphConv": (lambda: gnn.GraphConv(5, 4), lambda m, g, x, of: m(x, g[REV], of["w"])),
    "against": (lambda: gnn.GraphConv(5, 4, **AGAINST), lambda m, g, x, of: m(x, g[REV], of["w"])),
    "flipped": (lambda: gnn.GraphConv(5, 4), lambda m, g, x, of: m(x, g[REV].flip(0), of["w"])),
    "GCNConv": (lambda: gnn.GCNConv(5, 4), lambda m, g, x, of: m(x, g[REV], of["w"])),
    "GATConv": (lambda: gnn.GATConv(5, 4, edge_dim=3), lambda m, g, x, of: m(x, g[REV], of["e"])),
    "NNConv": (lambda: gnn.NNConv(5, 4, nn.Linear(3, 20)), lambda m, g, x, of: m(x, g[REV], of["e"])),
    "GINEConv": (lambda: gnn.GINEConv(linear(), edge_dim=3), lambda m, g, x, of: m(x, g[REV], of["e"])),
    "RGCNConv": (lambda: gnn.RGCNConv(5, 4, 3), lambda m, g, x, of: m(x, g[REV], of["t"])),
    "HeteroConv": (
        lambda: gnn.HeteroConv({FWD: gnn.GraphConv(5, 4), REV: gnn.GraphConv(5, 4)}),
        lambda m, g, x, of: m({"n": x}, g, edge_weight_dict={REV: of["w"]})["n"],  # HeteroConv
    ),
    "# own layer": (Own, lambda m, g, x, of: m(x, g[REV], of["w"])),
    "# own layer: against": (lambda: Own(**AGAINST), lambda m, g, x, of: m(x, g[REV], of["w"])),
    "# own layer: some edges": (Own, lambda m, g, x, of: m(x, loop_free(g[REV]), of["w"])),
    "# taken": (linear, lambda m, g, x, of: taken(m, g[REV], x, of["w"])),
}
CASES = {("dgl", name): case for name, case in DGL.items()} | {("pyg", name): case for name, case in PYG.items()}
RING = WholeGraph(
    N,
    torch.stack([torch.arange(N), torch.arange(N).roll(1)]),
    {"x": GRAPH.node["n"]["x"]},
    {"w": GRAPH.edge[FWD]["e"][:N]},
)
"""As many edges as nodes, also on each rank."""
AS_MANY = {
    "dgl layer": (sp.dgl.wrap, lambda: dnn.GraphConv(5, 4), lambda m, g, x, _: m(g, x, edge_weight=x[:, 0])),
    "# update_all": (sp.dgl.wrap, linear, lambda m, g, x, _: scaled(m, g, x, x[:, 0])),
    "pyg layer": (sp.pyg.wrap, lambda: gnn.GraphConv(5, 4), lambda m, g, x, _: m(x, g, x[:, 0])),
    "# own layer": (sp.pyg.wrap, Own, lambda m, g, x, _: m(x, g, x[:, 0])),
    "edges for nodes": (sp.pyg.wrap, lambda: gnn.GraphConv(3, 4), lambda m, g, _, w: m(w, g)),  # edges for nodes
}


def made(case):
    """The model, and what it gives on the whole graph."""
    torch.manual_seed(0)
    model, ends = Model(*CASES[case]).double(), GRAPH.edges
    if case[0] == "dgl":
        ends = dgl.heterograph({kind: tuple(ends) for kind, ends in GRAPH.edges.items()}, GRAPH.num_nodes)
    return model, model(ends, GRAPH.node["n"]["x"], GRAPH.edge[REV]).detach()


def ran(model, case, kind):
    """What a rank does: the model, called with fields of the edges of a relation."""

    def work(comm):
        graph = share(comm)
        wrap, given = (sp.dgl.wrap, graph) if case[0] == "dgl" else (sp.pyg.wrap, graph.edge_index_dict)
        mine = wrap(copy.deepcopy(model), comm)
        return graph.node_ids_dict["n"], mine(given, graph["n"].x, dict(graph.relations[kind].fields))

    return work


@pytest.mark.parametrize(("case", "ranks"), one_each(CASES, (4, 1)))
def test_rows_of_edges_of_the_relation_are_exact(case, ranks):
    model, expected = made(case)
    assert_rows(ran(model, case, REV), expected, ranks=(ranks,))


@pytest.mark.parametrize(("case", "ranks"), one_each(CASES, (1, 4)))
def test_rows_of_edges_of_another_relation_are_refused(case, ranks):
    assert_refused(ran(made(case)[0], case, FWD), case[1].split(":")[0], "edges", ranks=(ranks,))


@pytest.mark.parametrize(("name", "ranks"), one_each(AS_MANY, (4, 1)))
def test_rows_of_nodes_are_no_rows_of_edges(name, ranks):
    wrap, make, call = AS_MANY[name]
    model = Model(make, call).double()

    def work(comm):
        graph = shard_in_memory(RING, torch.arange(N) % comm.size, comm)
        return wrap(copy.deepcopy(model), comm)(graph, graph.node["x"], graph.edge["w"])

    assert_refused(work, name, "edges", ranks=(ranks,))
