"""Fields of a graph: read first by a model, assigned by it, or passed in the original order."""

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
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import add_self_loops

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assignments, run, shard_in_memory

from .pyg_cases import GRAPH


class Assigns(nn.Module):
    """Each call goes on from what the call before has left."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.GraphConv(5, 5)

    def forward(self, data):
        self.lacks = not hasattr(data, "steps")
        data.x = data.x + self.conv(data.x, data.edge_index, data.edge_weight).tanh()
        data.edge_index, data.edge_weight = add_self_loops(data.edge_index, data.edge_weight, 2.0, data.x.size(0))
        data.steps = data.x * 2
        copy.copy(data).x = data.x * 0
        shallow = data.clone()
        shallow.edge_weight = None
        return data.x.square()


@pytest.mark.parametrize("ranks", [1, 4])
def test_assigned_fields_stay(ranks):
    torch.manual_seed(0)
    plain = Assigns().double()
    whole = Data(edge_index=GRAPH.edge_index, x=GRAPH.node["x"], edge_weight=GRAPH.edge["edge_weight"])
    with torch.no_grad():
        right = [(plain(whole), whole.x, whole.steps) for _ in range(4)]
    owners = assignments(41, ranks, GRAPH.edge_index)["random"]

    def work(comm):
        graph, model = shard_in_memory(GRAPH, owners, comm), Assigns().double()
        model.load_state_dict(plain.state_dict())
        sp.pyg.wrap(model, comm)
        other = copy.copy(graph)
        with torch.no_grad():
            for step, expected in enumerate(right):
                found = model(graph), graph.x, graph["steps"]
                for mine, rows in zip(found, expected):
                    torch.testing.assert_close(mine, rows[graph.node_ids], rtol=0, atol=1e-10)
                assert model.lacks is (step == 0)
        assert torch.equal(other.x, graph.node["x"]) and not hasattr(other, "steps")
        assert graph.edge_index.size(1) == graph.num_own_edges + 4 * graph.num_own_nodes
        assert graph.edge_weight.size(0) == graph.edge_index.size(1)

    run(work, ranks)


class Encodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.conv = nn.Linear(5, 8), gnn.GraphConv(8, 3)

    def forward(self, data):
        data.x = self.lin(data.x)
        return self.conv(data.x, data.edge_index)


def test_a_later_call_that_fails_on_what_was_assigned_is_told_so():
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(41, dtype=torch.int64), comm)
    model = sp.pyg.wrap(Encodes().double(), comm)
    model(graph)
    with pytest.raises(RuntimeError, match=r"Encodes has assigned data\.x, which stays.*data = copy\.copy\(data\)"):
        model(graph)


class OfTypes(nn.Module):
    def forward(self, data):
        data["paper"].x = data["paper"].x * 2
        return {"paper": data.x_dict["paper"] + data["paper"]["x"]}


def test_assigned_fields_of_a_type_stay(tmp_path):
    data = HeteroData()
    data["paper"].x = torch.rand(6, 2)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 3]])
    sp.partition(data, tmp_path / "parts", parts=2, method="random")
    right = [OfTypes()(data)["paper"] for _ in range(2)]

    def work(comm):
        graph = sp.load(tmp_path / "parts", comm)
        model = sp.pyg.wrap(OfTypes(), comm)
        for expected in right:
            torch.testing.assert_close(model(graph)["paper"], expected[graph["paper"].node_ids])
        torch.testing.assert_close(graph.x_dict["paper"], data["paper"].x[graph["paper"].node_ids])

    run(work, 2)


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
def test_a_model_of_pyg_may_read_first(data: Data, parts: Path, ranks: int) -> None:
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
def test_a_model_of_dgl_may_read_first(data: Data, parts: Path, ranks: int) -> None:
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


@pytest.fixture(scope="module")
def ordered() -> Data:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(60, 4, generator=draw)
    x[7, 0] = torch.nan
    edge_index, weight = torch.randint(60, (2, 300), generator=draw), torch.rand(300, generator=draw)
    return Data(x=x, edge_index=edge_index, edge_weight=weight, y=torch.randint(3, (60,), generator=draw))


@pytest.fixture(scope="module")
def ordered_parts(ordered: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original_order") / "ordered_parts"
    sp.partition(ordered, path, parts=2, method="random")
    return path


def called(ordered_parts: Path, given: Any, check: bool = True) -> Any:
    comm = sp.connect("local")
    graph = sp.load(ordered_parts, comm)
    model = sp.pyg.wrap(gnn.GCN(4, 5, 2, 3), comm, check=check)
    return model(*given(graph))


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.double().float(), lambda x: x.clone().requires_grad_()])
def test_features_in_the_original_order_are_refused(ordered: Data, ordered_parts: Path, change: Any) -> None:
    with pytest.raises(RefusedError, match=r"test_pyg_fields.py:\d+.*\[60, 4\] holds the field 'x' in the order of"):
        called(ordered_parts, lambda graph: (change(ordered.x), graph))


def test_edge_weights_in_the_original_order_are_refused(ordered: Data, ordered_parts: Path) -> None:
    with pytest.raises(RefusedError, match="holds the field 'edge_weight' in the order of the original graph"):
        called(ordered_parts, lambda graph: (graph.x, graph, ordered.edge_weight))


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
def test_own_rows_are_taken(ordered_parts: Path, given: Any) -> None:
    assert called(ordered_parts, given).shape == (60, 3)


def test_nothing_is_compared_without_the_check(ordered: Data, ordered_parts: Path) -> None:
    assert called(ordered_parts, lambda graph: (ordered.x, graph), check=False).shape == (60, 3)


def test_dgl_features_in_the_original_order_are_refused(ordered: Data, ordered_parts: Path) -> None:
    dgl = pytest.importorskip("dgl")
    comm = sp.connect("local")
    graph = sp.load(ordered_parts, comm)
    model = sp.dgl.wrap(dgl.nn.GraphConv(4, 3, allow_zero_in_degree=True), comm)
    with pytest.raises(RefusedError, match="holds the field 'x' in the order of the original graph"):
        model(graph, ordered.x)
