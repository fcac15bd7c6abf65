"""PyG's functions on edge_index in a model's own code: exact on the stand-in, or refused by name."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
import torch_geometric.utils as pyg
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assert_exact, assignments, run, shard_in_memory

from .how_much import ONE_TWO_FOUR
from .pyg_cases import GRAPH

N = GRAPH.num_nodes
STRUCTURE = {
    "add_self_loops": lambda e, w, n: pyg.add_self_loops(e, w, 2.0, n),
    "add_self_loops mean": lambda e, w, n: pyg.add_self_loops(e, w, "mean", n),
    "add_remaining_self_loops": lambda e, w, n: pyg.add_remaining_self_loops(e, w, 0.5, n),
    "remove_self_loops": lambda e, w, n: pyg.remove_self_loops(e, w),
    "segregate_self_loops": lambda e, w, n: pyg.segregate_self_loops(e, w)[:2],
    "get_laplacian": lambda e, w, n: pyg.get_laplacian(e, w, "sym", num_nodes=n),
    "degree of targets": lambda e, w, n: (e, w * pyg.degree(e[1], n, w.dtype)[e[1]]),
    "degree of sources": lambda e, w, n: (e, w * pyg.degree(e[0], n, w.dtype)[e[0]]),
    "softmax": lambda e, w, n: (e, pyg.softmax(w, e[1], num_nodes=n)),
    "subgraph of targets": lambda e, w, n: (e[:, e[0] != e[1]], w[e[0] != e[1]]),
}


class Structural(nn.Module):
    """Changes the edges, then passes messages."""

    def __init__(self, change):
        super().__init__()
        self.change, self.conv = change, gnn.GraphConv(5, 4)

    def forward(self, x, edge_index, edge_weight):
        edge_index, edge_weight = self.change(edge_index, edge_weight, x.size(0))
        return self.conv(x, edge_index, edge_weight)


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize("name", STRUCTURE)
def test_structural_functions_are_exact(name, ranks):
    torch.manual_seed(0)
    model = Structural(STRUCTURE[name]).double()

    def call(m, inputs, graph):
        return m(inputs["x"], graph, inputs["edge_weight"])

    owners = assignments(N, ranks, GRAPH.edge_index)
    assert_exact(model, GRAPH, call, sp.pyg.wrap, ranks=ranks, modes=("sar",), owners=owners)


class Dropping(nn.Module):
    """Drops edges or nodes in every forward, and keeps what it dropped."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.second = function, gnn.GCNConv(5, 6), gnn.SAGEConv(6, 4, aggr="max")

    def forward(self, x, edge_index):
        edge_index, self.kept, *_ = self.function(edge_index, 0.4, training=self.training)
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize("function", [pyg.dropout_edge, pyg.dropout_node], ids=lambda f: f.__name__)
def test_dropped_edges_are_those_of_one_mask_over_the_whole_graph(function, ranks):
    """What the ranks kept, put together, is a mask of the whole graph that gives the same output and gradients."""
    torch.manual_seed(0)
    model = Dropping(function).double()
    state = model.state_dict()
    owners = assignments(N, ranks, GRAPH.edge_index)["random"]

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        mine = Dropping(function).double()
        mine.load_state_dict(state)
        mine = sp.pyg.wrap(mine, comm)
        x = graph.x.clone().requires_grad_()
        out = mine(x, graph)
        out.square().sum().backward()
        return graph.node_ids, graph.edge_ids[mine.kept], out.detach(), x.grad

    results = run(work, ranks)
    kept = torch.cat([edges for _, edges, _, _ in results]).sort().values
    assert 0 < len(kept) < GRAPH.edge_index.size(1) and len(kept.unique()) == len(kept)
    edges = GRAPH.edge_index[:, kept]
    x = GRAPH.node["x"].clone().requires_grad_()
    expected = model.second(model.first(x, edges).relu(), edges)
    expected.square().sum().backward()
    for ids, _, out, grad in results:
        torch.testing.assert_close(out, expected[ids], rtol=0, atol=1e-10)
        torch.testing.assert_close(grad, x.grad[ids], rtol=0, atol=1e-10)
    if function is pyg.dropout_node:
        gone = torch.ones(GRAPH.edge_index.size(1), dtype=torch.bool)
        gone[kept] = False
        nodes = set(range(N)) - set(edges.flatten().tolist())
        assert all(int(a) in nodes or int(b) in nodes for a, b in GRAPH.edge_index[:, gone].t())


@pytest.mark.parametrize("function", [pyg.dropout_edge, pyg.dropout_node], ids=lambda f: f.__name__)
def test_evaluation_drops_nothing(function):
    torch.manual_seed(0)
    model = Dropping(function).double().eval()
    expected = model(GRAPH.node["x"], GRAPH.edge_index)
    owners = assignments(N, 2, GRAPH.edge_index)["random"]

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        mine = Dropping(function).double().eval()
        mine.load_state_dict(model.state_dict())
        torch.testing.assert_close(sp.pyg.wrap(mine, comm)(graph.x, graph), expected[graph.node_ids])

    run(work, 2)


REFUSED = {
    "dropout_edge undirected": lambda g: pyg.dropout_edge(g.edge_index, 0.3, force_undirected=True),
    "add_random_edge": lambda g: pyg.add_random_edge(g.edge_index, 0.3),
    "negative_sampling": lambda g: pyg.negative_sampling(g.edge_index),
    "coalesce": lambda g: pyg.coalesce(g.edge_index),
    "sort_edge_index": lambda g: pyg.sort_edge_index(g.edge_index),
    "to_undirected": lambda g: pyg.to_undirected(g.edge_index),
    "is_undirected": lambda g: pyg.is_undirected(g.edge_index),
    "k_hop_subgraph": lambda g: pyg.k_hop_subgraph(0, 1, g.edge_index),
    "to_dense_adj": lambda g: pyg.to_dense_adj(g.edge_index),
    "remove_isolated_nodes": lambda g: pyg.remove_isolated_nodes(g.edge_index),
    "to_torch_coo_tensor": lambda g: pyg.to_torch_coo_tensor(g.edge_index),
    "dropout_node relabelled": lambda g: pyg.dropout_node(g.edge_index, 0.3, relabel_nodes=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_need_the_ids_of_the_whole_graph_are_refused(name):
    owners = assignments(N, 2, GRAPH.edge_index)["random"]

    def work(comm):
        with pytest.raises(RefusedError, match="of a sharded graph"):
            REFUSED[name](shard_in_memory(GRAPH, owners, comm))

    run(work, 2)
