"""torch.compile of wrapped models: the same numbers as one process has, and code of the user's that is compiled."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch_geometric.nn import GraphConv

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run

from .compiled_models import CASES, LEFT_ALONE, Unrolled, compare
from .on_ranks import share
from .pyg_cases import GRAPH


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    """What other tests had compiled counts towards how often torch compiles the same code."""
    torch._dynamo.reset()


SOME = ["unrolled GATConv", "parts", "reads edges", "GraphSAGE", "EdgeCNN with BatchNorm"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "backend", "names"),
    [
        (1, "eager", SOME),
        pytest.param(2, "aot_eager", SOME[:3], marks=pytest.mark.long),
        pytest.param(1, "inductor", [*CASES], marks=pytest.mark.long),
        pytest.param(3, "aot_eager", [*CASES], marks=pytest.mark.long),
    ],
)
def test_a_compiled_model_is_exact(ranks: int, backend: str, names: list[str]) -> None:
    for rank, found in enumerate(run(compare, ranks, "processes", args=(backend, names))):
        assert {name: error for name, (error, *_) in found.items() if not error < 1e-10} == {}
        compiled = [name for name, (_, count, _) in found.items() if count]
        assert [name for name in names if name.startswith(("unrolled", "parts")) and name not in compiled] == []
        told = {name for name, (*_, told) in found.items() if told}
        assert told == (set(names).intersection(LEFT_ALONE) if rank == 0 else set())


class OfDGL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dgl = pytest.importorskip("dgl")
        self.conv, self.message = dgl.nn.SAGEConv(5, 4, "mean"), dgl.function.copy_u("h", "m")
        self.sum = dgl.function.sum("m", "out")

    def forward(self, graph, x):
        with graph.local_scope():
            graph.srcdata["h"] = self.conv(graph, x).relu()
            graph.update_all(self.message, self.sum)
            return graph.dstdata["out"].tanh()


def test_a_model_of_dgl_runs_as_it_is() -> None:
    comm = sp.connect("local")
    graph = share(GRAPH, comm)
    plain = OfDGL().double()
    model, compiled = (sp.dgl.wrap(copy.deepcopy(plain), comm) for _ in range(2))
    compiled = torch.compile(compiled, backend="eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(4):
            torch.testing.assert_close(compiled(graph, graph.x), model(graph, graph.x))
    assert sum("torch.compile leaves OfDGL.forward as it is" in str(one.message) for one in seen) == 1


class Changes(Unrolled):
    def forward(self, x, edge_index, reads=False):
        return super().forward(x * edge_index.size(0) if reads else x, edge_index)


def test_code_that_begins_to_read_edges_is_refused() -> None:
    comm = sp.connect("local")
    graph = share(GRAPH, comm)
    compiled = torch.compile(sp.pyg.wrap(Changes(GraphConv).double(), comm), backend="eager")
    for _ in range(4):  # the fourth is followed
        compiled(graph.x, graph.edge_index)
    with pytest.raises(RefusedError, match="Changes is compiled, and does with an edge list what it did in none"):
        compiled(graph.x, graph.edge_index, True)


@pytest.mark.parametrize("way", ["in place", "hooks", "keywords", "a copy", "checkpoint"])
def test_ways_to_compile(way: str) -> None:
    comm = sp.connect("local")
    graph, plain = share(GRAPH, comm), Unrolled(GraphConv).double()
    expected = sp.pyg.wrap(copy.deepcopy(plain), comm)(graph.x, graph.edge_index)
    model = sp.pyg.wrap(plain, comm, checkpoint="activations" if way == "checkpoint" else None)
    if way == "hooks":
        for module in (model, model.first):
            module.register_forward_hook(lambda module, given, out: out * 1)
    if way == "in place":
        model.compile(backend="eager")
    compiled = model if way == "in place" else torch.compile(model, backend="eager")
    for number in range(5):
        given = {"x": graph.x, "edge_index": graph.edge_index}
        out = compiled(**given) if way == "keywords" else compiled(*given.values())
        torch.testing.assert_close(out, expected)
        if way == "a copy" and number == 3:
            compiled = torch.compile(copy.deepcopy(model), backend="eager")
    out.sum().backward()


@pytest.mark.parametrize("reads_first", [False, True])
def test_one_call_that_reads_edges_is_enough(reads_first: bool) -> None:
    """Whatever calls in another mode do, which are followed too."""
    comm = sp.connect("local")
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(Changes(GraphConv).double(), comm)
    model.train(reads_first)
    model(graph.x, graph.edge_index, True)
    model.train(not reads_first)
    compiled = torch.compile(model, backend="eager")
    for reads in (False, False, True):
        found = compiled(graph.x, graph.edge_index, reads)
    torch.testing.assert_close(found, sp.pyg.wrap(copy.deepcopy(model), comm)(graph.x, graph.edge_index, True))


def test_a_model_that_nobody_followed_runs_as_it_is() -> None:
    comm = sp.connect("local")
    graph = share(GRAPH, comm)
    compiled = torch.compile(sp.pyg.wrap(Unrolled(GraphConv).double(), comm, check=False), backend="eager")
    with pytest.warns(UserWarning, match="leaves Unrolled.forward as it is: .*check=False"):
        compiled(graph.x, graph.edge_index)
