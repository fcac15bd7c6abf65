"""Message-flow graphs: blocks of a sharded graph against DGL's own ``to_block``, layer by layer and as a whole."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
from torch import nn

import shardpass as sp
from shardpass.testing import assignments, cotangent, run, shard_in_memory

from .dgl_cases import ZERO
from .dgl_parity import GRAPH, float64  # noqa: F401
from .how_much import ONE_TO_FOUR, in_turn
from .test_dgl_graph import sharded

WANTED = torch.zeros(GRAPH.num_nodes, dtype=torch.bool)
WANTED[[0, 3, 7, 20, 39, 40]] = True  # a hub, nodes with ties, an isolated one


class TwoLayers(nn.Module):
    """A model of two blocks."""

    def __init__(self, first, second, weighted=False):
        super().__init__()
        self.first, self.second, self.weighted = first, second, weighted

    def forward(self, blocks, x):
        for layer, block in ((self.first, blocks[0]), (self.second, blocks[1])):
            extra = {"edge_weight": block.edata["edge_weight"]} if self.weighted else {}
            x = layer(block, x, **extra).flatten(1).tanh()
        return x


class Udf(nn.Module):
    """A layer with functions of its own: parameters in messages, whole mailboxes, edges."""

    def __init__(self, width, out):
        super().__init__()
        self.lin, self.self = nn.Linear(width, out), nn.Linear(width, out)

    def forward(self, block, x):
        with block.local_scope():
            block.srcdata["x"], block.dstdata["x"] = x, x[: block.num_dst_nodes()]
            block.apply_edges(lambda e: {"a": (e.src["x"] * e.dst["x"]).sum(1, keepdim=True).tanh()})
            block.update_all(lambda e: {"m": self.lin(e.src["x"]) * e.data["a"]}, fn.max("m", "out"))
            block.update_all(
                lambda e: {"m": self.lin(e.src["x"])}, lambda n: {"all": n.mailbox["m"].cumsum(1).logsumexp(1)}
            )
            return block.dstdata["out"] + block.dstdata["all"] + self.self(block.dstdata["x"])


def _edge_conv(width, out):
    return dnn.EdgeConv(width, out, **ZERO)


MODELS = {
    "SAGE mean": lambda: TwoLayers(dnn.SAGEConv(5, 6, "mean"), dnn.SAGEConv(6, 4, "gcn")),
    "SAGE pool lstm": lambda: TwoLayers(dnn.SAGEConv(5, 6, "pool"), dnn.SAGEConv(6, 4, "lstm")),
    "GAT": lambda: TwoLayers(dnn.GATConv(5, 3, 2, residual=True, **ZERO), dnn.GATConv(6, 2, 2, **ZERO)),
    "GATv2": lambda: TwoLayers(dnn.GATv2Conv(5, 3, 2, **ZERO), dnn.GATv2Conv(6, 2, 2, residual=True, **ZERO)),
    "GraphConv": lambda: TwoLayers(dnn.GraphConv(5, 6, **ZERO), dnn.GraphConv(6, 4, norm="right", **ZERO)),
    "GraphConv weighted": lambda: TwoLayers(dnn.GraphConv(5, 6, **ZERO), dnn.GraphConv(6, 4, **ZERO), weighted=True),
    "GIN EdgeConv": lambda: TwoLayers(dnn.GINConv(nn.Linear(5, 6), "max"), _edge_conv(6, 4)),
    "DotGat AGNN": lambda: TwoLayers(dnn.DotGatConv(5, 3, 2, **ZERO), dnn.AGNNConv(**ZERO)),
    "functions of users": lambda: TwoLayers(Udf(5, 6), Udf(6, 4)),
}


def whole_blocks(wanted, num_layers):
    """DGL's blocks of the whole graph, with edge weights."""
    graph = dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes)
    graph.edata["edge_weight"] = GRAPH.edge["edge_weight"]
    blocks = []
    for _ in range(num_layers):
        cut = dgl.in_subgraph(graph, wanted)
        block = dgl.to_block(cut, wanted)
        block.edata["edge_weight"] = cut.edata["edge_weight"][block.edata[dgl.EID]]
        blocks.insert(0, block)
        wanted = block.srcdata[dgl.NID]
    return blocks


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(MODELS))
def test_blocks_give_what_dgls_blocks_give(name, ranks, modes):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    blocks = whole_blocks(WANTED.nonzero().view(-1), 2)
    x, mine = GRAPH.node["x"].clone().requires_grad_(), copy.deepcopy(model)
    out = mine(blocks, x[blocks[0].srcdata[dgl.NID]])
    weights = cotangent(torch.empty(GRAPH.num_nodes, out.size(1)))
    expected = torch.zeros_like(weights)
    expected[blocks[-1].dstdata[dgl.NID]] = out.detach()
    (out * weights[blocks[-1].dstdata[dgl.NID]]).sum().backward()

    def work(comm, owners, mode):
        wrapped = sp.dgl.wrap(copy.deepcopy(model), comm)
        graph = sp.dgl.graph(shard_in_memory(GRAPH, owners, comm, sp.Options(mode=mode, chunk_bytes=1000)))
        own = graph.ndata["x"].clone().requires_grad_()
        graph.ndata["x"] = own
        blocks = graph.mfgs(WANTED[graph.ndata[dgl.NID]], 2)
        out = wrapped(blocks, blocks[0].srcdata["x"])
        ids = blocks[-1].dstdata[dgl.NID]
        (out * weights[ids]).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in wrapped.parameters()]
        grad = torch.zeros_like(own) if own.grad is None else own.grad
        return ids, out.detach(), graph.ndata[dgl.NID], grad, grads

    for (where, owners), several in zip(assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).items(), modes):
        for mode in several:
            results = run(work, ranks, args=(owners, mode))
            found, gradient = torch.zeros_like(expected), torch.full_like(x, float("nan"))
            for ids, out, nodes, grad, _ in results:
                found[ids], gradient[nodes] = out, grad
            close = {"rtol": 0, "atol": 1e-10, "msg": lambda text: f"{name}, {ranks} ranks, {where}, {mode}: {text}"}  # noqa: B023
            torch.testing.assert_close(found, expected, **close)
            torch.testing.assert_close(gradient, x.grad, **close)
            for k, parameter in enumerate(mine.parameters()):
                for result in results:
                    torch.testing.assert_close(result[4][k], parameter.grad, **close)


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
def test_blocks_hold_the_nodes_and_edges_of_dgls(ranks):
    expected = whole_blocks(WANTED.nonzero().view(-1), 3)
    whole = dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes)

    def work(comm, owners):
        graph = sp.dgl.graph(shard_in_memory(GRAPH, owners, comm))
        graph.ndata["made"], graph.edata["made"] = graph.ndata["x"] * 2, graph.edata["edge_weight"] * 3
        blocks = graph.mfgs(WANTED[graph.ndata[dgl.NID]], 3)
        for block, above in zip(blocks, [*blocks[1:], None]):
            sources, destinations = block.srcdata[dgl.NID], block.dstdata[dgl.NID]
            assert block.is_block and not block.is_homogeneous
            assert torch.equal(sources[: block.num_dst_nodes()], destinations), "destinations first among the sources"
            assert above is None or torch.equal(above.srcdata[dgl.NID], destinations)
            assert torch.equal(block.srcdata["made"], GRAPH.node["x"][sources] * 2)
            assert torch.equal(block.edata["made"], GRAPH.edge["edge_weight"][block.edata[dgl.EID]] * 3)
            assert torch.equal(block.in_degrees(), whole.in_degrees()[destinations])
        return [(b.srcdata[dgl.NID], b.dstdata[dgl.NID], b.edata[dgl.EID], b.out_degrees()) for b in blocks]

    for owners in assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).values():
        for block, parts in zip(expected, zip(*run(work, ranks, args=(owners,)))):
            sources, destinations, edges, degrees = (torch.cat(rows) for rows in zip(*parts))
            assert torch.equal(sources.sort()[0], block.srcdata[dgl.NID].sort()[0])
            assert torch.equal(destinations.sort()[0], block.dstdata[dgl.NID].sort()[0])
            ids = dgl.in_subgraph(whole, block.dstdata[dgl.NID]).edata[dgl.EID]
            assert torch.equal(edges.sort()[0], ids.sort()[0])
            assert torch.equal(degrees[sources.argsort()], block.out_degrees()[block.srcdata[dgl.NID].argsort()])


def test_the_order_of_the_wanted_nodes_is_kept_and_none_may_be_wanted():
    def work(g, comm):
        wanted = torch.arange(g.num_nodes()).flip(0)[:3]
        first, last = g.mfgs(wanted if comm.rank == 0 else [], 2)
        assert torch.equal(last.dstdata[dgl.NID], g.ndata[dgl.NID][wanted if comm.rank == 0 else []])
        again = g.mfgs(wanted.tolist(), 1, keep_seeds=False)[0]
        assert again.num_src_nodes() <= g.num_nodes()
        last.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
        return int(first.num_edges()) + int(last.num_edges())

    assert sum(sharded(work)) > 0


def test_counts_of_a_block_speak_for_all_ranks():
    """Wanted nodes on one rank only: no branch of a layer may differ between ranks."""

    def work(g, comm):
        block = g.mfgs(torch.arange(3) if comm.rank == 1 else [], 1)[0]
        assert block.num_dst_nodes() == (3 if comm.rank == 1 else 0)
        asked = (block.num_dst_nodes() > 0, block.num_edges() > 0, bool(block.num_edges()))
        assert asked == (True, True, True) and torch.zeros(block.num_dst_nodes(), 2).size(0) in (0, 3)

    sharded(work, torch.arange(41) % 3)
