"""Negatives: pairs that are not edges, the same on any number of ranks, all of them where they are few."""

import numpy as np
import pytest
import torch

import shardpass as sp
from shardpass.core.sampling.permutation import shuffled
from shardpass.errors import DivergenceError
from shardpass.testing import (
    WholeGraph,
    assignments,
    awkward_graph,
    awkward_hetero_graph,
    hetero_assignments,
    run,
    shard_hetero_in_memory,
    shard_in_memory,
)

GRAPH = awkward_graph()


def drawn(whole, ranks, owners, *args, **kwargs):
    def work(comm):
        graph = shard_in_memory(whole, owners, comm)
        return sp.negative_sampling(graph, *args, **kwargs)

    return run(work, ranks)


def pairs_of(edge_index):
    return set(map(tuple, edge_index.t().tolist()))


@pytest.mark.parametrize(("num", "expected"), [(None, 220), (0.5, 110), (77, 77), (0, 0), (10**6, None)])
def test_negatives_are_no_edges_and_the_same_on_any_number_of_ranks(num, expected):
    loops = {(i, i) for i in range(GRAPH.num_nodes)}
    expected = GRAPH.num_nodes**2 - len(pairs_of(GRAPH.edge_index) | loops) if expected is None else expected
    found = []
    for ranks, kind in ((1, "random"), (3, "empty part"), (4, "no edges")):
        shares = drawn(GRAPH, ranks, assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[kind], num, seed=5)
        sizes = [share.size(1) for share in shares]
        assert max(sizes) - min(sizes) <= 1 and shares[0].dtype == torch.int64
        found.append(torch.cat(shares, 1))
        assert torch.equal(found[0], found[-1])
    pairs = pairs_of(found[0])
    assert len(pairs) == found[0].size(1) == expected
    assert not pairs & (pairs_of(GRAPH.edge_index) | loops)


def test_a_full_graph_has_none_and_a_nearly_full_one_few():
    ends = torch.cartesian_prod(torch.arange(6), torch.arange(6)).t()
    full = WholeGraph(6, ends)
    assert all(share.shape == (2, 0) for share in drawn(full, 2, torch.arange(6) % 2, 10, seed=0))
    nearly = WholeGraph(6, torch.cat([ends[:, :8], ends[:, 9:20], ends[:, 21:]], 1))
    assert pairs_of(torch.cat(drawn(nearly, 2, torch.arange(6) % 2, 10, seed=0), 1)) == {(1, 2), (3, 2)}
    assert drawn(WholeGraph(1, ends[:, :0]), 2, torch.zeros(1, dtype=torch.int64), 3, seed=0)[0].shape == (2, 0)


def test_types():
    whole = awkward_hetero_graph()
    for kind, edges in whole.edges.items():

        def work(comm, kind=kind):
            graph = shard_hetero_in_memory(whole, hetero_assignments(whole, 3)["types apart"], comm)
            return sp.negative_sampling(graph, 10**4, kind, seed=1)

        found = pairs_of(torch.cat(run(work, 3), 1))
        sizes = whole.num_nodes[kind[0]], whole.num_nodes[kind[2]]
        every = pairs_of(torch.cartesian_prod(*map(torch.arange, sizes)).t())
        loops = {(i, i) for i in range(sizes[0])} if kind[0] == kind[2] else set()
        assert found == every - pairs_of(edges) - loops


def test_seeds_and_errors():
    owners = torch.arange(GRAPH.num_nodes) % 2

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        first, second = (sp.negative_sampling(graph, 40) for _ in range(2))
        assert not torch.equal(first, second)  # drawn anew from rank 0's generator
        with pytest.raises(ValueError, match="expected 0 or more"):
            sp.negative_sampling(graph, -1)
        with pytest.raises(ValueError, match="expected one of"):
            sp.negative_sampling(graph, 3, ("a", "b", "c"))
        with pytest.raises(DivergenceError, match="ranks disagree about this call"):
            sp.negative_sampling(graph, 3, seed=comm.rank)
        return torch.stack([first, second])

    assert torch.cat(run(work, 2), 2).shape == (2, 2, 40)


def test_permuted_ids_are_one_permutation_on_any_number_of_ranks():
    whole, orders = awkward_hetero_graph(), []

    def work(comm):
        graph = shard_hetero_in_memory(whole, hetero_assignments(whole, comm.size)["random"], comm)
        drawn = [sp.permuted_ids(graph, node_type="author") for _ in range(2)]
        assert comm.size > 1 or not torch.equal(*drawn)
        return graph.node_ids_dict["author"], sp.permuted_ids(graph, 3, "author")

    for ranks in (1, 3):
        orders.append(torch.empty(14, dtype=torch.int64))
        for own, ids in run(work, ranks):
            orders[-1][own] = ids
    assert torch.equal(*orders) and torch.equal(orders[0].sort().values, torch.arange(14))
    assert not torch.equal(orders[0], torch.arange(14))


@pytest.mark.parametrize("count", [1, 2, 3, 100, 4097])
def test_shuffled_is_a_permutation(count):
    orders = [shuffled(np.arange(count), count, seed) for seed in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(count))
    assert count < 100 or not (orders[0] == orders[1]).all()


def test_all_pairs_are_about_equally_likely():
    """Over 500 seeds, how often each of the 20 numbers comes among the first 5: 125 times, deviation 10."""
    counts = np.zeros(20)
    for seed in range(500):
        counts[shuffled(np.arange(5), 20, seed)] += 1
    assert abs(counts - 125).max() < 40
