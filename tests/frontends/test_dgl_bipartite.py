"""Graphs whose edges all go from one set of node types to another, called as DGL calls them: ``layer(g, (u, v))``."""

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
from dgl.nn.functional import edge_softmax
from torch import nn

import shardpass as sp
from shardpass.testing import WholeHeteroGraph, hetero_assignments, run, shard_hetero_in_memory

from .dgl_cases import ZERO
from .dgl_parity import float64  # noqa: F401
from .how_much import assert_exact_in, in_turn
from .test_dgl_hetero import GRAPH as SEVERAL

WRITES = ("author", "writes", "paper")
GRAPH = WholeHeteroGraph(
    {kind: SEVERAL.num_nodes[kind] for kind in ("author", "paper")},
    {WRITES: SEVERAL.edges[WRITES]},
    {kind: SEVERAL.node[kind] for kind in ("author", "paper")},
    {WRITES: SEVERAL.edge[WRITES]},
)
_EVERY = torch.stack(
    [torch.arange(GRAPH.num_nodes["paper"]) % GRAPH.num_nodes["author"], torch.arange(GRAPH.num_nodes["paper"])]
)
_ROWS = torch.cat([torch.arange(GRAPH.edges[WRITES].size(1)), torch.arange(GRAPH.num_nodes["paper"])])
REACHED = WholeHeteroGraph(
    GRAPH.num_nodes,
    {WRITES: torch.cat([GRAPH.edges[WRITES], _EVERY], 1)},
    GRAPH.node,
    {WRITES: {name: rows[_ROWS] for name, rows in GRAPH.edge[WRITES].items()}},
)
"""With an edge into every paper, for layers that refuse others."""


def bipartite(edges):
    if isinstance(edges, sp.ShardedHeteroGraph):
        return sp.dgl.graph(edges)
    return dgl.heterograph({kind: tuple(ends) for kind, ends in edges.items()}, GRAPH.num_nodes)


def pair(make, *names, width=5, then=lambda out: out):
    """A layer that is called with `width` columns of both sides, and with edge fields."""

    def call(m, fields, edges):
        given = fields["author"]["x"][:, :width], fields["paper"]["x"][:, :width]
        return {"paper": then(m(bipartite(edges), given, *(fields[WRITES][name] for name in names))).flatten(1)}

    return make, call


class Own(nn.Module):
    """Message passing of the user's own, through the data of both sides."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 4)

    def forward(self, g, fields):
        with g.local_scope():
            g.srcdata["h"], g.dstdata["h"] = self.lin(fields["author"]["x"]), fields["paper"]["x"][:, :4]
            g.edata["w"] = fields[WRITES]["edge_weight"].unsqueeze(1)
            g.srcdata.update({"k": g.srcdata["h"] * 2})
            g.apply_edges(fn.u_dot_v("k", "h", "s"))
            g.edata["a"] = edge_softmax(g, g.edata["s"])
            g.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "attended"))
            g.update_all(lambda e: {"m": self.lin(e.dst["x"]) * e.data["w"] + e.src["h"]}, fn.max("m", "top"))
            g.apply_nodes(lambda n: {"h": n.data["h"].tanh()}, ntype="author")
            g.update_all(fn.copy_u("h", "m"), fn.mean("m", "mean"), lambda n: {"mean": n.data["mean"] - n.data["h"]})
            g.nodes["author"].data["y"] = g.nodes["author"].data["h"] + g.out_degrees().unsqueeze(1)
            data = g.dstdata
            papers = torch.cat([data["attended"], data["top"], data["mean"], g.in_degrees().unsqueeze(1).double()], 1)
            return {"paper": papers, "author": g.srcdata["y"]}


def _own(m, fields, edges):
    g = bipartite(edges)
    g.nodes["paper"].data["x"] = fields["paper"]["x"]
    return m(g, fields)


def _blocks(m, fields, edges):
    """A layer of `HeteroGraphConv`, and one on the graph of the relation."""
    g, x = bipartite(edges), {kind: fields[kind]["x"] for kind in GRAPH.num_nodes}
    return {"paper": m(g, x)["paper"] + m.mods["writes"](g["writes"], (x["author"], x["paper"]))}


CASES = {
    "AGNNConv": pair(lambda: dnn.AGNNConv(**ZERO)),
    "DotGatConv": pair(lambda: dnn.DotGatConv((5, 5), 3, 2, **ZERO)),
    "EdgeConv": pair(lambda: dnn.EdgeConv(5, 6, **ZERO)),
    "EdgeGATConv": pair(lambda: dnn.EdgeGATConv((5, 5), 3, 4, 2, **ZERO), "edge_attr"),
    "GATConv": pair(lambda: dnn.GATConv((5, 5), 3, 2, residual=True, **ZERO)),
    "GATv2Conv": pair(lambda: dnn.GATv2Conv((5, 5), 3, 2, residual=True, **ZERO)),
    "GINConv": pair(lambda: dnn.GINConv(nn.Linear(5, 6), "max", learn_eps=True)),
    "GINEConv": pair(lambda: dnn.GINEConv(nn.Linear(3, 6), learn_eps=True), "edge_attr", width=3),
    "GMMConv": pair(lambda: dnn.GMMConv((5, 5), 4, 3, 2, **ZERO), "edge_attr"),
    "GraphConv": pair(lambda: dnn.GraphConv(5, 6, **ZERO)),
    "NNConv": pair(lambda: dnn.NNConv((5, 5), 4, nn.Linear(3, 20), "mean"), "edge_attr"),
    **{f"SAGEConv {a}": pair(lambda a=a: dnn.SAGEConv((5, 5), 6, a)) for a in ("mean", "gcn", "pool", "lstm")},
    "CFConv": pair(lambda: dnn.CFConv(5, 3, 6, 4), "edge_attr"),
    "EGATConv": pair(lambda: dnn.EGATConv(5, 3, 4, 2, 2), "edge_attr", then=lambda out: out[0]),
    "HeteroGraphConv": (lambda: dnn.HeteroGraphConv({"writes": dnn.SAGEConv((5, 5), 6, "mean")}), _blocks),
    "own": (Own, _own),
}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(CASES, later=(1, 2, 4)))
def test_graph_of_one_direction_equals_the_whole_graph(name, ranks, modes):
    make, call = CASES[name]
    torch.manual_seed(0)
    graph = REACHED if name == "EGATConv" else GRAPH
    assert_exact_in(modes, make().double(), graph, call, sp.dgl.wrap, ranks, sp.Options(chunk_bytes=1000))


def test_what_a_graph_of_one_direction_says_of_itself():
    whole = bipartite(GRAPH.edges)

    def work(comm):
        g = sp.dgl.graph(shard_hetero_in_memory(GRAPH, hetero_assignments(GRAPH, 3)["random"], comm))
        for name in ("ntypes", "srctypes", "dsttypes", "etypes", "canonical_etypes", "is_homogeneous", "is_block"):
            assert getattr(g, name) == getattr(whole, name), name
            assert getattr(g["writes"], name) == getattr(whole["writes"], name), name
        assert set(g.ndata["x"]) == {"author", "paper"} and g.srcdata["x"] is g.nodes["author"].data["x"]
        assert torch.equal(g.ndata[dgl.NID]["paper"], g.dstdata[dgl.NID])
        sums = sp.dgl.sum_nodes(g, "x", ntype="author"), sp.dgl.sum_nodes(g, "x", ntype="paper")
        for kind, found in zip(("author", "paper"), sums):
            torch.testing.assert_close(found[0], GRAPH.node[kind]["x"].sum(0))
        block = g.mfgs({"paper": torch.arange(int(g.num_nodes("paper")))}, 2)[1]
        assert set(block.srctypes) == {"author", "paper"}  # as in DGL, where destinations are sources too
        counts = g.num_src_nodes(), g.num_dst_nodes(), g.num_nodes(), g.num_nodes("author"), g.num_edges()
        return [int(count) for count in counts]

    found = [sum(counts) for counts in zip(*run(work, 3))]
    assert found == [whole.num_src_nodes(), whole.num_dst_nodes(), whole.num_nodes(), whole.num_nodes("author"),
                     whole.num_edges()]  # fmt: skip
