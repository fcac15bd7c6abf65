"""Layers whose messages are formulas: exact, with one thread and with several, and computed by the loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("torch_geometric")
pytest.importorskip("numba")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.aggregation import formulas
from shardpass.core.kernels import FormulaLoop
from shardpass.testing import WholeGraph, awkward_graph, run, shard_in_memory

from .how_much import ONE_PART_EMPTY, assert_exact_in, in_turn
from .on_ranks import on_ranks

WIDTH = 6
GRAPH = awkward_graph(channels=WIDTH, edge_channels=WIDTH)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank has three threads, and chunks are cut among them however few edges there are."""
    from shardpass.core.kernels import cpu_loops

    monkeypatch.setattr(cpu_loops, "_SMALL", 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Layer(gnn.MessagePassing):
    """Reduces what a function makes of both ends and of the edge."""

    def __init__(self, function: Callable[..., Tensor], aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.function = function
        self.vector = nn.Parameter(torch.rand(WIDTH).double())
        self.number = nn.Parameter(torch.rand(1).double())

    def forward(self, x: Tensor, edge_index: Any, e: Tensor) -> Tensor:
        found: Tensor = self.propagate(edge_index, x=x, e=e, w=e.mean(-1))
        return found

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.function(x_i, x_j, e, w.view(-1, 1), self.vector, self.number)


class Without(nn.Module):
    """A layer of PyG that takes no edge rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def forward(self, x: Tensor, edge_index: Any, e: Tensor) -> Tensor:
        found: Tensor = self.layer(x, edge_index)
        return found


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


DEGREES = torch.bincount(torch.bincount(GRAPH.edge_index[1], minlength=GRAPH.num_nodes))
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GENConv": lambda: Without(gnn.GENConv(WIDTH, 4)),
    "GENConv(learn_t)": lambda: Without(gnn.GENConv(WIDTH, 4, learn_t=True)),
    "GINEConv": lambda: gnn.GINEConv(_mlp()).double(),
    "ResGatedGraphConv": lambda: Without(gnn.ResGatedGraphConv(WIDTH, 4)),
    "PNAConv": lambda: Without(gnn.PNAConv(WIDTH, 4, ["mean", "min", "max", "std"], ["identity", "linear"], DEGREES)),
    "FiLMConv": lambda: Without(gnn.FiLMConv(WIDTH, 4)),
    "parameters": lambda: Layer(lambda i, j, e, w, p, n: (i * p + j).tanh() * n + 1 / (1 + e.square()), "add"),
    "ties": lambda: Layer(lambda i, j, e, w, p, n: (i - j).abs().round(decimals=1) * 0 + (i + j).relu() * w, "max"),
    "ties of zeros": lambda: Layer(lambda i, j, e, w, p, n: (i + j).relu() * p.detach().abs(), "max"),
    "largest": lambda: Layer(lambda i, j, e, w, p, n: (i + j).relu() * w, "max"),
    "smallest": lambda: Layer(lambda i, j, e, w, p, n: F.leaky_relu(i * j, 0.1) - torch.log1p(e.square()), "min"),
    "mean": lambda: Layer(lambda i, j, e, w, p, n: F.silu(i).clamp(-0.2, 0.4) * F.softplus(j) - e.exp(), "mean"),
    "detached": lambda: Layer(lambda i, j, e, w, p, n: (i.detach() * j).relu() - e, "add"),
    "of edges alone": lambda: Layer(lambda i, j, e, w, p, n: (e * w).sigmoid(), "add"),
    "softmax": lambda: Layer(lambda i, j, e, w, p, n: (j + e).relu(), "softmax"),
    "deviation": lambda: Layer(lambda i, j, e, w, p, n: (j * e).sigmoid(), "std"),
    "power of a number that is learned": lambda: Layer(lambda i, j, e, w, p, n: j.abs() ** (n * 0 + 2), "add"),
    "two layers": lambda: gnn.Sequential("x, a, e", [(gnn.GINEConv(_mlp()), "x, a, e -> x"), nn.Tanh(),
                                                     (gnn.GINEConv(_mlp()), "x, a, e -> x")]).double(),
}  # fmt: skip
NOT_BY_FORMULA = {  # `round`, a tensor that needs no gradient, and an exponent that is a tensor
    "ties", "ties of zeros", "power of a number that is learned",
}  # fmt: skip


def _call(model: nn.Module, fields: dict[str, Tensor], edges: Any) -> Tensor:
    out: Tensor = model(fields["x"], edges, fields["edge_attr"])
    return out


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(LAYERS, ("sar", "keep"), later=(1, 3)))
def test_equals_the_whole_graph(name: str, ranks: int, modes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, original = [], FormulaLoop.run

    def noted(self: FormulaLoop, *args: Any) -> None:
        runs.append(self)
        original(self, *args)

    monkeypatch.setattr(FormulaLoop, "run", noted)
    torch.manual_seed(0)
    model = LAYERS[name]()
    assert_exact_in(modes, model, GRAPH, _call, sp.pyg.wrap, ranks)
    assert bool(runs) == (name not in NOT_BY_FORMULA)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["GENConv(learn_t)", "PNAConv", "parameters", "largest", "of edges alone"])
def test_several_threads(name: str) -> None:
    torch.manual_seed(0)
    assert_exact_in(ONE_PART_EMPTY, LAYERS[name](), GRAPH, _call, sp.pyg.wrap, 2)


def test_chunks_of_a_few_edges() -> None:
    torch.manual_seed(0)
    options = sp.Options(chunk_bytes=100)
    for name in ("GENConv(learn_t)", "PNAConv", "largest"):
        assert_exact_in(ONE_PART_EMPTY, LAYERS[name](), GRAPH, _call, sp.pyg.wrap, 2, options=options)


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.relu, torch.sigmoid, torch.tanh, torch.square, torch.abs, F.silu, F.softplus, F.leaky_relu,
    lambda x: x.clamp(-1, 1).exp(), lambda x: (x * x + 1).log(), lambda x: -x, lambda x: 1 - x,
    lambda x: torch.log1p(x.abs()), lambda x: (x.square() + 0.5).sqrt(), lambda x: x.clamp(min=-0.5),
    lambda x: x.detach(),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, lambda a, b: a / (b.square() + 1),
]  # fmt: skip


def _random_message(seed: int) -> Callable[..., Tensor]:
    """A message of several operations drawn at random, the same in each run."""

    def message(*given: Tensor) -> Tensor:
        draw = random.Random(seed)
        values = [*given]
        for _ in range(draw.randint(3, 9)):
            made = draw.choice(UNARY)(draw.choice(values))
            values.append(draw.choice(BINARY)(made, draw.choice(values[-4:])))
        return (values[-1] + values[-2] * 0.5 + given[0] * given[1]).tanh()

    return message


def _almost_tied(model: Layer) -> bool:
    """Whether messages of one node differ by rounding alone."""
    (sources, targets), e = GRAPH.edge_index, GRAPH.edge["edge_attr"]
    found = model.message(GRAPH.node["x"][targets], GRAPH.node["x"][sources], e, e.mean(-1)).detach()
    gaps = (found[:, None] - found[None]).abs()[targets[:, None] == targets[None]]
    return bool(((gaps > 0) & (gaps < 1e-12)).any())


@pytest.mark.parametrize("seed", range(6))
def test_random_messages(seed: int) -> None:
    torch.manual_seed(seed)
    aggr = ["add", "mean", "max", "min", "softmax", "std"][seed % 6]
    model = Layer(_random_message(seed), aggr)
    if aggr in ("max", "min") and _almost_tied(model):  # the last bit of a function decides where the gradient goes
        model = Layer(_random_message(seed), "add")
    assert_exact_in(ONE_PART_EMPTY, model, GRAPH, _call, sp.pyg.wrap, 1 + seed % 3, bound=1e-9, relative=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 600))
def test_many_random_messages(seed: int) -> None:
    test_random_messages(seed)


def test_infinite_and_missing_numbers_stay() -> None:
    """NaN and infinity come out where they do in one process."""
    x = GRAPH.node["x"].clone()
    x[3, 0], x[5, 1], x[7, 2] = float("nan"), float("inf"), -float("inf")
    graph = replace(GRAPH, node={**GRAPH.node, "x": x})
    for name in ("largest", "smallest", "mean", "softmax", "GINEConv"):
        torch.manual_seed(0)
        model = LAYERS[name]()
        right = _call(model, {**graph.node, **graph.edge}, graph.edge_index)

        def body(comm: sp.Communicator, model: nn.Module = model) -> Tensor:
            own = shard_in_memory(graph, torch.zeros(graph.num_nodes, dtype=torch.int64), comm)
            found: Tensor = sp.pyg.wrap(model, comm)(own.x, own, own.edge["edge_attr"])
            return found

        torch.testing.assert_close(run(body, 1)[0], right, equal_nan=True, rtol=1e-10, atol=1e-10)


class _Scattered(Layer):
    """Adds messages in tensors that hold a number where no message comes."""

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        held = torch.full((dim_size, WIDTH), 0.5, dtype=inputs.dtype)
        spread = index.view(-1, 1).expand_as(inputs)
        return held.scatter_reduce(0, spread, inputs, "sum", include_self=False)


def test_sums_that_leave_out_what_was_held() -> None:
    torch.manual_seed(0)
    model = _Scattered(lambda i, j, e, w, p, n: (i + j).relu() * w, "add")
    assert_exact_in(ONE_PART_EMPTY, model, GRAPH, _call, sp.pyg.wrap, 3)


class _OfDegrees(gnn.MessagePassing):
    """Its messages read no rows: they are made of degrees and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.rand(()).double())

    def forward(self, x: Tensor, edge_index: Any, e: Tensor) -> Tensor:
        found: Tensor = self.propagate(edge_index, x=x[:, :1])
        return found * x

    def message(self, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        degrees = torch.zeros(size_i, 1, dtype=x_j.dtype).index_add_(0, index, torch.ones_like(x_j))
        return (1 / degrees[index]).log() * self.number


@pytest.mark.parametrize("handled", [True, False])
def test_messages_that_read_no_rows(handled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, or without numba, they run as torch code."""
    runs, original = [], FormulaLoop.run
    monkeypatch.setattr(FormulaLoop, "run", lambda self, *args: (runs.append(self), original(self, *args)))
    if not handled:
        monkeypatch.setattr(formulas, "handles_formulas", lambda rows: False)
    assert_exact_in(ONE_PART_EMPTY, _OfDegrees(), GRAPH, _call, sp.pyg.wrap, 2)
    assert bool(runs) == handled


@on_ranks(1)
def test_without_gradients_and_in_float32(comm):
    """Parameters are read where gradients are off, too, and again when they have changed."""
    x, e = torch.randn(GRAPH.num_nodes, WIDTH), torch.randn(GRAPH.edge_index.size(1), WIDTH)
    graph = WholeGraph(GRAPH.num_nodes, GRAPH.edge_index, {"x": x}, {"e": e})
    model = LAYERS["parameters"]().float()
    own = shard_in_memory(graph, torch.zeros(graph.num_nodes, dtype=torch.int64), comm)
    wrapped = sp.pyg.wrap(copy.deepcopy(model), comm)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with torch.no_grad():
            model.vector.mul_(1.5)
            wrapped.get_parameter("vector").copy_(model.vector)
        with context():
            found = wrapped(own.x, own, own.edge["e"])
            torch.testing.assert_close(found, model(x, graph.edge_index, e))
