"""DGL's own attention layers take one sharded call; attention that users write themselves is exact without it."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import dgl.ops
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardpass as sp
from shardpass.core.aggregation import autograd as core
from shardpass.testing import assignments, run, shard_in_memory

from .dgl_cases import CONVS, ZERO
from .dgl_parity import GRAPH, assert_dgl_exact, float64, onto_nodes  # noqa: F401
from .how_much import MODES
from .on_ranks import on_ranks

OWNERS = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["random"]


def share(comm, options=None):
    return shard_in_memory(GRAPH, OWNERS % comm.size, comm, options)


@pytest.fixture
def passes(monkeypatch):
    """The attentions that are computed in one pass."""
    found = []
    real = core.run_attention
    monkeypatch.setattr(core, "run_attention", lambda *given: (found.append(given[2]), real(*given))[1])
    return found


LAYERS = ("GATConv", "GATv2Conv", "DotGatConv", "AGNNConv")
FUSED = {name: CONVS[name] for name in CONVS if name.split()[0] in LAYERS}
del FUSED["GATConv weighted"]  # its weights are no softmax any more


@pytest.mark.parametrize("name", FUSED)
def test_layers_that_are_an_attention_take_one_pass(name, passes):
    assert_dgl_exact(FUSED[name], ranks=2, modes=((MODES[[*FUSED].index(name) % 3],),))
    assert len(passes) == 2  # one for each rank


SCORES = {"GATConv": "AdditiveScore", "GATv2Conv": "MixedScore", "DotGatConv": "DotScore"}


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_known_layers_have_a_closed_form(name, passes):
    assert_dgl_exact(FUSED[name], ranks=1, modes=(("sar",),))
    assert [type(attention.score).__name__ for attention in passes] == [SCORES[name]]


class Own(nn.Module):
    """A layer of the user's own; `scores` makes the scores, `between` the weights and what else is returned."""

    def __init__(self, scores="u_add_v", between=lambda m, g, e: (edge_softmax(g, e), None)):
        super().__init__()
        self.lin, self.left, self.right = nn.Linear(5, 6), nn.Linear(5, 2), nn.Linear(5, 2)
        self.mix = nn.Linear(4, 2)
        self.kind, self.between = scores, between

    def scores(self, g):
        if self.kind == "udf":
            g.apply_edges(lambda batch: {"e": self.mix(torch.cat([batch.src["l"], batch.dst["r"]], -1))})
            return F.elu(g.edata.pop("e")).unsqueeze(-1)
        g.apply_edges(fn.u_add_v("l", "r", "e"))
        return F.leaky_relu(g.edata.pop("e"), 0.1).unsqueeze(-1)

    def forward(self, g, x):
        with g.local_scope():
            g.ndata["h"] = self.lin(x).view(len(x), 2, 3)
            g.ndata["l"], g.ndata["r"] = self.left(x), self.right(x)
            weights, more = self.between(self, g, self.scores(g))
            g.edata["a"] = weights
            g.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "o"))
            out = g.ndata["o"].flatten(1)
            return out if more is None else torch.cat([out, onto_nodes(more, g)], 1)


class Derived(dnn.GATConv):
    """A class of the user's own, made of one of DGL's."""

    def forward(self, graph, feat):
        return super().forward(graph, feat).flatten(1)


def changed_in_place(m, g, e):
    e = e * 1.0
    e[:, 0] *= 2
    e += 0.5
    return edge_softmax(g, e), e


def by_kernel(m, g, e):
    sums = dgl.ops.copy_e_sum(g, e.exp())
    return e.exp() / dgl.ops.e_add_v(g, torch.zeros_like(e), sums), e


def weighted(m, g, e):
    return edge_softmax(g, e) * g.edata["edge_weight"].view(-1, 1, 1), None


def over_two_edge_sets(m, g, e):
    g.edata["e"] = e
    g.update_all(fn.copy_e("e", "m"), fn.max("m", "top"))
    g.apply_edges(fn.e_sub_v("e", "top", "z"))
    return edge_softmax(g, g.edata["z"]), g.edata["z"]


OWN = {
    "scores of a user's function": lambda: Own("udf"),
    "derived": lambda: Derived(5, 3, 2, **ZERO),
    **{use.__name__: lambda use=use: Own(between=use) for use in (changed_in_place, by_kernel, weighted)},
    "over_two_edge_sets": lambda: Own(between=over_two_edge_sets),
}


@pytest.mark.parametrize("name", OWN)
def test_attention_that_users_write_is_exact(name, passes):
    def call(m, g, i):
        g.edata["edge_weight"] = i["edge_weight"]
        return m(g, i["x"])

    assert_dgl_exact((OWN[name], call), modes=(("keep",),))
    assert not passes  # it is computed by the calls that it makes


def test_it_is_the_same_without_fusing(passes):
    torch.manual_seed(0)
    model = dnn.GATv2Conv(5, 3, 2, **ZERO).double()

    def work(comm):
        found, counts = [], []
        for fused in (True, False):
            mine = sp.dgl.wrap(copy.deepcopy(model), comm)
            g = sp.dgl.graph(share(comm, sp.Options(fuse_attention=fused)))
            before = comm.calls
            out = mine(g, g.ndata["x"])
            counts.append(comm.calls - before)
            (out * out.detach().cos()).sum().backward()
            found.append([out.detach(), *(p.grad for p in mine.parameters())])
        for one, other in zip(*found):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        return counts

    assert run(work, 3) == [[2, 3]] * 3 and len(passes) == 3  # with the sum of gradients


class Rows(TorchDispatchMode):
    """The largest number of rows of a tensor with columns that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                self.most = max(self.most, tensor.size(0))
        return out


@pytest.mark.parametrize("fused", [True, False])
def test_no_tensor_has_a_row_per_edge(fused):
    def work(comm):
        options = sp.Options(chunk_bytes=512, fuse_attention=fused)
        graph = share(comm, options)
        model = sp.dgl.wrap(dnn.GATConv(5, 3, 2, attn_drop=0.5, **ZERO), comm, check=False)
        model(graph, graph.node["x"]).sum().backward()
        with Rows() as rows:
            model(graph, graph.node["x"]).sum().backward()
        return rows.most, graph.total_nodes, graph.total_edges

    ((most, num_nodes, num_edges),) = run(work, 1)
    assert num_nodes < num_edges and (most <= num_nodes if fused else most == num_edges)


@pytest.mark.parametrize("ranks", [1, 3])
def test_dropped_weights_are_the_same_in_every_use(ranks, passes):
    def work(comm):
        graph = share(comm, sp.Options(chunk_bytes=1000))
        model = sp.dgl.wrap(dnn.GATConv(5, 3, 2, attn_drop=0.5, bias=False, **ZERO), comm)
        x = graph.node["x"].clone().requires_grad_()
        out, weights = model(graph, x, get_attention=True)
        assert (type(weights) is torch.Tensor or comm.size > 1) and ((weights == 0).any() or not len(weights))
        g = sp.dgl.graph(graph)
        g.ndata["h"], g.edata["a"] = model.fc(x).view(len(x), 2, 3), weights
        g.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "o"))
        torch.testing.assert_close(g.ndata["o"], out, rtol=0, atol=1e-12)
        (first,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(g.ndata["o"].square().sum(), x)
        torch.testing.assert_close(second, first, rtol=0, atol=1e-12)
        return int((weights == 0).sum()), weights.numel()

    parts = run(work, ranks)
    share_dropped = sum(dropped for dropped, _ in parts) / sum(count for _, count in parts)
    assert 0.4 < share_dropped < 0.6 and len(passes) == ranks


def test_whatever_reads_weights_gets_them_computed(passes):
    def work(comm):
        graph, model, seen = share(comm), sp.dgl.wrap(dnn.GATConv(5, 3, 2, **ZERO), comm), []
        model.attn_drop.register_forward_hook(lambda module, args, weights: seen.append(weights.detach().sum(0)))
        model(graph, graph.node["x"])
        return seen

    found = run(work, 2)
    num_nodes = int((torch.bincount(GRAPH.edge_index[1]) > 0).sum())
    torch.testing.assert_close(sum(rows for (rows,) in found), torch.full((2, 1), float(num_nodes)))
    assert len(passes) == 2


def test_without_gradients(passes):
    torch.manual_seed(0)
    model = dnn.GATConv(5, 3, 2, **ZERO).double()

    def work(comm):
        graph, mine = share(comm), sp.dgl.wrap(copy.deepcopy(model), comm)
        expected = mine(graph, graph.node["x"]).detach()
        with torch.no_grad():
            torch.testing.assert_close(mine(graph, graph.node["x"]), expected, rtol=0, atol=1e-12)
        with torch.inference_mode():
            torch.testing.assert_close(mine(graph, graph.node["x"]), expected, rtol=0, atol=1e-12)

    run(work, 2)
    assert len(passes) == 6  # in each of three calls on two ranks


def test_blocks_and_typed_graphs(passes):
    torch.manual_seed(0)
    layers = [dnn.GATConv(5, 3, 2, **ZERO).double(), dnn.GATConv(6, 2, 1, **ZERO).double()]
    whole = dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes)
    expected = layers[1](whole, layers[0](whole, GRAPH.node["x"]).flatten(1)).detach()

    def work(comm):
        graph = share(comm)
        g = sp.dgl.graph(graph)
        wanted = torch.arange(0, g.num_nodes(), 3)
        x, blocks = None, g.mfgs(wanted, 2)
        x = blocks[0].srcdata["x"]
        for block, layer in zip(blocks, layers):
            x = sp.dgl.wrap(copy.deepcopy(layer), comm)(block, x).flatten(1)
        torch.testing.assert_close(x, expected.flatten(1)[graph.node_ids[wanted]], rtol=0, atol=1e-12)

    run(work, 2)
    assert len(passes) == 4


def test_recomputed_activations(passes):
    torch.manual_seed(0)
    model = dnn.GATv2Conv(5, 3, 2, activation=torch.tanh, residual=True, **ZERO).double()

    def work(comm):
        graph, found = share(comm), []
        for kept in (None, "activations"):
            mine = sp.dgl.wrap(copy.deepcopy(model), comm, check=False, checkpoint=kept)
            out, weights = mine(graph, graph.node["x"], get_attention=True)
            (out.square().sum() + weights.square().sum()).backward()
            found.append([out.detach(), weights.detach(), *(p.grad for p in mine.parameters())])
        for plain, again in zip(*found):
            torch.testing.assert_close(again, plain, rtol=0, atol=1e-12)

    run(work, 2)
    assert len(passes) == 4


@on_ranks(2)
def test_dropout_between_layers_on_ranks_of_very_different_size(comm):
    """Threads share torch's generator: the large rank is in its dropout while the small one looks at a function."""
    owners = (torch.arange(GRAPH.num_nodes) < 5).long()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                dnn.GATConv(width, 4, 2, feat_drop=0.4, attn_drop=0.4, allow_zero_in_degree=True) for width in (5, 8, 8)
            )

        def forward(self, g, x):
            for layer in self.layers:
                x = layer(g, F.dropout(x, 0.5, self.training)).flatten(1)
            return x

    graph = shard_in_memory(GRAPH, owners, comm)
    model = sp.dgl.wrap(Net().double(), comm, check=False)
    for _ in range(8):
        model(graph, graph.node["x"][:, :5]).sum().backward()
        model.zero_grad()
