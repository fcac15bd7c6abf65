"""``Options(mode="auto")``: the mode that fits is chosen before the first training forward, on every rank alike."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

GRAPH = awkward_graph()
RANKS = 3


def everyone(graph):
    return torch.ones(graph.num_nodes, dtype=torch.bool)


def train(options, check=True, call=lambda graph: graph):
    """Per rank: losses of three steps, and the mode of the graph afterwards."""

    def rank(comm):
        owners = assignments(GRAPH.num_nodes, RANKS, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm, options())
        with sp.seed(0, comm):
            model = GAT(5, 8, 2, 3, heads=2, norm="batch_norm").double()
        model = sp.pyg.wrap(model, comm, check=check)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            loss = sp.mean(model(graph.x, call(graph)).square().sum(-1), everyone(graph), comm)
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)
            optimizer.step()
            losses.append(loss.item())
        return losses, graph.options.runs_as, graph.options.chosen

    return sp.spawn(rank, RANKS)


def auto(budget):
    return lambda: sp.Options(mode="auto", memory_budget=budget)


@pytest.mark.parametrize("call", [lambda graph: graph, lambda graph: graph.edge_index], ids=["graph", "edge_index"])
def test_auto_trains_as_the_mode_it_chose(call, caplog):
    found = train(auto("1GiB"), call=call)
    modes = {mode for _, mode, _ in found}
    assert len(modes) == 1 and modes <= {"keep", "halo"}  # nothing is fetched twice where there is room
    (mode,) = modes
    expected = train(lambda: sp.Options(mode=mode), call=call)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in expected]
    assert caplog.text.count("mode='auto' is") == 1
    chosen = found[0][2]
    assert chosen.estimate.ranks == RANKS and chosen.estimate.terms["features"] > 0


def test_nothing_fits_is_said_on_all_ranks():
    with pytest.raises(RefusedError, match=r"nothing fits the memory budget of 1.0 MiB per rank: the smallest"):
        train(auto("1MiB"))


def test_auto_needs_the_model_as_it_was_built():
    with pytest.raises(RefusedError, match="mode='auto' runs a copy of the model"):
        train(auto("1GiB"), check=False)


def test_mode_and_budget_go_together():
    with pytest.raises(ValueError, match="go together"):
        sp.Options(mode="auto")
    with pytest.raises(ValueError, match="go together"):
        sp.Options(memory_budget="6GiB")
    with pytest.raises(ValueError, match="expected a number of bytes"):
        sp.Options(mode="auto", memory_budget="plenty")
    assert sp.Options(mode="auto", memory_budget=1e9).runs_as == "sar"


def test_auto_takes_dgl_models():
    conv = pytest.importorskip("dgl.nn")

    def rank(comm):
        owners = assignments(GRAPH.num_nodes, 2, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm, auto("1GiB")())
        with sp.seed(0, comm):
            layer = conv.GraphConv(5, 3, allow_zero_in_degree=True).double()
        layer = sp.dgl.wrap(layer, comm)
        layer(graph, graph.x).sum().backward()
        return graph.options.chosen.mode

    modes = sp.spawn(rank, 2)
    assert modes[0] == modes[1] is not None
