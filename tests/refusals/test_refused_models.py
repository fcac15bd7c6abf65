"""Mistakes of people who train models of PyG: each is told by its true cause, and at their own line."""

import copy
import functools

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.transforms import AddSelfLoops
from torch_geometric.utils import scatter, subgraph

import shardpass as sp
from shardpass.errors import RefusedError
from tests.frontends.on_ranks import on_shares, share

from .told import GRAPH, Does, N, assert_told, of, rows_of

MASK, CHOSEN = torch.arange(N) % 2 == 0, torch.tensor([3, 5, 7])
WHOLE = Data(x=GRAPH.node["x"], edge_index=GRAPH.edge_index, **GRAPH.edge)


def wrapped(model, comm):
    return sp.pyg.wrap(copy.deepcopy(model).double(), comm)


class Net(nn.Module):
    """Two layers with `between` between them."""

    def __init__(self, between):
        super().__init__()
        self.conv, self.last = gnn.GCNConv(5, 6), gnn.SAGEConv(6, 6)
        self.per_node = nn.ParameterDict({"scale": torch.rand(N)})
        self.between = between

    def forward(self, x, edge_index):
        return self.last(self.between(self, self.conv(x, edge_index), edge_index), edge_index)


class Messages(gnn.MessagePassing):
    """A layer whose message is `made` of the sources and of edge features."""

    def __init__(self, made):
        super().__init__()
        self.made, self.lin = made, nn.Linear(5, 3)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return self.made(x_j, edge_attr)


def _between(between, comm, graph):
    wrapped(Net(between), comm)(graph.x, graph)


def _message(made, comm, graph):
    wrapped(Messages(made), comm)(graph.x, graph, graph.edge_attr.clone().requires_grad_())


def _call(call, comm, graph):
    call(wrapped(gnn.GCN(5, 8, 2, 3), comm), graph)


def _readout(readout, comm, graph):
    model = Does(lambda conv, x, e, batch: (h := conv(x, e)) + readout(h, batch), gnn.GCNConv(5, 4))
    wrapped(model, comm)(graph.x, graph, graph.batch)


PUT_TOGETHER = "puts rows together, over the nodes"
OF_THE_WHOLE = rf"has an entry for each of the {N} nodes of the whole graph, but this rank holds 1\d of them"
NUMBERS = "rows by numbers that do not come from the graph, over the nodes"
BETWEEN = {
    "a mask of the whole graph": (lambda m, h, e: h * MASK.view(-1, 1), OF_THE_WHOLE),
    "indexing with a mask of the whole graph": (
        lambda m, h, e: (c := h.clone()).__setitem__(MASK, 0.0) or c, OF_THE_WHOLE
    ),
    "a field of the whole graph": (lambda m, h, e: h + GRAPH.node["x"][:, :1], OF_THE_WHOLE),
    "a parameter per node": (lambda m, h, e: h * m.per_node["scale"].view(-1, 1), OF_THE_WHOLE),
    "rows by their ids": (lambda m, h, e: h + h[CHOSEN].sum(0), f"takes {NUMBERS}"),
    "writing rows by their ids": (lambda m, h, e: (c := h.clone()).__setitem__(CHOSEN, 0.0) or c, f"writes {NUMBERS}"),
    "a permutation": (lambda m, h, e: h[torch.randperm(len(h))], f"takes {NUMBERS}"),
    "the first row": (lambda m, h, e: h - h[0], "takes some rows by their position"),
    "ids as features": (
        lambda m, h, e: h + torch.arange(len(h)).view(-1, 1),
        "differs from row to row of the nodes, and the model made it from their numbers",
    ),
    "an ordinary batch": (
        lambda m, h, e: h + gnn.global_mean_pool(h, torch.zeros(len(h), dtype=torch.long)),
        rf"{PUT_TOGETHER}.*Use a readout over graph\.batch",
    ),
    "no batch": (lambda m, h, e: h + gnn.global_add_pool(h, None), rf"{PUT_TOGETHER}.*Use a readout over graph\.batch"),
    "a mean of complex rows": (lambda m, h, e: (torch.complex(h, h) - torch.complex(h, h).mean(0)).real, PUT_TOGETHER),
    "a Fourier transform over nodes": (lambda m, h, e: torch.fft.fft(h, dim=0).real, f"`fft_r2c` {PUT_TOGETHER}"),
    "all pairs": (lambda m, h, e: torch.cdist(h, h) @ h, f"`cdist_forward` {PUT_TOGETHER}"),
    "a loss of own rows": (lambda m, h, e: h * nn.functional.mse_loss(h, h * 2), f"`mse_loss` {PUT_TOGETHER}"),
    "subgraph": (lambda m, h, e: m.last(h, subgraph(torch.arange(10), e)[0]), f"writes {NUMBERS}"),
    "a slice of edges": (
        lambda m, h, e: m.last(h, e[:, :10]), r"`edge_index\[:, :10\]` on the edge_index .*edges at other pos"
    ),
    "a row by its number": (lambda m, h, e: h + h[30], r"`__getitem__` fails on the \d+ nodes of this rank"),
    "the largest twenty": (lambda m, h, e: h + h[:, 0].topk(20)[0].sum(), r"`topk` fails on the \d+ nodes"),
    "the shape of the whole graph": (lambda m, h, e: h.view(N, 6), r"`view` fails on the \d+ nodes"),
    "random rows": (lambda m, h, e: h + h[torch.randint(len(h), (len(h),))], "made of how many rows this rank holds"),
    "a sparse matrix": (
        lambda m, h, e: torch.sparse_coo_tensor(e.flip(0), torch.ones(e.size(1)), (len(h), len(h))) @ h,
        r"a sparse matrix is made of the edge_index .*SimpleConv\('sum'\)",
    ),
    "edges both ways": (
        lambda m, h, e: m.last(h, torch.cat([e, e.flip(0)], 1)), "reversed edges belong to other ranks"
    ),
    "the largest by source": (
        lambda m, h, e: scatter(h[e[1]], e[0], 0, len(h), "max"), "only their sums are differentiable"
    ),
    "vmap with a sum": (lambda m, h, e: torch.vmap(lambda row: row * row.sum())(h), "is how vmap finds out the dtype"),
    "ids as numbers": (
        lambda m, h, e: h + e[0].float().mean(),
        "`float` on source node ids of a sharded graph: ids are numbered per rank",
    ),
}  # fmt: skip


def without_mean(h):
    """Mixes all rows."""
    return h - h.mean(0)


def catching(error):
    """Goes on without the mean if it is refused."""

    def between(m, h, e):
        try:
            return without_mean(h)
        except error:
            return h

    return between


def left_by_return(m, h, e):
    try:
        return without_mean(h)
    finally:
        return h  # noqa: B012, SIM107


class Catches(gnn.MessagePassing):
    """Mixes all edges, and goes on without if that is refused."""

    def forward(self, h, edge_index):
        return self.propagate(edge_index, h=h)

    def message(self, h_j):
        try:
            return without_mean(h_j)
        except RuntimeError:
            return h_j


@torch.jit.script
def scripted(rows: torch.Tensor) -> torch.Tensor:
    return torch.relu(rows) * 2


MESSAGES = {
    "a message that writes": (lambda x, e: x * e.mul_(2), "`mul_` changes an input of the message"),
    "a message that writes by a mask": (
        lambda x, e: x * (e.__setitem__(e < 0, 0) or e), "`__setitem__` changes an input of the message"
    ),
    "vmap in a message": (lambda x, e: torch.vmap(torch.tanh)(x), r"functional transform \(vmap\) inside a message"),
    "grad in a message": (
        lambda x, e: torch.func.vmap(torch.func.grad(lambda row: row.tanh().sum()))(x),
        r"functional transform \(grad, vjp or jacrev\) inside a message",
    ),
    "a script in a message": (lambda x, e: scripted(x), r"torch\.jit\.script"),
}  # fmt: skip
CALLS = {
    "features of the whole graph": (lambda m, g: m(WHOLE.x, g), rf"shape \[{N}, 5\] {OF_THE_WHOLE}"),
    "edge weights of the whole graph": (
        lambda m, g: m(g.x, g, edge_weight=WHOLE.edge_weight),
        r"shape \[220\] has an entry for each of the 220 edges of the whole graph",
    ),
    "the ordinary edge_index": (lambda m, g: m(g.x, WHOLE.edge_index), "edge_index is an ordinary Tensor"),
    "arguments in the wrong order": (lambda m, g: m(g, g.x), "edge_index is an ordinary Tensor"),
    "a layer of the model": (
        lambda m, g: m.convs[0](g.x, g), r"only the wrapped model itself takes: .* graph\.edge_index"
    ),
}  # fmt: skip
READOUTS = {
    "a pool of own rows": (lambda h, batch: gnn.global_mean_pool(h, None), "puts rows together"),
    "an aggregation of own rows": (lambda h, batch: gnn.SumAggregation()(h), "puts rows together"),
    "a maximum of own rows": (lambda h, batch: h.amax(0), "puts rows together"),
}


class OwnSum(gnn.aggr.Aggregation):
    """A module of the user's within a message, which the engine stops once it has seen what it reduces."""

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim)


TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "vmap": lambda call, x: torch.vmap(call)(x[None]),
}


def _transformed(transform, comm, graph):
    model = wrapped(gnn.GCN(5, 8, 2, 3), comm)
    transform(lambda x: model(x, graph), graph.x)


def _explained(mask, comm, graph):
    explainer = Explainer(
        wrapped(gnn.GCN(5, 8, 2, 3), comm), GNNExplainer(epochs=1), explanation_type="model",
        node_mask_type="attributes", edge_mask_type=mask,
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )  # fmt: skip
    explainer(graph.x, graph.edge_index)


MIXES = r"test_refused_models\.py:\d+: return h - h.mean\(0\): `mean` puts rows together"
CAUGHT = {
    "caught as a RuntimeError": (catching(RuntimeError), MIXES),
    "caught as an Exception": (catching(Exception), MIXES),
    "left by return": (left_by_return, MIXES),
    "caught in a message": (lambda m, h, e: m.catches(h, e), MIXES),
}


def _caught(between, comm, graph):
    net = Net(between)
    net.catches = Catches()
    wrapped(net, comm)(graph.x, graph)


def _behind_a_module(mode, comm, graph):
    graph, model = share(GRAPH, comm, mode=mode), Net(lambda m, h, e: without_mean(m.own(h, e)))
    model.own = gnn.SAGEConv(6, 6, aggr=OwnSum())
    wrapped(model, comm)(graph.x, graph)


NOT_WRAPPED = "once it is wrapped"
ONE = {
    **of(_transformed, {name: (call, rf"functional transform \([\w, ]*{name}") for name, call in TRANSFORMS.items()}),
    **of(_explained, {f"an explainer, {mask}": (mask, "explanations are not supported on a sharded graph")
                      for mask in ("object", None)}),
    "a layer that is not wrapped": (
        RefusedError, rf"{NOT_WRAPPED}: model = shardpass\.pyg\.wrap\(model, comm\)",
        lambda comm, graph: gnn.ChebConv(5, 3, 2).double()(graph.x, graph),
    ),
    "graphs as tensors": (RefusedError, NOT_WRAPPED, lambda comm, graph: torch.stack([graph, graph])),
    "rows of a graph": (RefusedError, NOT_WRAPPED, lambda comm, graph: [*graph]),
    "the shape of a graph": (AttributeError, NOT_WRAPPED, lambda comm, graph: graph.shape),
    "a transform in a model": (
        RefusedError, "{line}AddSelfLoops.*Apply the transform before you partition",
        lambda comm, graph: wrapped(Does(lambda data: AddSelfLoops()(data).x), comm)(graph),
    ),
    "another device": (
        RefusedError, "cannot be moved to meta. Say where before it is loaded", lambda comm, graph: graph.to("meta")
    ),
}  # fmt: skip
THREE = {
    **of(_between, BETWEEN, line="{line}"),
    **of(_message, MESSAGES, line="{line}"),
    **of(_call, CALLS),
    **of(_caught, CAUGHT),
    **of(_behind_a_module, {f"behind a module, {mode}": (mode, MIXES) for mode in ("sar", "halo")}),
    "a message of a dict": (
        RefusedError, r"test_refused_models\.py:\d+: .*message\(\) of Messages returns a dict",
        functools.partial(_message, lambda x, e: {"m": x}),
    ),
    **of(_readout, READOUTS, line="{line}"),
    "an offender in an autoencoder": (
        RefusedError, "`mean` puts rows together",
        lambda comm, graph: wrapped(
            gnn.GAE(Does(lambda conv, x, e: (h := conv(x, e)) - h.mean(0), gnn.GCNConv(5, 4))), comm
        ).encode(graph.x, graph),
    ),
}  # fmt: skip


@rows_of(ONE, THREE)
def test_a_mistake_with_a_model_is_told(row, ranks, kind):
    assert_told(row, ranks, kind)


def test_code_that_fails_on_a_rank_without_rows_is_told_why():
    owners = torch.where(torch.rand(N, generator=torch.Generator().manual_seed(0)) < 0.6, 0, 2)
    net = Net(lambda m, h, e: h * torch.stack([torch.ones(6) for _ in range(len(h))]))
    words = r"test_refused_models\.py:\d+: .*stack expects a non-empty TensorList.*This rank has no nodes"
    with pytest.raises(RefusedError, match=words):
        on_shares(GRAPH, lambda comm, graph: wrapped(net, comm)(graph.x, graph), 3, owners)
