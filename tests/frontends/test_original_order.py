"""One rank holds as many rows as the original graph, so a tensor in the original order does not fail by its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.errors import RefusedError


@pytest.fixture(scope="module")
def data() -> Data:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(60, 4, generator=draw)
    x[7, 0] = torch.nan
    edge_index, weight = torch.randint(60, (2, 300), generator=draw), torch.rand(300, generator=draw)
    return Data(x=x, edge_index=edge_index, edge_weight=weight, y=torch.randint(3, (60,), generator=draw))


@pytest.fixture(scope="module")
def parts(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original_order") / "parts"
    sp.partition(data, path, parts=2, method="random")
    return path


def called(parts: Path, given: Any, check: bool = True) -> Any:
    comm = sp.connect("local")
    graph = sp.load(parts, comm)
    model = sp.pyg.wrap(gnn.GCN(4, 5, 2, 3), comm, check=check)
    return model(*given(graph))


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.double().float(), lambda x: x.clone().requires_grad_()])
def test_features_in_the_original_order_are_refused(data: Data, parts: Path, change: Any) -> None:
    with pytest.raises(
        RefusedError, match=r"test_original_order.py:\d+.*\[60, 4\] holds the field 'x' in the order of"
    ):
        called(parts, lambda graph: (change(data.x), graph))


def test_edge_weights_in_the_original_order_are_refused(data: Data, parts: Path) -> None:
    with pytest.raises(RefusedError, match="holds the field 'edge_weight' in the order of the original graph"):
        called(parts, lambda graph: (graph.x, graph, data.edge_weight))


@pytest.mark.parametrize(
    "given",
    [
        lambda graph: (graph.x, graph, graph.edge_weight),
        lambda graph: (graph.x.clone(), graph, graph.edge_weight.clone()),
        lambda graph: (graph.x * 2, graph, graph.edge_weight + 1),
        lambda graph: (torch.zeros(60, 4), graph, torch.ones(300)),
        lambda graph: (torch.randn(60, 4), graph),
    ],
)
def test_own_rows_are_taken(parts: Path, given: Any) -> None:
    assert called(parts, given).shape == (60, 3)


def test_nothing_is_compared_without_the_check(data: Data, parts: Path) -> None:
    assert called(parts, lambda graph: (data.x, graph), check=False).shape == (60, 3)


def test_dgl(data: Data, parts: Path) -> None:
    dgl = pytest.importorskip("dgl")
    comm = sp.connect("local")
    graph = sp.load(parts, comm)
    model = sp.dgl.wrap(dgl.nn.GraphConv(4, 3, allow_zero_in_degree=True), comm)
    with pytest.raises(RefusedError, match="holds the field 'x' in the order of the original graph"):
        model(graph, data.x)
