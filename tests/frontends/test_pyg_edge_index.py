"""Functions of PyG that only look at the structure run on the stand-in for edge_index as they are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric import nn as gnn
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from shardpass import pyg
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, assert_exact, assignments, awkward_graph, run, shard_in_memory

GRAPH = awkward_graph()


def on_ranks(work, ranks=3, kind="random"):
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[kind]
    return run(lambda comm: work(shard_in_memory(GRAPH, owners, comm)), ranks)


def by_node(parts, like):
    """Rows of all ranks in the original order, from ``(node_ids, rows)``."""
    out = torch.full_like(like, -77)
    for ids, rows in parts:
        out[ids] = rows
    return out


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["random", "empty part", "no edges"])
@pytest.mark.parametrize("add", [True, False])
def test_gcn_norm_of_pyg_as_it_is(ranks, kind, add):
    if ranks == 1 and kind != "random":
        pytest.skip("one rank has everything")

    def degree_and_pairs(edge_index, weight, x):
        index, weight = gcn_norm(edge_index, weight, x.size(0), False, add, dtype=torch.float64)
        messages = x[index[0]] * weight.view(-1, 1)
        return torch.zeros_like(x).index_add(0, index[1], messages), index.size(1)

    whole, num_edges = degree_and_pairs(GRAPH.edge_index, GRAPH.edge["edge_weight"], GRAPH.node["x"])
    results = on_ranks(lambda g: (g.node_ids, *degree_and_pairs(g.edge_index, g.edge_weight, g.x)), ranks, kind)
    torch.testing.assert_close(by_node([r[:2] for r in results], whole), whole, rtol=0, atol=1e-12)
    assert sum(r[2] for r in results) == num_edges


def test_self_loops_of_pyg_as_they_are():
    def count(graph):
        index, n = graph.edge_index, graph.num_own_nodes
        removed, attr = utils.remove_self_loops(index, graph.edge_attr)
        added, _ = utils.add_self_loops(index, graph.edge_attr, fill_value="mean", num_nodes=n)
        remaining, weight = utils.add_remaining_self_loops(index, graph.edge_weight, 7.0, n)
        assert attr.size(0) == removed.size(1)
        return removed.size(1), added.size(1), remaining.size(1), weight.sum()

    class Whole:
        edge_index, num_own_nodes = GRAPH.edge_index, GRAPH.num_nodes
        edge_attr, edge_weight = GRAPH.edge["edge_attr"], GRAPH.edge["edge_weight"]

    right, results = count(Whole), on_ranks(count)
    for k in range(4):
        torch.testing.assert_close(torch.as_tensor(sum(r[k] for r in results)), torch.as_tensor(right[k]))


class Unnumbered(torch.nn.Module):
    """A layer that adds self-loops without saying how many nodes there are, after it has removed those there were."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.SimpleConv("sum")

    def forward(self, x, edge_index):
        edge_index, _ = utils.remove_self_loops(edge_index)
        return self.conv(x, utils.add_self_loops(edge_index)[0])


UNNUMBERED = {"EG": lambda: gnn.EGConv(5, 4, ["sum", "max"], num_heads=2), "own": Unnumbered}
LAST = GRAPH.num_nodes - 1


def with_last_edges(*edges):
    """The awkward graph, whose last node is isolated, with some more edges."""
    more = torch.cat([GRAPH.edge_index, torch.tensor(edges, dtype=torch.long).view(-1, 2).T], 1)
    return WholeGraph(GRAPH.num_nodes, more, {"x": GRAPH.node["x"]})


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("edges", [[(3, LAST)], [(LAST, 3)], [(LAST, 3), (LAST, 4), (LAST, 5), (LAST, 6)]])
@pytest.mark.parametrize("name", UNNUMBERED)
def test_the_number_of_nodes_is_that_of_the_whole_list(ranks, edges, name):
    if name == "own" and ranks > 1 and len(edges) == 1 and edges[0][0] == LAST:
        pytest.skip("whether other ranks have dropped the edge is not known")
    model = UNNUMBERED[name]().double()
    assert_exact(model, with_last_edges(*edges), lambda m, i, e: m(i["x"], e), pyg.wrap, ranks=ranks, modes=("sar",))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "edges, name", [([], "EG"), ([], "own"), ([(LAST, LAST)], "own")], ids=["isolated", "isolated, own", "only a loop"]
)
def test_a_number_that_pyg_would_not_get_is_refused(ranks, edges, name):
    model = UNNUMBERED[name]().double()
    with pytest.raises(
        RefusedError, match=r"the last node of the original graph, on rank \d, has no edge, so PyG would add none"
    ):
        assert_exact(
            model, with_last_edges(*edges), lambda m, i, e: m(i["x"], e), pyg.wrap, ranks=ranks, modes=("sar",)
        )


def test_self_loops_for_a_given_number_of_nodes_are_added_whatever_was_asked_before():
    def work(graph):
        conv, x, index = pyg.wrap(gnn.SimpleConv("sum"), graph.comm), graph.x, graph.edge_index
        utils.dropout_node(index, 0.5, training=False)  # asks for the largest id
        return graph.node_ids, conv(x, utils.add_self_loops(index, num_nodes=x.size(0))[0])

    loops = torch.cat([GRAPH.edge_index, torch.arange(GRAPH.num_nodes).expand(2, -1)], 1)
    whole = gnn.SimpleConv("sum")(GRAPH.node["x"], loops)
    torch.testing.assert_close(by_node(on_ranks(work), whole), whole)
