"""Things people write that look innocent: exact, or told in words. Each was wrong once."""

import warnings

import dgl
import dgl.function as fn
import dgl.nn as dnn
import pytest
import torch

import shardpass as sp
from shardpass.testing import run, shard_in_memory

from .dgl_parity import GRAPH, float64, whole_graph  # noqa: F401
from .on_ranks import on_ranks


def share(comm, options=None):
    return shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm, options)


def test_random_numbers_in_messages_are_the_same_in_backward_on_threads():
    def work(comm):
        g = sp.dgl.graph(share(comm, sp.Options(chunk_bytes=1000)))
        x = g.ndata["x"].clone().requires_grad_()
        g.ndata["h"] = x

        def message(edges):
            return {"m": edges.src["h"] * torch.bernoulli(torch.full_like(edges.data["edge_weight"], 0.5))[:, None]}

        g.update_all(message, fn.sum("m", "o"))
        total = g.ndata["o"].sum()
        total.backward()
        return float(total), float((x.grad * x.detach()).sum())  # linear in x, so these agree

    for _ in range(5):
        found = run(work, 3)
        assert abs(sum(a for a, _ in found) - sum(b for _, b in found)) < 1e-9


class Unused(torch.nn.Module):
    """A reduction, and a field of edges, of infinite slope that nothing uses: self-loops have distance 0."""

    def __init__(self, packed):
        super().__init__()
        self.packed = packed

    def forward(self, g, x):
        def distance(edges):
            far = (edges.src["h"] - edges.dst["h"]).pow(2).sum(1, keepdim=True).sqrt()
            return {"far": far, "near": edges.src["h"]} if self.packed else {"far": far}

        with g.local_scope():
            g.ndata["h"] = x
            if self.packed:
                g.apply_edges(distance)
                g.update_all(fn.copy_e("near", "m"), fn.sum("m", "o"))
            else:
                g.update_all(distance, fn.sum("far", "unused"))
                g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
            return g.ndata["o"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["sar", "halo"])
@on_ranks(3)
def test_what_the_loss_does_not_reach_gives_no_gradient(comm, packed, mode):
    x = GRAPH.node["x"].clone().requires_grad_()
    Unused(packed)(whole_graph(), x).pow(2).sum().backward()
    assert x.grad.isfinite().all()
    graph = share(comm, sp.Options(mode=mode))
    mine = GRAPH.node["x"][graph.node_ids].clone().requires_grad_()
    sp.dgl.wrap(Unused(packed), comm)(graph, mine).pow(2).sum().backward()
    torch.testing.assert_close(mine.grad, x.grad[graph.node_ids], rtol=0, atol=1e-10)


@on_ranks(2)
def test_egnn_without_its_coordinates(comm):
    graph = share(comm)
    conv = dnn.EGNNConv(5, 6, 5)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, g, h, x):
            return self.conv(g, h, x)[0]

    out = sp.dgl.wrap(Net(), comm)(graph, graph.node["x"], graph.node["x"][:, :3].clone().requires_grad_())
    out.sum().backward()


class Memory(torch.nn.Module):
    """Leaves a field on the graph for the next call."""

    def __init__(self):
        super().__init__()
        self.conv = dnn.GraphConv(5, 5, allow_zero_in_degree=True)

    def forward(self, g, x):
        h = self.conv(g, x)
        if "before" in g.ndata:
            h = 0.5 * h + 0.5 * g.ndata["before"]
        g.ndata["before"] = h.detach()
        return h


def test_fields_that_forward_leaves_on_the_graph_stay():
    model, g = Memory(), whole_graph()
    expected = []
    for step in range(3):
        with torch.no_grad():
            model.conv.weight.fill_(0.1 * (step + 1))
        expected.append(model(g, GRAPH.node["x"]).detach())

    def work(comm):
        graph, mine = share(comm), sp.dgl.wrap(Memory(), comm)
        for step in range(3):
            with torch.no_grad():
                mine.conv.weight.fill_(0.1 * (step + 1))
            out = mine(graph, graph.node["x"]).detach()
            torch.testing.assert_close(out, expected[step][graph.node_ids], rtol=0, atol=1e-12)

    run(work, 2)


@on_ranks(2)
def test_what_is_written_into_the_data_of_a_block_stays(comm):
    g = sp.dgl.graph(share(comm))
    block = g.mfgs(torch.arange(g.num_nodes()), 1)[0]
    block.srcdata["x"][:] = 1.0
    block.srcdata["x"].requires_grad_()
    assert block.srcdata["x"] is block.srcdata["x"] and (block.srcdata["x"] == 1).all()
    block.update_all(fn.copy_u("x", "m"), fn.sum("m", "o"))
    block.dstdata["o"].sum().backward()
    assert block.srcdata["x"].grad is not None


class Centred(torch.nn.Module):
    """Wrong on a sharded graph: a mean over own rows."""

    def __init__(self):
        super().__init__()
        self.conv = dnn.GraphConv(5, 5, allow_zero_in_degree=True)

    def forward(self, g, x):
        h = self.conv(g, x)
        return h - h.mean(0)


class Readout(Centred):
    """The mean over all nodes, by the function that is there for it; and original ids."""

    def forward(self, g, x):
        with g.local_scope():
            g.ndata["h"] = self.conv(g, x)
            return g.ndata["h"] - sp.dgl.mean_nodes(g, "h") + 0 * g.ndata[dgl.NID].view(-1, 1)


class Global(Centred):
    """The mean over the nodes of all ranks, by the communicator that the model holds."""

    comm = None

    def forward(self, g, x):
        h = self.conv(g, x)
        return h - sp.all_reduce_sum(h.sum(0), self.comm) / sp.total(len(h), self.comm)


@pytest.mark.parametrize(("make", "ranks"), [(Readout, 3), (Global, 1), (Global, 3)])
def test_means_over_all_ranks_run_in_the_check(make, ranks):
    def work(comm):
        model = make()
        model.comm = comm
        graph, model = share(comm), sp.dgl.wrap(model, comm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return model(graph, graph.node["x"]).detach()

    assert float(torch.cat(run(work, ranks)).mean(0).abs().max()) < 1e-12
