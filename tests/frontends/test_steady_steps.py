"""The steady state of training: what torch carries out in the tenth step of two layers, beside plain PyG."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor

import shardpass as sp
from shardpass.testing.graphs import WholeGraph, shard_in_memory
from shardpass.testing.run import run

from .steady_models import LAYERS, OF_POSITIONS, WIDTH, Model, Seen, waits_on_the_device

NODES, EDGES, CLASSES = 2000, 16000, 7
Step = Callable[[], Tensor]


def graph_in_one_piece() -> WholeGraph:
    torch.manual_seed(0)
    x, y = torch.randn(NODES, WIDTH), torch.randint(CLASSES, (NODES,))
    return WholeGraph(NODES, torch.randint(NODES, (2, EDGES)), {"x": x, "y": y, "train_mask": torch.rand(NODES) < 0.5})


def steps(name: str) -> tuple[Step, Step, Model, Any]:
    """A step of the engine and one of PyG, with the engine's model and graph."""
    whole, comm = graph_in_one_piece(), sp.connect("local")
    plain = Model(LAYERS[name][0])
    graph = shard_in_memory(whole, torch.zeros(NODES, dtype=torch.int64), comm)
    model = sp.pyg.wrap(deepcopy(plain), comm)

    def mine() -> Tensor:
        model.zero_grad()
        loss = sp.cross_entropy(model(graph.x, graph.edge_index), graph.y, graph.train_mask, comm)
        loss.backward()
        return loss.detach()

    def pyg() -> Tensor:
        plain.zero_grad()
        mask = whole.node["train_mask"]
        loss = F.cross_entropy(plain(whole.node["x"], whole.edge_index)[mask], whole.node["y"][mask])
        loss.backward()
        return loss.detach()

    return mine, pyg, model, graph


def seen_in_tenth(step: Step) -> Seen:
    for _ in range(9):
        step()
    with Seen(EDGES) as seen:
        step()
    return seen


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_takes_few_operations(name: str) -> None:
    mine, pyg, *_ = steps(name)
    seen, of_pyg = seen_in_tenth(mine), seen_in_tenth(pyg)
    assert not +seen.waits, "a device would have to be waited for"
    assert not +seen.of_edges, "numbers of edges are computed again"
    assert seen.count <= LAYERS[name][1] * of_pyg.count
    torch.testing.assert_close(mine(), pyg())


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["GCN", "GATv2", "GINE"]),
        (1, [*LAYERS, *OF_POSITIONS]),
        (3, [*LAYERS, *OF_POSITIONS]),
    ],
)
def test_a_step_waits_for_no_device(ranks: int, names: list[str]) -> None:
    for found in run(waits_on_the_device, ranks, "processes", args=(names,)):
        assert found == {name: [] for name in names}


@pytest.mark.parametrize("write", ["in place", "data", "numpy", "another"])
@pytest.mark.parametrize("field", ["train_mask", "y", "x"])
def test_what_is_written_to_is_seen(field: str, write: str) -> None:
    mine, _, model, graph = steps("SAGE")
    for _ in range(4):
        before = mine()
    old: Tensor = getattr(graph, field)
    new = old.flip(0).clone()
    if write == "in place":
        old.copy_(new)
    elif write == "data":
        old.data.copy_(new)
    elif write == "numpy":
        old.numpy()[:] = new.numpy()
    fields = {"x": graph.x, "y": graph.y, "train_mask": graph.train_mask} | {field: new}
    x, y, mask = fields.values()
    rows = model(x, graph.edge_index)
    after = mine() if write != "another" else sp.cross_entropy(rows, y, mask, graph.comm).detach()
    expected = F.cross_entropy(rows[mask], y[mask]).detach()
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, expected)


def test_self_loops_of_another_graph_are_not_taken() -> None:
    comm, whole = sp.connect("local"), graph_in_one_piece()
    owners = torch.zeros(NODES, dtype=torch.int64)
    plain = Model(LAYERS["GCN"][0])
    model = sp.pyg.wrap(deepcopy(plain), comm)
    for shift in (0, 1, 0):
        edges = (whole.edge_index + shift) % NODES if shift else whole.edge_index[:, : EDGES // 2]
        graph = shard_in_memory(WholeGraph(NODES, edges, whole.node), owners, comm)
        for _ in range(4):
            found = model(graph.x, graph.edge_index)
        torch.testing.assert_close(found, plain(whole.node["x"], edges))


@pytest.mark.parametrize("write", ["in place", "data"])
def test_weights_of_edges_that_are_written_to_are_seen(write: str) -> None:
    comm, whole = sp.connect("local"), graph_in_one_piece()
    whole.edge["w"] = torch.rand(EDGES)
    graph = shard_in_memory(whole, torch.zeros(NODES, dtype=torch.int64), comm)
    plain = gnn.GCNConv(WIDTH, WIDTH)
    model = sp.pyg.wrap(deepcopy(plain), comm)
    for _ in range(4):
        torch.testing.assert_close(
            model(graph.x, graph.edge_index, graph.w), plain(whole.node["x"], whole.edge_index, whole.edge["w"])
        )
    changed = graph.w.flip(0).clone()
    (graph.w if write == "in place" else graph.w.data).copy_(changed)
    order = shard_in_memory(whole, torch.zeros(NODES, dtype=torch.int64), comm).edge_index
    torch.testing.assert_close(
        model(graph.x, graph.edge_index, graph.w), plain(whole.node["x"], order.plain.as_subclass(Tensor), changed)
    )
