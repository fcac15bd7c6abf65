"""What scripts do beside layers, and what would be silently wrong on a part of the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, shard_in_memory
from shardpass.testing.graphs import assignments, awkward_graph
from shardpass.testing.run import run

WHOLE = awkward_graph(channels=4)
X = WHOLE.node["x"].double()
Forward = Callable[[nn.Module, Any, Tensor, Any], Tensor]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(4, 4).double()
        self.emb = nn.Embedding(2, 4).double()
        self.step = forward

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.step(self, self.conv(x, edge_index), x, edge_index)


def _refusal(forward: Forward, ranks: int, **modules: nn.Module) -> str:
    owners = assignments(WHOLE.num_nodes, ranks, WHOLE.edge_index)["random"]
    graph = WholeGraph(WHOLE.num_nodes, WHOLE.edge_index, {"x": X}, {})

    def body(comm: Any) -> str:
        with sp.seed(0, comm):
            model = Model(forward)
        for name, module in modules.items():
            model.add_module(name, copy.deepcopy(module))
        own = shard_in_memory(graph, owners, comm)
        try:
            sp.pyg.wrap(model, comm)(own.x, own)
        except RefusedError as error:
            return str(error)
        return ""

    found: list[str] = run(body, ranks)
    return found[0]


def _users_first(model: Any, h: Tensor, x: Tensor, edge_index: Any) -> Tensor:
    users: Tensor = h + model.emb((torch.arange(x.size(0)) >= 10_000).long())  # no rank has so many
    return users


def _block(model: Any, h: Tensor, x: Tensor, edge_index: Any) -> Tensor:
    return h * (torch.arange(len(h)) // 10_000 + 1).unsqueeze(1)


@pytest.mark.parametrize("forward", [_users_first, _block])
@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_of_own_rows_are_refused_whatever_their_values(forward: Forward, ranks: int) -> None:
    assert "differs from row to row of the nodes" in _refusal(forward, ranks)


def _one_mask(model: Any, h: Tensor, x: Tensor, edge_index: Any) -> Tensor:
    return h * (torch.rand(4, dtype=h.dtype) > 0.5)


def _one_factor(model: Any, h: Tensor, x: Tensor, edge_index: Any) -> Tensor:
    return h * torch.rand((), dtype=h.dtype)


def _one_step(model: Any, h: Tensor, x: Tensor, edge_index: Any) -> Tensor:
    found: Tensor = h + model.emb(torch.randint(2, (1,)))
    return found


@pytest.mark.parametrize("forward", [_one_mask, _one_factor, _one_step])
def test_a_random_number_for_all_rows_is_refused_on_several_ranks(forward: Forward) -> None:
    assert "is the same for all rows here, and every rank draws another" in _refusal(forward, 2)
    assert _refusal(forward, 1) == ""


@torch.jit.script
def _centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


@torch.jit.script
def _scaled(h: Tensor) -> Tensor:
    return h.relu() * 2


@torch.jit.script
def _by_count(h: Tensor) -> Tensor:
    return h * (100.0 / h.size(0))


@pytest.mark.parametrize("function", [_centred, _scaled, _by_count])
def test_a_scripted_function_is_refused_since_its_sizes_are_not_seen(function: Any) -> None:
    for ranks in (1, 2):
        assert "in code that torch.jit.script has compiled" in _refusal(lambda m, h, x, e: function(h), ranks)


def _per_row(model: Any, h: Tensor, x: Tensor, edge_index: Any) -> Tensor:
    return h * (torch.rand(len(h), 1) > 0.5) + torch.randn_like(h) + h * torch.arange(4)


def _seeded(model: Any, h: Tensor, x: Tensor, edge_index: Any) -> Tensor:
    return h * (torch.rand(4, generator=torch.Generator().manual_seed(0)) > 0.5)


@pytest.mark.parametrize("forward", [_per_row, _seeded])
def test_numbers_per_row_and_those_of_a_common_seed_pass(forward: Forward) -> None:
    assert _refusal(forward, 2) == ""


def test_a_row_for_each_edge_from_outside_a_message_is_told() -> None:
    class Scaled(gnn.MessagePassing):
        factor: Tensor

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            self.factor = torch.ones(edge_index.size(1), 1, dtype=x.dtype)
            found: Tensor = self.propagate(edge_index, x=x)
            return found

        def message(self, x_j: Tensor) -> Tensor:
            return x_j * self.factor

    layer = Scaled()
    told = _refusal(lambda m, h, x, e: m.scaled(h, e), 2, scaled=layer)
    assert "with a row for each edge, but a message runs on some edges at a time" in told


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of edges over the same nodes, each partitioned on its own."""
    folder = tmp_path_factory.mktemp("stores")
    for seed, name in enumerate(("first", "second")):
        draw = torch.Generator().manual_seed(seed)
        data = Data(x=X, edge_index=torch.randint(len(X), (2, 200), generator=draw))
        sp.partition(data, folder / name, parts=2, method="random", seed=seed)
    return folder / "first", folder / "second"


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(4, 4).double()

    def forward(self, x: Tensor, edge_index: Any, label_edges: Any = None) -> Tensor:
        h: Tensor = self.conv(x, edge_index)
        return h if label_edges is None else h[label_edges[1]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_stores_that_number_nodes_differently_are_refused(stores: tuple[Path, Path], ranks: int) -> None:
    def body(comm: sp.Communicator) -> list[str]:
        first, second = (sp.load(path, comm) for path in stores)
        with sp.seed(0, comm):
            model = Both()
        model = sp.pyg.wrap(model, comm)
        assert second.x is not None
        found = []
        for given in ((first.x, first, second), (second.x, first)):
            try:
                model(*given)
                found.append("")
            except RefusedError as error:
                found.append(str(error))
        return found

    for found in sp.spawn(body, ranks):
        assert "is given two graphs, which were partitioned on their own" in found[0]
        assert "is given a graph and a field of another graph" in found[1]


def test_a_graph_moves_to_the_device_where_it_is() -> None:
    owners = torch.zeros(WHOLE.num_nodes, dtype=torch.int64)

    def body(comm: Any) -> None:
        graph = shard_in_memory(WHOLE, owners, comm)
        assert graph.to("cpu") is graph and graph.to(torch.device("cpu"), non_blocking=True) is graph
        with pytest.raises(RefusedError, match=r"cannot be moved to meta. Say where before it is loaded"):
            graph.to("meta")

    run(body, 1)


def test_a_graph_of_dgl_has_the_numbers_that_refusals_name() -> None:
    dgl = pytest.importorskip("dgl")
    owners = assignments(WHOLE.num_nodes, 2, WHOLE.edge_index)["random"]

    def body(comm: Any) -> None:
        graph = sp.dgl.graph(shard_in_memory(WHOLE, owners, comm))
        assert graph.total_nodes == WHOLE.num_nodes and graph.total_edges == WHOLE.edge_index.size(1)
        assert graph.to("cpu") is graph and graph.long() is graph and graph.create_formats_() is None
        with pytest.raises(RefusedError, match=r"graph\.total_nodes and graph\.total_edges"):
            1 / graph.num_nodes()

    run(body, 2)
    assert dgl.__version__


def test_readouts_of_dgl_refuse_a_graph_made_of_several() -> None:
    dgl = pytest.importorskip("dgl")
    node = {"x": X, "batch": torch.arange(len(X)) % 3}
    whole = WholeGraph(WHOLE.num_nodes, WHOLE.edge_index, node, {})
    owners = assignments(WHOLE.num_nodes, 2, WHOLE.edge_index)["random"]

    def body(comm: Any) -> None:
        graph = sp.dgl.graph(shard_in_memory(whole, owners, comm))
        for readout in (sp.dgl.sum_nodes, sp.dgl.mean_nodes, sp.dgl.max_nodes, sp.dgl.softmax_nodes):
            with pytest.raises(RefusedError, match="stores a node field 'batch'"):
                readout(graph, "x")
        pooled = gnn.global_add_pool(graph.ndata["x"], graph.batch)
        expected = torch.stack([X[node["batch"] == k].sum(0) for k in range(3)])
        assert torch.allclose(pooled, expected)

    run(body, 2)
    assert dgl.__version__


def test_a_node_type_of_dgl_may_be_called_node(tmp_path: Path) -> None:
    """Nodes of a graph of one type are called so in the engine, and `_N` in DGL; those of several keep their names."""
    dgl = pytest.importorskip("dgl")
    src, dst = WHOLE.edge_index
    whole = dgl.heterograph(
        {("node", "a", "node"): (src, dst), ("node", "b", "node"): (dst, src)}, num_nodes_dict={"node": len(X)}
    )
    whole.ndata["x"] = X
    sp.partition(whole, tmp_path / "parts", parts=2, method="random")

    def body(comm: sp.Communicator) -> Tensor | None:
        loaded = sp.load(tmp_path / "parts", comm)
        graph = sp.dgl.graph(loaded)
        assert graph.ntypes == ["node"] and graph["a"].canonical_etypes == [("node", "a", "node")]
        with graph["a"].local_scope() as _:
            part = graph["a"]
            part.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "s"))
            return sp.gather(loaded, part.ndata["s"], "node")

    expected = torch.zeros_like(X).index_add(0, dst, X[src])
    found = sp.spawn(body, 2)[0]
    assert found is not None and torch.allclose(found, expected)
