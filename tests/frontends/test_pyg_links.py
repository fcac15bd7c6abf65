"""Link prediction on the whole graph: PyG's autoencoders, DGI and decoders, against plain PyG with the same pairs."""

import copy
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.core.sampling.permutation import shuffled
from shardpass.errors import RefusedError
from shardpass.testing import (
    awkward_hetero_graph,
    hetero_assignments,
    run,
    shard_hetero_in_memory,
    shard_in_memory,
)

from .how_much import owned_in_turn
from .model_cases import Variational
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "link_prediction.py"))
N, TYPES = GRAPH.num_nodes, awkward_hetero_graph()
PAIRS = torch.randint(0, N, (2, 4, 37), generator=torch.Generator().manual_seed(3))
POS, NEG = PAIRS[:, 0], PAIRS[:, 1]


class Decoder(nn.Module):
    """An MLP on both ends, as a user writes it."""

    def __init__(self):
        super().__init__()
        self.mlp = gnn.MLP([8, 6, 1], norm="batch_norm", plain_last=False)

    def forward(self, z, edge_label_index, sigmoid=True):
        src, dst = edge_label_index
        value = self.mlp(torch.cat([z[src], z[dst]], dim=-1)).view(-1)
        return value.sigmoid() if sigmoid else value


class Net(nn.Module):
    """The encoder and decoder of PyG's example of link prediction, with its methods."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.GCNConv(5, 4)

    def encode(self, x, edge_index):
        return self.conv(x, edge_index).relu()

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)

    def forward(self, x, edge_index, edge_label_index):
        return self.decode(self.encode(x, edge_index), edge_label_index)


def bce(scores, labels, comm):
    losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return losses.mean() if comm is None else sp.mean(losses, None, comm)


def net(model, x, graph, pos, neg, comm):
    """Labels beside pairs; the decoder as a method that is called from outside."""
    pairs = torch.cat([pos, neg], dim=1)
    labels = torch.cat([torch.ones(pos.size(1)), torch.zeros(neg.size(1))]).double()
    z = model.encode(x, graph if comm is None else graph.edge_index)
    return bce(model(x, graph, pairs), labels, comm) + bce(model.decode(z, pairs), labels, comm)


def infomax(model, x, graph, pos, neg, comm):
    if comm is None:
        order = torch.from_numpy(shuffled(np.arange(N), N, 4))
        model.corruption = lambda x, edge_index: (x[order], edge_index)
        model.summary = lambda z, *args: z.mean(0).sigmoid()
    else:
        model.corruption = lambda x, edge_index: (sp.rows(graph, x, sp.permuted_ids(graph, 4)), edge_index)
        model.summary = lambda z, *args: gnn.global_mean_pool(z, graph.batch).sigmoid()
    return model.loss(*model(x, graph))


LOSSES = {
    "GAE": (lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4)), lambda m, x, g, p, n, c: m.recon_loss(m.encode(x, g), p, n)),
    "GAE of the graph": (
        lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4)),
        lambda m, x, g, p, n, c: m.recon_loss(m.encode(x, g), g, n),
    ),
    "VGAE": (
        lambda: gnn.VGAE(Variational()).eval(),
        lambda m, x, g, p, n, c: m.recon_loss(m.encode(x, g), p, n) + m.kl_loss() / N,
    ),
    "GAE decoder": (
        lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4), Decoder()),
        lambda m, x, g, p, n, c: m.recon_loss(m.encode(x, g), p, n),
    ),
    "own classes": (Net, net),
    "the example": (
        lambda: EXAMPLE["Net"](5),
        lambda m, x, g, p, n, c: bce(m(x, g, p), torch.ones(p.size(1)).double(), c),
    ),
    "LightGCN": (
        lambda: gnn.LightGCN(N, 5, 2),
        lambda m, x, g, p, n, c: bce(m(g, torch.cat([p, n], 1)), torch.ones(p.size(1) + n.size(1)).double(), c),
    ),
    "SignedGCN": (
        lambda: gnn.SignedGCN(5, 8, 2),
        lambda m, x, g, p, n, c: bce(m.discriminate(m(x, g, g), p)[:, 0], torch.ones(p.size(1)).double(), c),
    ),
    "DeepGraphInfomax": (lambda: gnn.DeepGraphInfomax(4, gnn.GCN(5, 8, 2, 4), None, None), infomax),
}


@pytest.mark.parametrize(("name", "ranks", "owned"), owned_in_turn(LOSSES))
def test_losses_over_pairs_are_those_of_the_whole_graph(name, ranks, owned):
    make, loss_of = LOSSES[name]
    torch.manual_seed(0)
    plain = make().double()
    whole, x = copy.deepcopy(plain), GRAPH.node["x"].clone().requires_grad_()
    expected = loss_of(whole, x, GRAPH.edge_index, POS, NEG, None)
    expected.backward()

    def work(comm):
        graph = share(GRAPH, comm, owned)
        model = copy.deepcopy(plain)
        if name == "LightGCN":
            model.embedding = sp.NodeEmbedding(graph, 5).double()
            model.embedding.weight.data = plain.embedding.weight.data[graph.node_ids].clone()
        model = sp.pyg.wrap(model, comm)
        own = graph.x.clone().requires_grad_()
        ends = [sp.node_ids(graph, pairs[:, comm.rank :: comm.size]) for pairs in (POS, NEG)]
        loss = loss_of(model, own, graph, *ends, comm)
        loss.backward()
        return loss.detach(), own.grad, [(n, p.grad) for n, p in model.named_parameters()], graph.node_ids

    for loss, grad, grads, ids in run(work, ranks):
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
        if x.grad is not None:
            torch.testing.assert_close(grad, x.grad[ids], rtol=0, atol=1e-10)
        for (key, mine), parameter in zip(grads, whole.parameters()):
            theirs = parameter.grad[ids] if name == "LightGCN" and key.startswith("embedding") else parameter.grad
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


class Ratings(nn.Module):
    """The classifier of PyG's tutorial on links of two types."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.HeteroConv({kind: gnn.SAGEConv((5, 5), 4) for kind in TYPES.edges})

    def forward(self, x_dict, edge_index_dict, edge_label_index):
        h = self.conv(x_dict, edge_index_dict)
        src, dst = edge_label_index
        return (h["author"][src] * h["paper"][dst]).sum(dim=-1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_links_between_two_types(ranks):
    torch.manual_seed(0)
    plain = Ratings().double()
    whole = copy.deepcopy(plain)
    src, dst = (torch.randint(0, TYPES.num_nodes[kind], (50,)) for kind in ("author", "paper"))
    expected = whole({kind: fields["x"] for kind, fields in TYPES.node.items()}, TYPES.edges, (src, dst))
    expected.tanh().mean().backward()

    def work(comm):
        graph = shard_hetero_in_memory(TYPES, hetero_assignments(TYPES, ranks)["random"], comm)
        model, share = sp.pyg.wrap(copy.deepcopy(plain), comm), slice(comm.rank, None, comm.size)
        ends = sp.node_ids(graph, src[share], "author"), sp.node_ids(graph, dst[share], "paper")
        scores = model(graph.x_dict, graph, ends)
        sp.mean(scores.tanh(), None, comm).backward()
        sp.sync_gradients(model, comm)
        return scores.detach(), [p.grad for p in model.parameters()]

    for rank, (scores, grads) in enumerate(run(work, ranks)):
        torch.testing.assert_close(scores, expected[rank::ranks].detach(), rtol=0, atol=1e-10)
        for grad, parameter in zip(grads, whole.parameters()):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-10)


@on_ranks(3)
def test_metrics_of_an_autoencoder(comm):
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    plain = gnn.GAE(gnn.GCN(5, 8, 2, 4)).double()
    expected = plain.test(plain.encode(GRAPH.node["x"], GRAPH.edge_index), POS, NEG)
    graph = shard_in_memory(GRAPH, torch.arange(N) % 3, comm)
    model = sp.pyg.wrap(copy.deepcopy(plain), comm)
    ends = [sp.node_ids(graph, pairs[:, comm.rank :: 3]) for pairs in (POS, NEG)]
    found = model.test(model.encode(graph.x, graph), *ends)
    assert found == pytest.approx(expected, abs=1e-12)


def test_an_autoencoder_draws_its_own_negatives():
    """They differ from call to call. Those of a seed are the same on any number of ranks."""

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(N) % comm.size, comm)
        with sp.seed(0, comm):
            model = gnn.GAE(gnn.GCN(5, 8, 2, 4)).double()
        model = sp.pyg.wrap(model, comm)
        z = model.encode(graph.x, graph)
        negatives = sp.node_ids(graph, sp.negative_sampling(graph, seed=7))
        return model.recon_loss(z, graph, negatives).detach(), model.recon_loss(z, graph).detach()

    (alone, drawn), (shared, _), *_ = run(work, 1) + run(work, 3)
    torch.testing.assert_close(alone, shared, rtol=0, atol=1e-10)
    assert 0.2 < drawn < 20


class Centred(Decoder):
    def forward(self, z, edge_label_index, sigmoid=True):
        value = super().forward(z, edge_label_index, sigmoid)
        return value - value.mean()


def own_shuffled(x, edge_index):
    return x[torch.randperm(x.size(0))], edge_index


REFUSED = {
    "a decoder that averages": (
        lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4), Centred()),
        lambda m, g, ids: m.recon_loss(m.encode(g.x, g), ids, ids),
        r"test_pyg_links.py:\d+: return value - value.mean\(\): `mean` puts rows together, over the fetched rows",
    ),
    "plain ids": (
        Net,
        lambda m, g, ids: m(g.x, g, POS),
        r"test_pyg_links.py:\d+: return \(z\[edge_.*do not come from the graph.*shardpass.node_ids\(graph, ids\)",
    ),
    "plain ids of GAE": (
        lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4)),
        lambda m, g, ids: m.recon_loss(m.encode(g.x, g), POS, ids),
        r"`edge_index` must be left out, be the graph, or come from shardpass.node_ids\(graph, ids\)",
    ),
    "negatives of pairs": (
        lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4)),
        lambda m, g, ids: m.recon_loss(m.encode(g.x, g), ids),
        r"draws pairs that are not among pos_edge_index.*shardpass.negative_sampling\(graph\)",
    ),
    "own nodes shuffled": (
        lambda: gnn.DeepGraphInfomax(4, gnn.GCN(5, 8, 2, 4), lambda z, *args: z[:, 0], own_shuffled),
        lambda m, g, ids: m(g.x, g),
        r"test_pyg_links.py:\d+: return x\[torch.randperm.*do not come from the graph.*shardpass.node_ids",
    ),
    "own nodes averaged": (
        lambda: gnn.DeepGraphInfomax(4, gnn.GCN(5, 8, 2, 4), lambda z, *args: z.mean(0), lambda x, e: (x * 2, e)),
        lambda m, g, ids: m(g.x, g),
        r"test_pyg_links.py:\d+: .*`mean` puts rows together, over the nodes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_mixes_is_refused_at_its_line(comm, name):
    make, call, words = REFUSED[name]
    graph = shard_in_memory(GRAPH, torch.arange(N) % 2, comm)
    with pytest.raises(RefusedError, match=words):
        call(sp.pyg.wrap(make().double(), comm), graph, sp.node_ids(graph, POS))
