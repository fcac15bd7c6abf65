"""Following rows through a wrapped DGL model: what treats rows one by one is exact, the rest is refused."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, run

from .dgl_parity import GRAPH, whole_graph
from .on_ranks import on_ranks, share

BATCHED = WholeGraph(41, GRAPH.edge_index, {**GRAPH.node, "batch": torch.arange(41) % 3}, {})


class Net(nn.Module):
    """A program between two layers."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = dnn.GraphConv(5, 8, allow_zero_in_degree=True), dnn.SAGEConv(8, 4, "mean")
        self.between = between

    def forward(self, g, x):
        with g.local_scope():
            g.ndata["h"] = self.first(g, x)
            return self.last(g, self.between(self, g, g.ndata["h"]))


def summed(g, message, reducer=fn.sum("m", "o")):  # noqa: B008
    g.update_all(message, reducer)
    return g.ndata["o"]


def degrees(m, g, h):
    scale = g.in_degrees().to(h).clamp(min=1).pow(-0.5).unsqueeze(1)
    g.ndata["h"] = h * scale
    return summed(g, fn.copy_u("h", "m")) * scale * g.out_degrees().to(h).clamp(min=1).rsqrt().view(-1, 1)


def reached(m, g, h):
    """Asks whether any node has no in-edge, which is the same on every rank, and writes into degrees."""
    if (g.in_degrees() == 0).any() and torch.any(g.in_degrees(etype="_E").eq(0)):
        h = h * 2
    in_degrees, out_degrees = g.in_degrees(), g.out_degrees()
    in_degrees[in_degrees == 0] = 7
    out_degrees.clamp_(min=3)
    g.ndata["h"] = h / in_degrees.unsqueeze(1)
    means = summed(g, fn.copy_u("h", "m"), fn.mean("m", "o"))
    return means * g.in_degrees().unsqueeze(1) / (g.out_degrees() + 1).unsqueeze(1)


def large(m, g, h):
    """Branches on the size of the whole graph, which is above what a rank has."""
    if g.num_nodes() > 20 and not g.num_edges() <= 100 and min(15, g.num_nodes()) == 15:
        h = h * 2
    return h[:, : min(8, g.number_of_nodes())]


EXACT = {"degrees": degrees, "reached": reached, "large": large} | {
    "in order": lambda m, g, h: h[torch.arange(g.num_nodes())]
}


def results(between):
    """What the model gives on each of three ranks, with the ids of the rows."""
    torch.manual_seed(0)
    plain = Net(between).double().eval()

    def work(comm):
        graph = share(GRAPH, comm, torch.arange(41) % comm.size)
        model = sp.dgl.wrap(copy.deepcopy(plain), comm).eval()
        return model(graph, graph.node["x"]).detach(), graph.node_ids

    return plain, run(work, 3)


@pytest.mark.filterwarnings("ignore:a user-defined reduce function")
@pytest.mark.parametrize("name", EXACT)
def test_what_treats_rows_one_by_one_is_exact(name):
    plain, found = results(EXACT[name])
    expected = plain(whole_graph(), GRAPH.node["x"]).detach()
    for out, ids in found:
        torch.testing.assert_close(out, expected[ids], rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_a_graph_has_the_numbers_that_refusals_name(comm):
    graph = sp.dgl.graph(share(GRAPH, comm))
    assert graph.total_nodes == GRAPH.num_nodes and graph.total_edges == GRAPH.edge_index.size(1)
    assert graph.to("cpu") is graph and graph.long() is graph and graph.create_formats_() is None


@on_ranks(2)
def test_readouts_refuse_a_graph_made_of_several(comm):
    graph = sp.dgl.graph(share(BATCHED, comm))
    for readout in (sp.dgl.sum_nodes, sp.dgl.mean_nodes, sp.dgl.max_nodes, sp.dgl.softmax_nodes):
        with pytest.raises(RefusedError, match="stores a node field 'batch'"):
            readout(graph, "x")
    pooled = pytest.importorskip("torch_geometric").nn.global_add_pool(graph.ndata["x"], graph.batch)
    expected = torch.stack([GRAPH.node["x"][BATCHED.node["batch"] == k].sum(0) for k in range(3)])
    assert torch.allclose(pooled, expected)


def test_a_node_type_may_be_called_node(tmp_path):
    """Nodes of a graph of one type are called so in the engine, and `_N` in DGL; those of several keep their names."""
    src, dst = GRAPH.edge_index
    types = {("node", "a", "node"): (src, dst), ("node", "b", "node"): (dst, src)}
    whole = dgl.heterograph(types, num_nodes_dict={"node": 41})
    whole.ndata["x"] = GRAPH.node["x"]
    sp.partition(whole, tmp_path / "parts", parts=2, method="random")

    def work(comm):
        loaded = sp.load(tmp_path / "parts", comm)
        graph = sp.dgl.graph(loaded)
        assert graph.ntypes == ["node"] and graph["a"].canonical_etypes == [("node", "a", "node")]
        with graph["a"].local_scope() as _:
            part = graph["a"]
            part.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "s"))
            return sp.gather(loaded, part.ndata["s"], "node")

    expected = torch.zeros_like(GRAPH.node["x"]).index_add(0, dst, GRAPH.node["x"][src])
    assert torch.allclose(run(work, 2)[0], expected)
