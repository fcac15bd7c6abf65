"""sync_during_backward around the backward of PyG models: training is that of the whole graph in one process."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.errors import PeerFailure
from shardpass.testing.graphs import assignments, shard_in_memory
from shardpass.testing.run import run

from .pyg_cases import GRAPH

X = GRAPH.node["x"].double()
Y = torch.arange(GRAPH.num_nodes) % 3
STEPS = 3


class Net(nn.Module):
    """Sharded calls of several kinds in backward, and parameters of one rank's branch."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.convs = nn.ModuleList([gnn.SAGEConv(X.size(1) + 2, 8), gnn.GATConv(8, 4, heads=2), gnn.SAGEConv(8, 3)])
        self.norms = nn.ModuleList([gnn.BatchNorm(8), nn.BatchNorm1d(8)])
        self.branch = nn.Linear(8, 8)

    def forward(self, x, edge_index, branch=False):
        x = torch.cat([x, self.table.weight], 1)
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[2](x + self.branch(x) if branch else x, edge_index)


def trained(model, x, edge_index, loss_of, backward, branch=False):
    """The losses, and the gradients of all steps but those of rows owned by ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(x, edge_index, branch))
        backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
        named = [(name, p) for name, p in model.named_parameters() if not name.startswith("table")]
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})
    return losses, gradients


def program(comm, owners, mode, branch_rank=-1):
    """What `trained` gives on this rank: by sync_gradients, by sync_during_backward; and the first table."""
    graph = shard_in_memory(GRAPH, owners, comm, sp.Options(mode=mode))
    with sp.seed(0, comm):
        model = Net(sp.NodeEmbedding(graph, 2, dtype=torch.float64)).double()
    first = copy.deepcopy(model.state_dict())
    everyone = torch.ones(graph.num_nodes, dtype=torch.bool)
    x, y = X[graph.node_ids], Y[graph.node_ids]
    results = []
    for during in (False, True):
        mine = sp.pyg.wrap(copy.deepcopy(model), comm, check=False)

        def backward(loss, mine=mine, during=during):
            if during:
                with sp.sync_during_backward(mine, comm, 200):
                    loss.backward()
            else:
                loss.backward()
                sp.sync_gradients(mine, comm, 200)

        def loss_of(h):
            return sp.cross_entropy(h, y, everyone, comm)

        results.append(trained(mine, x, graph, loss_of, backward, comm.rank == branch_rank))
    return *results, first, graph.node_ids


def whole(results):
    """What `trained` gives on the whole graph, from the parameters that the ranks had."""
    table = nn.Embedding(GRAPH.num_nodes, 2).double()
    model = Net(table).double()
    model.load_state_dict(
        {name: value for name, value in results[0][2].items() if name != "table.weight"}, strict=False
    )
    with torch.no_grad():
        for *_, first, ids in results:
            table.weight[ids] = first["table.weight"]
    return trained(
        model, X, GRAPH.edge_index, lambda h: nn.functional.cross_entropy(h, Y), lambda loss: loss.backward()
    )


def assert_same_gradients(found, expected):
    assert found[0] == pytest.approx(expected[0], abs=1e-10)
    for one, other in zip(found[1], expected[1]):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if one[name] is None or value is None:
                assert (one[name] is None or not one[name].any()) and (value is None or not value.any()), name
            else:
                torch.testing.assert_close(one[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("ranks", "mode"), [*(pytest.param(n, "sar", marks=pytest.mark.long) for n in (1, 2)), (3, "sar"), (3, "halo")]
)
def test_training_is_that_of_the_whole_graph(ranks, mode):
    for owners in assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).values():
        results = run(program, ranks, args=(owners, mode))
        expected = whole(results)
        for by_sync, during, *_ in results:
            assert_same_gradients(during, expected)
            assert_same_gradients(during, by_sync)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_branch_of_one_rank(ranks):
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"]
    for by_sync, during, *_ in run(program, ranks, args=(owners, "sar", ranks - 1)):
        assert_same_gradients(during, by_sync)
        assert during[1][0]["branch.weight"].any()


@pytest.mark.long
@pytest.mark.processes
def test_over_processes():
    owners = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["random"]
    results = run(program, 3, "processes", args=(owners, "sar"))
    for by_sync, during, *_ in results:
        assert_same_gradients(during, whole(results))
        assert_same_gradients(during, by_sync)


def test_an_exception_within_backward_on_one_rank_ends_the_others():
    """Some sums are under way by then, and the others wait in a sharded call."""
    owners = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["random"]

    def body(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        net = Net(sp.NodeEmbedding(graph, 2, dtype=torch.float64)).double()
        model = sp.pyg.wrap(net, comm, check=False)
        x = X[graph.node_ids].requires_grad_()
        if comm.rank == 1:
            model.convs[1].register_full_backward_hook(lambda *_: 1 / 0)
        try:
            with sp.sync_during_backward(model, comm, 1):
                model(x, graph).square().sum().backward()
        except PeerFailure as error:
            assert "rank 1 failed first: ZeroDivisionError" in str(error)
            raise

    with pytest.raises(ZeroDivisionError):
        run(body, 3)
