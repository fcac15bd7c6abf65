"""Linear maps of what the ends of an edge hold: applied to each node once, and exact; left alone where they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.testing import WholeGraph, assignments, awkward_graph, run, shard_in_memory

from .how_much import ONE_PART_EMPTY, assert_case_exact, assert_exact_in, in_turn

GRAPH = awkward_graph(channels=6, edge_channels=3)
ALONE = {"alone": torch.zeros(GRAPH.num_nodes, dtype=torch.int64)}


class _Layer(gnn.MessagePassing):
    """Sums what `_message` makes of both ends."""

    def __init__(self, width: int = 12, out: int = 4, bias: bool = True) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(width, out, bias=bias).double()
        self.seen: list[int] = []

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
        found: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return found


class Ends(_Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], dim=-1)).tanh()


class OneEnd(_Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return self.lin(x_j)


class InPlace(_Layer):
    """An activation writes into what the map of one end gives."""

    def message(self, x_j: Tensor) -> Tensor:
        return self.lin(x_j).relu_()


class ByKeyword(_Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return nn.functional.linear(torch.cat([x_i, x_j], -1), bias=self.lin.bias, weight=self.lin.weight)


class EndsAndEdges(_Layer):
    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.lin(torch.cat([x_j, edge_attr, x_i, edge_attr * 2], dim=-1)).relu()


class UsedTwice(_Layer):
    """The same weight maps two tensors, and the ends are used besides."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        there, back = self.lin(torch.cat([x_i, x_j], -1)), self.lin(torch.cat([x_j, x_i], -1))
        return (there * back).tanh() * x_j[:, :4]


class Towers(_Layer):
    """As PNAConv maps several parts of a row."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        both = torch.cat([x_i.view(-1, 2, 3), x_j.view(-1, 2, 3)], dim=-1)
        return torch.cat([self.lin(both[:, 1]), self.lin(both.select(1, 0)).sin()], dim=-1)


class Attends(_Layer):
    """A softmax over in-edges of a score that an MLP makes of both ends."""

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Any, size_i: int | None) -> Tensor:
        from torch_geometric.utils import softmax

        score = self.lin(torch.cat([x_i, x_j], -1)).sum(-1, keepdim=True)
        return softmax(score, index, ptr, size_i) * x_j


class Written(_Layer):
    """The input of the map is changed in place."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], -1).mul_(2))


class Differs(_Layer):
    """A difference of ends that are close to each other, which must not be taken after the map."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).tanh()


class Watched(_Layer):
    """A hook that reads the input of the map, as one that records statistics does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin.register_forward_pre_hook(self._note)
        self.smallest = nn.Parameter(torch.zeros(()))

    def _note(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] + args[0].clamp(max=0) * 0,)

    message = Ends.message


MODELS: dict[str, Callable[[], nn.Module]] = {
    "both ends": Ends,
    "without bias": lambda: Ends(bias=False),
    "wider than a row": lambda: Ends(out=9),
    "one end": lambda: OneEnd(6),
    "in place": lambda: InPlace(6),
    "by keyword": ByKeyword,
    "edges between": lambda: EndsAndEdges(18),
    "used twice": UsedTwice,
    "towers": lambda: Towers(6),
    "attention": Attends,
    "written": Written,
    "difference": Differs,
    "watched": Watched,
    "frozen": lambda: Ends().requires_grad_(False),
    "mean": lambda: gnn.GeneralConv(6, 4).double(),
    "two layers": lambda: gnn.Sequential("x, e", [(Ends(out=6), "x, e -> x"), (Ends(), "x, e -> x")]),
}


def _call(model: nn.Module, fields: dict[str, Tensor], edges: Any) -> Tensor:
    edge = (fields["edge_attr"],) if isinstance(model, EndsAndEdges) else ()
    out: Tensor = model(fields["x"], edges, *edge)
    return out


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(MODELS))
def test_equals_the_whole_graph(name: str, ranks: int, modes: Any) -> None:
    assert_case_exact((MODELS[name], _call), GRAPH, sp.pyg.wrap, ranks, modes)


class _Multiplications(TorchDispatchMode):
    """Counts the multiplications of matrix products. (FlopCounterMode hooks modules, and then nothing is mapped.)"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left = args[-2]
            self.total += out.numel() * left.size(1)
        return out


EDGES = 3000


def _multiplications(make: Callable[[], nn.Module], ranks: int = 1) -> int:
    """How many multiplications a rank makes in a forward and a backward over `EDGES` edges, at most."""
    draw = torch.Generator().manual_seed(0)
    graph = WholeGraph(40, torch.randint(40, (2, EDGES), generator=draw), {"x": torch.randn(40, 6).double()}, {})
    owners = assignments(40, ranks, graph.edge_index)["random"]

    def body(comm: sp.Communicator) -> int:
        with sp.seed(0, comm):
            plain = make()
        model = sp.pyg.wrap(plain, comm)
        own = shard_in_memory(graph, owners, comm)
        model(own.x, own)  # the probe, and what is followed
        with _Multiplications() as counted:
            model(own.x.clone().requires_grad_(), own).sum().backward()
        return counted.total

    return max(run(body, ranks))


@pytest.mark.parametrize("name", ["both ends", "one end", "in place", "used twice", "towers", "attention"])
def test_nodes_are_mapped_instead_of_edges(name: str) -> None:
    assert _multiplications(MODELS[name]) < EDGES * 6  # once over the edges is at least four times as many


@pytest.mark.parametrize("make", [Differs, Watched, lambda: Ends(out=13)], ids=["difference", "watched", "wide"])
def test_edges_are_mapped_where_they_must(make: Callable[[], nn.Module]) -> None:
    assert _multiplications(make) > EDGES * 6 * 4


def test_wider_rows_do_not_travel() -> None:
    assert _multiplications(lambda: Ends(out=9)) < EDGES * 12
    assert _multiplications(lambda: Ends(out=9), ranks=2) > EDGES * 12


def test_a_hook_on_one_rank_alone() -> None:
    """What one rank cannot do, none does."""

    class OnOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Ends()

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            found: Tensor = self.layer(x, edge_index)
            return found

    def wrap(model: nn.Module, comm: Any) -> nn.Module:
        if comm.rank == 0:
            layer: Any = model.layer
            layer.lin.register_forward_pre_hook(lambda module, args: (args[0].clone(),))
        return sp.pyg.wrap(model, comm)

    torch.manual_seed(0)
    assert_exact_in(ONE_PART_EMPTY, OnOne(), GRAPH, _call, wrap, 3)


def test_columns_far_from_zero_keep_their_digits() -> None:
    """In float32, points of a mesh that are close to each other and far from the origin."""
    torch.manual_seed(0)
    model = Differs().float()
    graph = WholeGraph(GRAPH.num_nodes, GRAPH.edge_index, {"x": GRAPH.node["x"].float() / 64 + 4096}, {})
    with torch.no_grad():
        model.lin.weight[:, :6] = 0
        expected = model(graph.node["x"], graph.edge_index)

    def body(comm: Any) -> Tensor:
        own = shard_in_memory(graph, ALONE["alone"], comm)
        with torch.no_grad():
            found: Tensor = sp.pyg.wrap(model, comm)(own.x, own)
        return found

    assert (run(body, 1)[0] - expected).abs().max() < 1e-5
