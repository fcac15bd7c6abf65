"""Mistakes that people make on the way to a sharded graph: each refusal names the true cause, at the user's line."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.data import Data
from torch_geometric.transforms import AddSelfLoops
from torch_geometric.utils import scatter, subgraph

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assert_exact, assignments, run, shard_in_memory

from .pyg_cases import GRAPH

MASK, CHOSEN = torch.arange(41) % 2 == 0, torch.tensor([3, 5, 7])
OWNERS = assignments(41, 3, GRAPH.edge_index)["random"]


class Net(nn.Module):
    """Two layers with `between` between them."""

    def __init__(self, between):
        super().__init__()
        self.conv, self.last = gnn.GCNConv(5, 6), gnn.SAGEConv(6, 6)
        self.per_node = nn.ParameterDict({"scale": torch.rand(41)})
        self.between = between

    def forward(self, x, edge_index):
        return self.last(self.between(self, self.conv(x, edge_index), edge_index), edge_index)


def _put(h, index, value=0.0):
    h = h.clone()
    h[index] = value
    return h


OF_THE_WHOLE = r"has an entry for each of the 41 nodes of the whole graph, but this rank holds 1\d of them"
IDS = "of a sharded graph: ids are numbered per rank"
PUT_TOGETHER = "puts rows together, over the nodes"
NUMBERS = "rows by numbers that do not come from the graph, over the nodes"
MADE_OF_NUMBERS = "differs from row to row of the nodes, and the model made it from their numbers"
MISTAKES = {
    "a mask of the whole graph": (lambda m, h, e: h * MASK.view(-1, 1), OF_THE_WHOLE),
    "indexing with a mask of the whole graph": (lambda m, h, e: _put(h, MASK), OF_THE_WHOLE),
    "a field of the whole graph": (lambda m, h, e: h + GRAPH.node["x"][:, :1], OF_THE_WHOLE),
    "a parameter per node": (lambda m, h, e: h * m.per_node["scale"].view(-1, 1), OF_THE_WHOLE),
    "rows by their ids": (lambda m, h, e: h + h[CHOSEN].sum(0), f"takes {NUMBERS}"),
    "writing rows by their ids": (lambda m, h, e: _put(h, CHOSEN), f"writes {NUMBERS}"),
    "a permutation": (lambda m, h, e: h[torch.randperm(len(h))], f"takes {NUMBERS}"),
    "the first row": (lambda m, h, e: h - h[0], "takes some rows by their position"),
    "ids as features": (lambda m, h, e: h + torch.arange(len(h)).view(-1, 1), MADE_OF_NUMBERS),
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
        lambda m, h, e: m.last(h, e[:, :10]),
        r"`edge_index\[:, :10\]` on the edge_index .*edges at other pos",
    ),
    "a row by its number": (lambda m, h, e: h + h[30], r"`__getitem__` fails on the \d+ nodes of this rank"),
    "the largest twenty": (lambda m, h, e: h + h[:, 0].topk(20)[0].sum(), r"`topk` fails on the \d+ nodes"),
    "the shape of the whole graph": (lambda m, h, e: h.view(41, 6), r"`view` fails on the \d+ nodes"),
    "random rows": (lambda m, h, e: h + h[torch.randint(len(h), (len(h),))], "made of how many rows this rank holds"),
    "a sparse matrix": (
        lambda m, h, e: torch.sparse_coo_tensor(e.flip(0), torch.ones(e.size(1)), (len(h), len(h))) @ h,
        r"a sparse matrix is made of the edge_index .*SimpleConv\('sum'\)",
    ),
    "edges both ways": (
        lambda m, h, e: m.last(h, torch.cat([e, e.flip(0)], 1)),
        "reversed edges belong to other ranks",
    ),
    "the largest by source": (
        lambda m, h, e: scatter(h[e[1]], e[0], 0, len(h), "max"),
        "only their sums are differentiable",
    ),
    "vmap with a sum": (lambda m, h, e: torch.vmap(lambda row: row * row.sum())(h), "is how vmap finds out the dtype"),
    "ids as numbers": (lambda m, h, e: h + e[0].float().mean(), f"`float` on source node ids {IDS}"),
}


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


@pytest.mark.parametrize(
    "between", [catching(RuntimeError), catching(Exception), left_by_return, lambda m, h, e: m.catches(h, e)]
)
def test_a_refusal_that_the_model_catches_is_raised(between):
    def work(comm):
        graph = shard_in_memory(GRAPH, OWNERS, comm)
        net = Net(between)
        net.catches = Catches()
        sp.pyg.wrap(net.double(), comm)(graph.x, graph)

    line = inspect.getsourcelines(without_mean)[1] + 2
    assert f"test_pyg_reasons.py:{line}: return h - h.mean(0): `mean` puts rows together" in refused(work)


def refused(work):
    """The words with which `work` is refused on three ranks."""
    with pytest.raises(RefusedError) as caught:
        run(work, 3)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_model_are_told_their_cause(name):
    between, words = MISTAKES[name]

    def work(comm):
        graph = shard_in_memory(GRAPH, OWNERS, comm)
        sp.pyg.wrap(Net(between).double(), comm)(graph.x, graph)

    text = refused(work)
    line = re.match(r".*test_pyg_reasons\.py:(\d+): ", text)
    lines, first = inspect.getsourcelines(between)
    helpers = inspect.getsourcelines(_put)[1]
    assert line and (first <= int(line[1]) < first + len(lines) or helpers < int(line[1]) < helpers + 4), text
    assert re.search(words, text), text


WHOLE = Data(x=GRAPH.node["x"], edge_index=GRAPH.edge_index, **GRAPH.edge)
CALLS = {
    "features of the whole graph": (
        lambda m, g: m(WHOLE.x, g),
        r"shape \[41, 5\] has an entry for each of the 41 nodes of the whole graph, but this rank holds 1\d of them",
    ),
    "edge weights of the whole graph": (
        lambda m, g: m(g.x, g, edge_weight=WHOLE.edge_weight),
        r"shape \[220\] has an entry for each of the 220 edges of the whole graph",
    ),
    "the ordinary edge_index": (lambda m, g: m(g.x, WHOLE.edge_index), "edge_index is an ordinary Tensor"),
    "arguments in the wrong order": (lambda m, g: m(g, g.x), "edge_index is an ordinary Tensor"),
    "a layer of the model": (
        lambda m, g: m.convs[0](g.x, g),
        r"only the wrapped model itself takes: .* graph\.edge_index",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_in_a_call_are_told_their_cause(name):
    call, words = CALLS[name]

    def work(comm):
        call(sp.pyg.wrap(gnn.GCN(5, 8, 2, 3).double(), comm), shard_in_memory(GRAPH, OWNERS, comm))

    assert re.search(words, refused(work))


def test_a_model_that_is_not_wrapped():
    graph = shard_in_memory(GRAPH, torch.zeros(41, dtype=torch.int64), sp.connect("local"))
    with pytest.raises(RefusedError, match=r"once it is wrapped: model = shardpass\.pyg\.wrap\(model, comm\)"):
        gnn.ChebConv(5, 3, 2).double()(graph.x, graph)
    with pytest.raises(RefusedError, match="once it is wrapped"):
        torch.stack([graph, graph])
    with pytest.raises(RefusedError, match="once it is wrapped"):
        _, _ = graph
    with pytest.raises(AttributeError, match="once it is wrapped"):
        _ = graph.shape


class Complex(nn.Module):
    """Complex numbers are rows as others are."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin = gnn.SimpleConv(), nn.Linear(5, 5)

    def forward(self, x, edge_index):
        h = self.conv(torch.complex(self.lin(x), x), edge_index)
        return h.abs() + torch.view_as_real(h).sum(-1) + torch.fft.fft(x, dim=1).real


def test_complex_numbers_are_exact():
    owners = {"random": OWNERS}  # torch has no Fourier transform of no rows
    assert_exact(Complex().double(), GRAPH, lambda m, i, g: m(i["x"], g), sp.pyg.wrap, ranks=3, owners=owners)


class Messages(gnn.MessagePassing):
    """A layer whose message is `made` of the sources and of edge features."""

    def __init__(self, made):
        super().__init__()
        self.made, self.lin = made, nn.Linear(5, 3)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return self.made(x_j, edge_attr)


@torch.jit.script
def scripted(rows: torch.Tensor) -> torch.Tensor:
    return torch.relu(rows) * 2


def _written(rows):
    rows[rows < 0] = 0
    return rows


LINE = r"test_pyg_reasons\.py:\d+: "
MESSAGES = {
    "writes": (lambda x, e: x * e.mul_(2), LINE + r".*`mul_` changes an input of the message"),
    "writes by a mask": (lambda x, e: x * _written(e), LINE + r".*`__setitem__` changes an input of the message"),
    "a dict": (lambda x, e: {"m": x}, LINE + r".*message\(\) of Messages returns a dict"),
    "vmap": (lambda x, e: torch.vmap(torch.tanh)(x), LINE + r".*functional transform \(vmap\) inside a message"),
    "grad": (
        lambda x, e: torch.func.vmap(torch.func.grad(lambda row: row.tanh().sum()))(x),
        LINE + r".*functional transform \(grad, vjp or jacrev\) inside a message",
    ),
    "a script": (lambda x, e: scripted(x), LINE + r".*torch\.jit\.script"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_mistakes_in_a_message_are_told_their_cause(name):
    made, words = MESSAGES[name]

    def work(comm):
        graph = shard_in_memory(GRAPH, OWNERS, comm)
        model = sp.pyg.wrap(Messages(made).double(), comm)
        model(graph.x, graph, graph.edge_attr.clone().requires_grad_())

    assert re.search(words, refused(work))


TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "vmap": lambda call, x: torch.vmap(call)(x[None]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms_of_a_model_are_refused(name):
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(41, dtype=torch.int64), comm)
    model = sp.pyg.wrap(gnn.GCN(5, 8, 2, 3).double(), comm)
    with pytest.raises(RefusedError, match=LINE + rf".*functional transform \([\w, ]*{name}"):
        TRANSFORMS[name](lambda x: model(x, graph), graph.x)


def test_code_that_fails_on_a_rank_without_rows_is_told_why():
    owners = torch.where(torch.rand(41, generator=torch.Generator().manual_seed(0)) < 0.6, 0, 2)

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        sp.pyg.wrap(Net(lambda m, h, e: h * torch.stack([torch.ones(6) for _ in range(len(h))])).double(), comm)(
            graph.x, graph
        )

    with pytest.raises(RefusedError, match=LINE + r".*stack expects a non-empty TensorList.*This rank has no nodes"):
        run(work, 3)


def test_transforms_of_pyg_are_refused_in_a_model():
    class Model(nn.Module):
        def forward(self, data):
            return AddSelfLoops()(data).x

    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(41, dtype=torch.int64), comm)
    with pytest.raises(RefusedError, match=LINE + r".*AddSelfLoops.*Apply the transform before you partition"):
        sp.pyg.wrap(Model(), comm)(graph)


class Own(gnn.aggr.Aggregation):
    """A module of the user's within a message, which the engine stops once it has seen what it reduces."""

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim)


@pytest.mark.parametrize("mode", ["sar", "halo"])
def test_what_follows_a_module_within_a_message_is_followed(mode):
    def work(comm):
        graph = shard_in_memory(GRAPH, OWNERS, comm, sp.Options(mode=mode))
        model = Net(lambda m, h, e: without_mean(m.own(h, e)))
        model.own = gnn.SAGEConv(6, 6, aggr=Own())
        sp.pyg.wrap(model.double(), comm)(graph.x, graph)

    assert "`mean` puts rows together" in refused(work)
