"""A model may be the first to read a field of a stored graph: reading it is not followed, what it reads is."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def data() -> Data:
    draw = torch.Generator().manual_seed(5)
    return Data(
        x=torch.randn(50, 4, generator=draw).double(),
        edge_index=torch.randint(50, (2, 240), generator=draw),
        edge_weight=torch.rand(240, generator=draw).double(),
    )


@pytest.fixture(scope="module")
def parts(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts, so that one and two ranks merge fields, and three ranks map them."""
    path = tmp_path_factory.mktemp("fields") / "parts"
    sp.partition(data, path, parts=3, method="random")
    return path


class Reads(nn.Module):
    """Takes everything from `data`, as many examples of PyG do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(4, 3)

    def forward(self, data: Any) -> Tensor:
        found: Tensor = self.conv(data.x, data.edge_index, data.edge_weight) + data.x.sum(1, keepdim=True)
        return found


class Mixes(Reads):
    def forward(self, data: Any) -> Tensor:
        return super().forward(data) - data.x.mean()


def outputs(parts: Path, make: Callable[[sp.Communicator], nn.Module], ranks: int) -> Tensor:
    def body(comm: sp.Communicator) -> Tensor | None:
        graph = sp.load(parts, comm)
        return sp.gather(graph, make(comm)(graph).detach())

    found = sp.spawn(body, ranks)[0]
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pyg(data: Data, parts: Path, ranks: int) -> None:
    state = Reads().double().state_dict()

    def wrapped(comm: sp.Communicator) -> nn.Module:
        model = Reads().double()
        model.load_state_dict(state)
        return sp.pyg.wrap(model, comm)

    whole = Reads().double()
    whole.load_state_dict(state)
    torch.testing.assert_close(outputs(parts, wrapped, ranks), whole(data).detach())


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_was_read_is_followed(parts: Path, ranks: int) -> None:
    with pytest.raises(RefusedError, match=r"data.x.mean.*`mean` puts rows together, over the nodes"):
        outputs(parts, lambda comm: sp.pyg.wrap(Mixes().double(), comm), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dgl(data: Data, parts: Path, ranks: int) -> None:
    dgl = pytest.importorskip("dgl")

    class Weighted(nn.Module):
        def forward(self, g: Any) -> Tensor:
            with g.local_scope():
                g.update_all(dgl.function.u_mul_e("x", "edge_weight", "m"), dgl.function.sum("m", "h"))
                found: Tensor = g.ndata["h"] * g.ndata["x"].norm(dim=1, keepdim=True)
                return found

    g = dgl.graph(tuple(data.edge_index), num_nodes=50)
    g.ndata["x"], g.edata["edge_weight"] = data.x, data.edge_weight
    found = outputs(parts, lambda comm: sp.dgl.wrap(Weighted(), comm), ranks)
    torch.testing.assert_close(found, Weighted()(g))
