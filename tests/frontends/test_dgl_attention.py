"""Attention of DGL layers in one sharded call: which layers get it; any other use of edge data is as before."""

from __future__ import annotations

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
from shardpass.core.aggregation import sharded_call as core
from shardpass.errors import RefusedError
from shardpass.testing.graphs import assignments, shard_in_memory
from shardpass.testing.run import run

from .dgl_cases import CONVS, ZERO
from .dgl_parity import GRAPH, UNCHECKED, edges, float64, largest_error, onto_nodes  # noqa: F401
from .ranks import ONE_TO_FOUR

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


class Own(nn.Module):
    """A layer of the user's own; `scores` makes the scores, `between` changes what it is about."""

    def __init__(self, scores="u_add_v", between=None):
        super().__init__()
        self.lin, self.left, self.right = nn.Linear(5, 6), nn.Linear(5, 2), nn.Linear(5, 2)
        self.mix = nn.Linear(4, 2)
        self.factor = nn.Parameter(torch.tensor([1.3, 0.4]).view(1, 2, 1))
        self.bn = nn.BatchNorm1d(2)
        self.kind, self.between = scores, between or (lambda m, g, e: (edge_softmax(g, e), None))

    def scores(self, g):
        if self.kind == "udf":
            g.apply_edges(lambda batch: {"e": self.mix(torch.cat([batch.src["l"], batch.dst["r"]], -1))})
            return F.elu(g.edata.pop("e")).unsqueeze(-1)
        if self.kind == "u_mul_v":
            g.apply_edges(fn.u_mul_v("l", "r", "e"))
            return torch.tanh(g.edata["e"]).unsqueeze(2) / 0.7
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


def plain(m, g, i):
    return m(g, i["x"])


FUSED = {
    **{name: CONVS[name] for name in CONVS if name.split()[0] in ("GATConv", "GATv2Conv", "DotGatConv", "AGNNConv")},
    **{f"own {kind}": (lambda kind=kind: Own(kind), plain) for kind in ("u_add_v", "u_mul_v", "udf")},
    "own scaled": (lambda: Own(between=lambda m, g, e: (edge_softmax(g, m.factor * e), None)), plain),
}
del FUSED["GATConv weighted"]  # its weights are no softmax any more


@pytest.mark.parametrize("name", FUSED)
def test_layers_that_are_an_attention_take_one_pass(name, passes):
    largest_error(FUSED[name], ranks=2, modes=(("sar", "keep", "halo"),))
    assert len(passes) == 6  # ranks times modes


@pytest.mark.long
@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize("name", [name for name in FUSED if name.startswith("own")])
def test_own_layers_on_any_number_of_ranks(name, ranks):
    largest_error(FUSED[name], ranks=ranks, modes=(("sar", "keep", "halo"),) * 3)


SCORES = {"GATConv": "AdditiveScore", "GATv2Conv": "MixedScore", "DotGatConv": "DotScore"}


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_known_layers_have_a_closed_form(name, passes):
    largest_error(FUSED[name], ranks=1, modes=(("sar",),))
    assert [type(attention.score).__name__ for attention in passes] == [SCORES[name]]


def read(m, g, e):
    weights = edge_softmax(g, e)
    return weights * float(weights.detach().sum() > -1), None


def kept(m, g, e):
    g.edata["first"] = edge_softmax(g, e)
    g.edata["second"] = g.edata["first"] * 2
    return g.edata["first"], g.edata["second"]


def in_place(m, g, e):
    e = e * 1.0
    e[:, 0] *= 2
    e += 0.5
    return edge_softmax(g, e), e


def by_functions(m, g, e):
    return edge_softmax(g, torch.where(e > 0, e, -e)), torch.cat([e, e.abs()], -1)


def by_kernel(m, g, e):
    sums = dgl.ops.copy_e_sum(g, e.exp())
    return e.exp() / dgl.ops.e_add_v(g, torch.zeros_like(e), sums), e


def normed(m, g, e):
    return edge_softmax(g, m.bn(e.squeeze(-1)).unsqueeze(-1)), None


def weighted(m, g, e):
    return edge_softmax(g, e) * g.edata["edge_weight"].view(-1, 1, 1), None


def summed_up(m, g, e):
    return edge_softmax(g, e).sum(1, keepdim=True), e.sum()[None].expand(g.num_edges())[:, None] * 0


def over_two_edge_sets(m, g, e):
    g.edata["e"] = e
    g.update_all(fn.copy_e("e", "m"), fn.max("m", "top"))
    g.apply_edges(fn.e_sub_v("e", "top", "z"))
    return edge_softmax(g, g.edata["z"]), g.edata["z"]


def without_gradient(m, g, e):
    with torch.no_grad():
        weights = edge_softmax(g, e)
    return weights, None


def detached(m, g, e):
    return edge_softmax(g, e.detach()), e


def dropped_in_evaluation(m, g, e):
    return F.dropout(edge_softmax(g, e), 0.5, training=False), None


OTHER_USES = [
    *(read, kept, in_place, by_functions, by_kernel, normed, weighted, summed_up, over_two_edge_sets),
    *(without_gradient, detached, dropped_in_evaluation),
]


@pytest.mark.parametrize("use", OTHER_USES, ids=lambda use: use.__name__)
def test_any_other_use_is_as_on_the_whole_graph(use):
    def call(m, g, i):
        g.edata["edge_weight"] = i["edge_weight"]
        return m(g, i["x"])

    largest_error((lambda: Own(between=use), call), modes=(("sar",), ("keep",), ("halo",)))


def test_it_is_the_same_without_fusing(passes):
    torch.manual_seed(0)
    model = dnn.GATv2Conv(5, 3, 2, **ZERO).double()

    def work(comm):
        found, counts = [], []
        for fused in (True, False):
            mine = UNCHECKED(copy.deepcopy(model), comm)
            g = sp.dgl.graph(share(comm, sp.Options(fuse_attention=fused)))
            before = comm.order.calls
            out = mine(g, g.ndata["x"])
            counts.append(comm.order.calls - before)
            (out * out.detach().cos()).sum().backward()
            found.append([out.detach(), *(p.grad for p in mine.parameters())])
        for one, other in zip(*found):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        return counts

    assert run(work, 3) == [[1, 2]] * 3 and len(passes) == 3


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
        model = UNCHECKED(dnn.GATConv(5, 3, 2, attn_drop=0.5, **ZERO), comm)
        model(graph, graph.node["x"]).sum().backward()
        with Rows() as rows:
            model(graph, graph.node["x"]).sum().backward()
        return rows.most, graph.total_nodes, graph.total_edges

    ((most, num_nodes, num_edges),) = run(work, 1)
    assert num_nodes < num_edges and (most <= num_nodes if fused else most == num_edges)


@pytest.mark.parametrize("ranks", [1, 3])
def test_dropped_weights_are_the_same_in_every_use(ranks, passes):
    def work(comm):
        graph = share(comm, sp.Options(chunk_bytes=512))
        model = UNCHECKED(dnn.GATConv(5, 3, 2, attn_drop=0.5, bias=False, **ZERO), comm)
        x = graph.node["x"].clone().requires_grad_()
        out, weights = model(graph, x, get_attention=True)
        assert type(weights) is torch.Tensor and ((weights == 0).any() or not len(weights))
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


def test_weights_used_twice_are_attended_twice(passes):
    class Diffusion(nn.Module):
        """The same dropped weights in every step."""

        def forward(self, g, x):
            with g.local_scope():
                g.ndata["h"], g.ndata["s"] = x, x[:, :1]
                g.apply_edges(fn.u_add_v("s", "s", "e"))
                g.edata["a"] = F.dropout(edge_softmax(g, g.edata["e"]), 0.3)
                for _ in range(2):
                    g.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "h"))
                first, g.ndata["h"] = g.ndata["h"], x
                g.edata["b"] = g.edata["a"].clone()
                for _ in range(2):
                    g.update_all(fn.u_mul_e("h", "b", "m"), fn.sum("m", "h"))
                return first, g.ndata["h"]

    def work(comm):
        graph = share(comm)
        x = graph.node["x"]
        g = sp.dgl.graph(graph)
        first, second = Diffusion()(g, x)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)

    run(work, 2)
    assert len(passes) == 4


def test_looking_at_edge_data_does_not_compute_them():
    def work(comm):
        g = sp.dgl.graph(share(comm))
        g.ndata["h"] = g.ndata["x"].view(-1, 5, 1).clone().requires_grad_()
        g.apply_edges(fn.u_add_v("h", "h", "e"))
        e = g.edata["e"]
        before = comm.order.calls
        if comm.rank == 0:  # on one rank alone
            assert "not computed yet" in repr(e) and "not computed yet" in f"{e}{e!s}"
            assert e.shape == (g.num_edges(), 5, 1) and e.dim() == 3 and e.size(0) == len(e) and e.requires_grad
            assert e.dtype == torch.float64 and e.device.type == "cpu" and e.is_floating_point() and not e.is_cuda
            assert g.edge_attr_schemes()["e"] == ((5, 1), torch.float64)
        a = edge_softmax(g, e)
        assert type(a) is LazyEdges and comm.order.calls == before
        assert type(a + 0) is LazyEdges and type(a.clone()) is torch.Tensor
        assert comm.order.calls == before + 1 and "tensor(" in repr(a)

    run(work, 2)


def test_edge_data_are_computed_at_once_where_no_softmax_follows():
    def work(comm):
        g = sp.dgl.graph(share(comm))
        g.ndata["h"] = g.ndata["x"]
        g.apply_edges(fn.u_add_v("h", "h", "e"))
        return type(g.edata["e"])

    assert run(work, 2) == [torch.Tensor] * 2


def test_without_gradients(passes):
    torch.manual_seed(0)
    model = dnn.GATConv(5, 3, 2, **ZERO).double()

    def work(comm):
        graph, mine = share(comm), UNCHECKED(copy.deepcopy(model), comm)
        expected = mine(graph, graph.node["x"]).detach()
        with torch.no_grad():
            torch.testing.assert_close(mine(graph, graph.node["x"]), expected, rtol=0, atol=1e-12)
        with torch.inference_mode():
            torch.testing.assert_close(mine(graph, graph.node["x"]), expected, rtol=0, atol=1e-12)

    run(work, 2)
    assert len(passes) == 4  # inference mode counts no changes, so nothing waits there


def waiting(g):
    g.ndata["h"] = g.ndata["x"].clone().requires_grad_() * 1
    g.apply_edges(fn.u_add_v("h", "h", "e"))
    return edge_softmax(g, g.edata["e"])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_what_would_be_wrong_is_refused():
    def work(comm):
        g = sp.dgl.graph(share(comm))
        a = waiting(g)
        g.ndata["h"].mul_(2)
        with pytest.raises(RefusedError, match="changed in place before"):
            a.sum()
        a = waiting(g)
        for _ in range(2):  # computed or not
            with pytest.raises(RefusedError, match="Doubled, which would lose their gradient"):
                Doubled.apply(a)
            a.sum()
        assert Doubled.apply(a.clone()).requires_grad
        e = waiting(g)
        later = e * 3
        e.materialise().add_(1)
        with pytest.raises(RefusedError, match="changed in place before"):
            later.sum()
        for wrong in ({"norm_by": "src"}, {"eids": torch.tensor([0])}):
            with pytest.raises(RefusedError, match="not available on a sharded graph"):
                edge_softmax(g, waiting(g), **wrong)

    run(work, 2)


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
            x = UNCHECKED(copy.deepcopy(layer), comm)(block, x).flatten(1)
        torch.testing.assert_close(x, expected.flatten(1)[graph.node_ids[wanted]], rtol=0, atol=1e-12)

    run(work, 2)
    assert len(passes) == 4


@pytest.mark.filterwarnings("error:.*self-check")
def test_edge_data_left_on_the_graph_and_the_self_check():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Own()

        def forward(self, g, x):
            g.ndata["s"] = x[:, :1]
            g.apply_edges(fn.u_add_v("s", "s", "e"))
            g.edata["a"] = edge_softmax(g, g.edata["e"])
            return self.conv(g, x)

    def work(comm):
        g, model = sp.dgl.graph(share(comm)), sp.dgl.wrap(Leaves().double(), comm)
        out = model(g, g.ndata["x"])
        model.eval()
        torch.testing.assert_close(model(g, g.ndata["x"]), out)
        sums = torch.zeros(g.num_nodes(), 1).index_add(0, g.edges_of(None).dst_rows, g.edata["a"])
        assert ((sums - 1).abs() < 1e-12)[g.in_degrees() > 0].all()

    run(work, 2)


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


def test_dropout_between_layers_on_ranks_of_very_different_size():
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

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        model = sp.dgl.wrap(Net().double(), comm, check=False)
        for _ in range(8):
            model(graph, graph.node["x"][:, :5]).sum().backward()
            model.zero_grad()
        return True

    assert run(work, 2) == [True, True]
