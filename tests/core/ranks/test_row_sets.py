"""Sets of rows: which of them are known to be others."""

import pytest
import torch

from shardpass.core.graphs import reversed_edges
from shardpass.core.ranks import RowSet
from shardpass.testing import awkward_hetero_graph, hetero_assignments, shard_hetero_in_memory

A, B = object(), object()
NODES = RowSet("nodes", 5, ("nodes", "node"))
AUTHORS = RowSet("authors", 5, ("nodes", "author"))
OF_A, OF_B = RowSet("edges", 5, ("edges", A)), RowSet("edges", 5, ("edges", B))
DRAWN = RowSet("drawn edges", 5, ("edges", A, object()))
UNKNOWN = RowSet("rows", 5, None)
PICKED = RowSet("picked nodes", 5, ("picked", object()))


def test_the_relation_of_edges():
    assert OF_A.relation is DRAWN.relation is A and OF_B.relation is B
    assert {rows.relation for rows in (NODES, UNKNOWN, PICKED)} == {None}


def test_edges_of_another_relation_and_nodes_for_edges_are_others():
    for one, other in ((OF_A, OF_B), (DRAWN, OF_B), (NODES, OF_A)):
        assert one.is_other_than(other) and other.is_other_than(one)
    for one, other in ((OF_A, DRAWN), (NODES, AUTHORS), (UNKNOWN, OF_A), (OF_A, UNKNOWN), (PICKED, OF_A)):
        assert not one.is_other_than(other) and not other.is_other_than(one)


@pytest.mark.ranks(3)
def test_lists_that_are_derived_from_a_relation_have_it(comm):
    whole = awkward_hetero_graph()
    kind, other = ("paper", "cites", "paper"), ("author", "writes", "paper")
    graph = shard_hetero_in_memory(whole, hetero_assignments(whole, comm.size)["random"], comm)
    index = graph[kind].edge_index
    loops = torch.arange(graph["paper"].num_own_nodes).expand(2, -1)
    lists = [index, index.flip(0), index.clone(), index[:, index[0] != index[1]], torch.cat([index, loops], 1)]
    lists += [torch.stack([index[0], index[1]]), reversed_edges(index, "a layer").edge_index]
    lists += [torch.cat([index[:, index[0] != index[1]], loops], 1).flip(0)]
    (of,) = index.edge_sets
    for derived in lists:
        (found,) = derived.edge_sets
        assert found.relation is of.relation and found.count == derived.size(1)
    assert graph[other].edge_index.edge_sets[0].is_other_than(of)
