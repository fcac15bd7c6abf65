"""Following rows through a wrapped DGL model: what treats rows one by one is exact, the rest is refused."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing.graphs import awkward_graph, shard_in_memory
from shardpass.testing.run import run

GRAPH = awkward_graph(channels=5, edge_channels=3)


class Net(nn.Module):
    """A model whose `between` is a program between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = dnn.GraphConv(5, 8, allow_zero_in_degree=True), dnn.SAGEConv(8, 4, "mean")
        self.score, self.edge, self.bn = nn.Linear(16, 1), nn.Linear(3, 8), nn.BatchNorm1d(8)

    def forward(self, g, x):
        with g.local_scope():
            return self.last(g, self.between(g, self.first(g, x)))


class Attention(Net):
    def between(self, g, h):
        g.ndata["z"] = h
        g.apply_edges(lambda e: {"s": F.leaky_relu(self.score(torch.cat([e.src["z"], e.dst["z"]], 1)))})
        g.edata["a"] = edge_softmax(g, g.edata["s"])
        g.update_all(fn.u_mul_e("z", "a", "m"), fn.sum("m", "o"))
        return g.ndata["o"]


class Degrees(Net):
    def between(self, g, h):
        scale = g.in_degrees().to(h).clamp(min=1).pow(-0.5).unsqueeze(1)
        g.ndata["h"] = h * scale
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
        return g.ndata["h"] * scale * g.out_degrees().to(h).clamp(min=1).rsqrt().view(-1, 1)


class Reached(Net):
    """Asks whether any node has no in-edge, which is the same on every rank, and writes into degrees."""

    def between(self, g, h):
        if (g.in_degrees() == 0).any() and torch.any(g.in_degrees(etype="_E").eq(0)):
            h = h * 2
        in_degrees, out_degrees = g.in_degrees(), g.out_degrees()
        in_degrees[in_degrees == 0] = 7
        out_degrees.clamp_(min=3)
        g.ndata["h"] = h / in_degrees.unsqueeze(1)
        g.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
        return g.ndata["h"] * g.in_degrees().unsqueeze(1) / (g.out_degrees() + 1).unsqueeze(1)


class Large(Net):
    """Branches on the size of the whole graph, which is above what a rank has."""

    def between(self, g, h):
        if g.num_nodes() > 20 and not g.num_edges() <= 100 and min(15, g.num_nodes()) == 15:
            h = h * 2
        return h[:, : min(8, g.number_of_nodes())]


class Gated(Net):
    def between(self, g, h):
        g.ndata["h"] = h
        g.update_all(lambda e: {"m": e.src["h"] * torch.sigmoid(self.edge(e.data["edge_attr"]))}, fn.sum("m", "o"))
        return g.ndata["o"]


class Mailbox(Net):
    def between(self, g, h):
        g.ndata["h"] = h
        g.update_all(fn.copy_u("h", "m"), lambda n: {"o": n.mailbox["m"].mean(1) + n.data["h"]})
        g.apply_nodes(lambda n: {"o": n.data["o"].relu()})
        return g.ndata["o"]


class Weighted(Net):
    def between(self, g, h):
        g.edata["w"] = self.edge(g.edata["edge_attr"]).sum(1, keepdim=True).sigmoid()
        g.ndata["h"] = h
        g.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "o"))
        return self.bn(g.ndata["o"])


class Kernel(Net):
    def between(self, g, h):
        return h + dgl.ops.copy_e_sum(g, g.edata["edge_weight"].view(-1, 1))


class InOrder(Net):
    def between(self, g, h):
        return h[torch.arange(g.num_nodes())]


class Mean(Net):
    words = "`mean` puts rows together, over the nodes"

    def between(self, g, h):
        return h - h.mean(0)


class EdgeMean(Net):
    words = "`mean` puts rows together, over the edges"

    def between(self, g, h):
        return h * (g.edata["edge_weight"] / g.edata["edge_weight"].mean()).sum()


class MessageMean(Net):
    words = "`mean` puts rows together, over the edges of the message function"

    def between(self, g, h):
        g.ndata["h"] = h
        g.update_all(lambda e: {"m": e.src["h"] - e.src["h"].mean(0)}, fn.sum("m", "o"))
        return g.ndata["o"]


class MailboxMean(Net):
    words = "`mean` puts rows together, over the nodes of one in-degree"

    def between(self, g, h):
        g.ndata["h"] = h
        g.update_all(fn.copy_u("h", "m"), lambda n: {"o": n.mailbox["m"].sum(1) - n.mailbox["m"].mean((0, 1))})
        return g.ndata["o"]


class MailboxSize(Net):
    words = "the number of nodes of one in-degree that this rank holds"

    def between(self, g, h):
        g.ndata["h"] = h
        g.update_all(fn.copy_u("h", "m"), lambda n: {"o": n.mailbox["m"].sum(1) / n.batch_size()})
        return g.ndata["o"]


class MailboxBranch(MailboxSize):
    def between(self, g, h):
        g.ndata["h"] = h
        g.update_all(fn.copy_u("h", "m"), lambda n: {"o": n.mailbox["m"].sum(1) * (2 if n.batch_size() > 2 else 1)})
        return g.ndata["o"]


class Quotient(Net):
    words = "the number of nodes that this rank holds"

    def between(self, g, h):
        return h / g.num_nodes()


class Degree(Net):
    words = "the number of edges that this rank holds"

    def between(self, g, h):
        return h * (2 * (g.num_edges() - g.num_nodes()) + 1)


class Share(Net):
    words = "the number of nodes that this rank holds"

    def between(self, g, h):
        return h * (g.num_nodes() * 0.1)


def results(kind):
    """What the model gives on each of three ranks, with the ids of the rows."""
    torch.manual_seed(0)
    plain = kind().double().eval()

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm)
        model = sp.dgl.wrap(copy.deepcopy(plain), comm).eval()
        return model(graph, graph.node["x"]).detach(), graph.node_ids

    return plain, run(work, 3)


@pytest.mark.filterwarnings("ignore:a user-defined reduce function")
@pytest.mark.parametrize("kind", [Attention, Degrees, Reached, Large, Gated, Mailbox, Weighted, Kernel, InOrder])
def test_what_treats_rows_one_by_one_is_exact(kind):
    plain, found = results(kind)
    whole = dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes)
    whole.ndata.update(GRAPH.node)
    whole.edata.update(GRAPH.edge)
    expected = plain(whole, GRAPH.node["x"]).detach()
    for out, ids in found:
        torch.testing.assert_close(out, expected[ids], rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:a user-defined reduce function")
@pytest.mark.parametrize(
    "kind", [Mean, EdgeMean, MessageMean, MailboxMean, MailboxSize, MailboxBranch, Quotient, Degree, Share]
)
def test_what_mixes_rows_is_refused(kind):
    with pytest.raises(RefusedError, match=kind.words):
        results(kind)
