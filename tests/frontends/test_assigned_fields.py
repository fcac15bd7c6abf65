"""What a model assigns on its `data` stays there, for its caller and for the next call, as with PyG's Data."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import add_self_loops

import shardpass as sp
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


@pytest.mark.parametrize("ranks", [1, 3, 4])
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
