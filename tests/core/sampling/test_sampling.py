"""Drawing neighbours: distributions, the same bits with and without numba; dealing out seeds; batches in lock step."""

import gc
import threading
import time
from itertools import combinations

import numpy as np
import pytest
import torch

from shardpass.core.sampling import IDS, Drawer, keys_of, sample, source_of, uniforms
from shardpass.core.sampling.drawing import ALL, Numbering, draw, draw_weighted, loops_if_installed
from shardpass.core.sampling.fetch import RowFetcher
from shardpass.core.sampling.prefetch import BatchIterator, Work
from shardpass.core.sampling.seeds import deal, order_of
from shardpass.core.sampling.source import placed
from shardpass.errors import DivergenceError
from shardpass.testing import (
    assignments,
    awkward_graph,
    awkward_hetero_graph,
    hetero_assignments,
    run,
    shard_hetero_in_memory,
    shard_in_memory,
)

LOOPS = loops_if_installed()
BOTH = [None] if LOOPS is None else [None, LOOPS]
TRIALS = 20_000


def p_value(observed, expected, scale=1.0, lost=1):
    """Of Pearson's chi-squared test, `scale` times the statistic."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    statistic = scale * ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor((len(observed) - lost) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def rows_of_degree(degree, trials=TRIALS):
    """A CSR of `trials` equal rows, all of them, and a key for each."""
    indptr = np.arange(trials + 1) * degree
    return indptr, np.arange(trials), keys_of(3, np.arange(trials))


def sets_of(counts, places, degree, size):
    assert (counts == size).all()
    picks = np.sort(places.reshape(-1, size) % degree, axis=1)
    names = {pair: i for i, pair in enumerate(combinations(range(degree), size))}
    return np.bincount([names[tuple(pick)] for pick in picks.tolist()], minlength=len(names))


@pytest.mark.parametrize("loops", BOTH)
def test_every_set_of_neighbours_is_equally_likely(loops):
    for degree, fanout in ((5, 2), (6, 5), (3, 1)):
        found = sets_of(*draw(*rows_of_degree(degree), fanout, False, loops), degree, fanout)
        assert 1e-3 < p_value(found, np.full(len(found), TRIALS / len(found))) < 1 - 1e-3


@pytest.mark.parametrize("loops", BOTH)
def test_with_replacement_every_draw_is_uniform(loops):
    counts, places = draw(*rows_of_degree(7), 3, True, loops)
    assert (counts == 3).all()
    picks = places.reshape(-1, 3) % 7
    for i in range(3):
        assert p_value(np.bincount(picks[:, i], minlength=7), np.full(7, TRIALS / 7)) > 1e-3
    pairs = np.bincount(picks[:, 0] * 7 + picks[:, 1], minlength=49)
    assert p_value(pairs, np.full(49, TRIALS / 49)) > 1e-3


def test_the_test_notices_a_bias():
    found = np.full(10, TRIALS / 10)
    found[0] += 0.1 * TRIALS / 10
    assert p_value(found, np.full(10, TRIALS / 10)) < 0.05


def test_weighted_without_replacement():
    weights, degree = np.array([1.0, 2.0, 3.0, 4.0, 0.0]), 5
    indptr, rows, keys = rows_of_degree(degree)
    counts, places = draw_weighted(indptr, rows, keys, np.tile(weights, TRIALS), 2, False)
    found = sets_of(counts, places, degree, 2)
    share = weights / weights.sum()
    expected = [
        TRIALS * share[i] * share[j] * (1 / (1 - share[i]) + 1 / (1 - share[j]))
        for i, j in combinations(range(degree), 2)
    ]
    some = np.array(expected) > 0
    assert found[~some].sum() == 0
    assert p_value(found[some], np.array(expected)[some]) > 1e-3


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
def test_weighted_with_replacement(scale):
    weights, degree = np.array([0.0, 1.0, 2.0, 0.0, 5.0]) * scale, 5
    indptr, rows, keys = rows_of_degree(degree)
    counts, places = draw_weighted(indptr, rows, keys, np.tile(weights, TRIALS), 1, True)
    assert (counts == 1).all() and (places // 5 == rows).all()
    found = np.bincount(places % 5, minlength=5)
    assert found[0] == found[3] == 0
    assert p_value(found[[1, 2, 4]], TRIALS * np.array([1, 2, 5]) / 8) > 1e-3


def test_weights_of_one_node_do_not_disturb_another():
    """Cumulated weights of a row with tiny weights are not lost beside those of a huge one."""
    indptr = np.array([0, 2, 4])
    weights = np.array([1e30, 1e30, 1e-30, 3e-30])
    rows = np.tile([0, 1], 2000)
    counts, places = draw_weighted(indptr, rows, keys_of(1, np.arange(4000)), weights, 1, True)
    assert (counts == 1).all()
    assert p_value(np.bincount(places, minlength=4)[2:], [500, 1500]) > 1e-3


def test_rows_without_entries_and_whole_rows():
    indptr, weights = np.array([0, 0, 3, 3, 5]), np.array([1.0, 0, 2, 0, 0])
    rows, keys = np.array([3, 0, 1, 2]), keys_of(0, np.arange(4))
    for loops in BOTH:
        for fanout in (ALL, 3, 8):
            counts, places = draw(indptr, rows, keys, fanout, False, loops)
            assert counts.tolist() == [2, 0, 3, 0] and places.tolist() == [3, 4, 0, 1, 2]
        counts, places = draw(indptr, rows, keys, 2, True, loops)
        assert counts.tolist() == [2, 0, 2, 0] and len(places) == 4
    for replace in (False, True):
        counts, places = draw_weighted(indptr, rows, keys, weights, 2, replace)
        assert counts.tolist() == [0, 0, 2, 0] and set(places.tolist()) <= {0, 2}
    counts, places = draw_weighted(indptr, rows, keys, weights, ALL, False)
    assert counts.tolist() == [0, 0, 2, 0] and places.tolist() == [0, 2]


@pytest.mark.skipif(LOOPS is None, reason="numba is not installed")
def test_the_same_bits_with_and_without_numba():
    generator = np.random.default_rng(0)
    degrees = generator.integers(0, 60, 500)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    rows = generator.permutation(500)
    keys = keys_of(2**63 - 1, rows)
    for fanout in (1, 7, 40):
        for replace in (False, True):
            for mine, theirs in zip(
                draw(indptr, rows, keys, fanout, replace, LOOPS), draw(indptr, rows, keys, fanout, replace, None)
            ):
                assert np.array_equal(mine, theirs)
    for limit in (2**10, 2**40):
        with_loops, without = Numbering(LOOPS, limit), Numbering(None, limit)
        for count in (0, 5, 3000, 1, 20000):
            ids = generator.integers(0, min(limit, 9000), count) * (limit // 9000 or 1)
            assert np.array_equal(with_loops.add(ids), without.add(ids))
            assert np.array_equal(with_loops.ids, without.ids)


def test_numbers_are_in_order_of_first_appearance():
    for loops in BOTH:
        numbering = Numbering(loops, 10)
        assert numbering.add(np.array([7, 3, 7])).tolist() == [0, 1, 0]
        assert numbering.add(np.array([9, 3, 0, 9])).tolist() == [2, 1, 3, 2]
        assert numbering.ids.tolist() == [7, 3, 9, 0] and numbering.count == 4


def test_keys_differ_and_draws_are_uniform():
    keys = keys_of(0, np.arange(100_000))
    assert len(np.unique(keys)) == 100_000
    for values in (uniforms(keys, np.zeros(1)), uniforms(keys[:1], np.arange(100_000))):
        assert (values >= 0).all() and (values < 1).all()
        assert p_value(np.bincount((values * 64).astype(int), minlength=64), np.full(64, 100_000 / 64)) > 1e-3


@pytest.mark.parametrize("ranks", [1, 3])
def test_neighbours_over_ranks_are_uniform(ranks):
    """Those of a hub, drawn by its owner for another rank, against the uniform distribution."""
    graph = awkward_graph()
    hub = int(torch.bincount(graph.edge_index[1]).argmax())
    into = (graph.edge_index[1] == hub).nonzero().view(-1)
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)["random"]
    trials, fanout = 100, 4

    def fn(comm):
        share = shard_in_memory(graph, owners, comm)
        source = source_of(share)
        drawer = Drawer(source)
        (kind,) = source.edges
        order = torch.argsort(owners, stable=True)
        ids = np.array([int((order == hub).nonzero())])
        asked = ids if comm.rank == comm.size - 1 else ids[:0]
        return np.concatenate(
            [drawer.hop({"node": asked}, {kind: fanout}, seed)[kind].edge_ids for seed in range(trials)]
        )

    results = run(fn, ranks)
    assert all(len(found) == 0 for found in results[:-1])
    found = np.bincount(results[-1], minlength=graph.edge_index.size(1))[into.numpy()]
    degree = len(found)
    assert degree > 10 and found.sum() == trials * fanout
    scale = (degree - 1) / (degree - fanout)  # drawn without replacement, so counts vary less
    assert p_value(found, np.full(degree, trials * fanout / degree), scale) > 1e-3


@pytest.mark.parametrize("kind", ["random", "empty part", "no edges"])
def test_structure_that_ranks_share_gives_the_same_draws(kind):
    """Drawn by the rank that asks or by the owner: the same edges, fields and ids; and messages for fields alone."""
    graph = awkward_graph()
    owners = assignments(graph.num_nodes, 3, graph.edge_index)[kind]

    def fn(comm):
        source = source_of(shard_in_memory(graph, owners, comm), "edge_weight")
        assert source.parts is None  # ranks are threads
        shared = placed(source)
        (kind,) = source.edges
        ids = np.random.default_rng(comm.rank).permutation(graph.num_nodes)[: 12 * comm.rank]
        for fanout, replace, weighted in ((3, False, False), (ALL, False, False), (2, True, False), (3, False, True)):
            for fields in ({kind: ["edge_weight"]}, {}):
                drawers = [Drawer(given, replace, weighted, fields) for given in (source, shared)]
                (told,), (read,) = (drawer.hop({"node": ids}, {kind: fanout}, 7).values() for drawer in drawers)
                assert all(np.array_equal(mine, theirs) for mine, theirs in zip(told[:3], read[:3]))
                assert len(told.counts) == len(ids)
                assert read.fields.keys() == told.fields.keys() == set(fields.get(kind, ()))
                for name, rows in told.fields.items():
                    assert torch.equal(rows, graph.edge[name][torch.from_numpy(told.edge_ids)])
                    assert torch.equal(rows, read.fields[name])
        for names in ([], ["x"]):
            told, read = (RowFetcher(given, {"node": names}).fetch({"node": ids})["node"] for given in (source, shared))
            assert told.keys() == read.keys() and all(torch.equal(told[name], read[name]) for name in told)
            assert torch.equal(told[IDS], torch.argsort(owners, stable=True)[torch.from_numpy(ids)])
        return len(told[IDS])

    assert run(fn, 3) == [0, 12, 24]


@pytest.mark.parametrize("every_layer", [False, True])
@pytest.mark.ranks(2)
def test_structure_of_several_types_is_shared(comm, every_layer):
    """Whole batches, with types that some hops leave out and fields that some types have."""
    graph = awkward_hetero_graph()
    owners = hetero_assignments(graph, 2)["random"]
    source = source_of(shard_hetero_in_memory(graph, owners, comm))
    fields = {kind: sorted(edges.fields) for kind, edges in source.edges.items()}
    seeds = {"paper": np.arange(source.ownership["paper"].num_total)[comm.rank :: 2]}
    fanouts = [{kind: 2 + (kind[2] == "paper") for kind in source.edges}, dict.fromkeys(source.edges, 0)]
    fanouts[1][next(iter(source.edges))] = ALL
    both = [Drawer(given, edge_fields=fields) for given in (source, placed(source))]
    (told, _), (read, _) = (sample(drawer, seeds, fanouts, 5, every_layer) for drawer in both)
    assert told.num_nodes == read.num_nodes and [hop.keys() for hop in told.hops] == [hop.keys() for hop in read.hops]
    pairs = [(told.ids[kind], read.ids[kind]) for kind in told.ids]
    for mine, theirs in ((a[kind], b[kind]) for a, b in zip(told.hops, read.hops) for kind in a):
        pairs += [*zip(mine[:3], theirs[:3]), *((rows, theirs.fields[name]) for name, rows in mine.fields.items())]
    assert all(np.array_equal(mine, theirs) for mine, theirs in pairs)
    assert len(pairs) > 20


# ---- seeds


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("counts", [[17], [30, 0, 7], [1, 1, 20, 9], [0, 0, 2], [0, 0], [3, 4]])
def test_seeds_are_dealt_out_evenly(counts, shuffle):
    total, ranks = sum(counts), len(counts)
    ids = np.random.default_rng(1).permutation(1000)[:total]
    first = np.concatenate([[0], np.cumsum(counts)])

    def fn(comm):
        own = ids[first[comm.rank] : first[comm.rank + 1]]
        keys = order_of(own, 5 if shuffle else None)
        return [
            deal(comm, keys, [own, own + 1], batch_size, drop_last)
            for batch_size, drop_last in ((2, False), (2, True), (1, False))
        ]

    found = run(fn, ranks)
    order = ids[np.argsort(order_of(ids, 5 if shuffle else None))]
    for case, (batch_size, drop_last) in enumerate(((2, False), (2, True), (1, False))):
        steps = list(zip(*(rank[case] for rank in found)))
        sizes = [sum(seeds.counted for seeds in step) for step in steps]
        per_step = batch_size * ranks
        assert len(steps) == (total // per_step if drop_last else -(-total // per_step))
        assert sum(sizes) == (total // per_step * per_step if drop_last else total)
        at = 0
        for step, size in zip(steps, sizes):
            numbers = [seeds.counted for seeds in step]
            assert max(numbers) - min(numbers) <= 1 and max(numbers) <= batch_size
            mine = np.concatenate([seeds.columns[0][: seeds.counted] for seeds in step])
            assert np.array_equal(np.sort(mine), np.sort(order[at : at + size]))  # steps do not depend on the ranks
            for seeds in step:
                assert np.array_equal(seeds.columns[1], seeds.columns[0] + 1)
                assert len(seeds.columns[0]) == max(1, seeds.counted)  # a spare one, so that the model runs
                assert np.isin(seeds.columns[0], order[at : at + size]).all()
            at += size
        if batch_size > 1 and total >= ranks:
            assert all(seeds.counted for step in steps for seeds in step)


def test_the_order_of_seeds_is_random():
    keys = [order_of(np.arange(4), seed) for seed in range(4800)]
    orders = [tuple(np.argsort(k)) for k in keys]
    _, found = np.unique([a * 64 + b * 16 + c * 4 + d for a, b, c, d in orders], return_counts=True)
    assert len(found) == 24 and p_value(found, np.full(24, 200)) > 1e-3


# ---- in lock step


def iterators(comm, steps=6, ahead=2, make=lambda comm, step: comm.all_gather_object(step)):
    twin = comm.duplicate("test")
    return BatchIterator(Work(twin, lambda step: make(twin, step), steps, ahead, 0))


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "shardpass sampling"}


@pytest.fixture
def no_thread_is_left():
    before = threads()
    yield
    deadline = time.monotonic() + 10
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads() - before


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_all_batches_come_in_order(ahead):
    found = run(lambda comm: list(iterators(comm, ahead=ahead)), 2)
    assert found == [[[step, step] for step in range(6)]] * 2


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.ranks(3)
def test_dropped_half_way_on_all_ranks(comm, taken):
    iterator = iterators(comm)
    for _ in range(taken):
        next(iterator)
    if comm.rank:
        time.sleep(0.1)  # at different times
    del iterator
    gc.collect()
    comm.barrier()
    assert list(iterators(comm)) == [[step] * 3 for step in range(6)]


@pytest.mark.usefixtures("no_thread_is_left")
def test_dropped_half_way_on_one_rank():
    def fn(comm):
        iterator = iterators(comm, steps=20)
        for _ in range(3):
            next(iterator)
        if comm.rank == 1:
            iterator.close()
            return "stopped"
        with pytest.raises(DivergenceError, match=r"rank 0 asks for batch 5 of epoch 0 .* rank 1 has stopped after 5"):
            list(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
        return "told"

    assert run(fn, 2) == ["told", "stopped"]


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("ahead", [0, 2])
def test_errors_come_with_their_words(ahead):
    def make(comm, step):
        if step == 2:
            raise RuntimeError("the transform failed")
        return step

    def fn(comm):
        iterator = iterators(comm, make=make, ahead=ahead)
        found = [next(iterator), next(iterator)]
        with pytest.raises(RuntimeError, match="the transform failed"):
            next(iterator)
        return found

    assert run(fn, 2) == [[0, 1]] * 2
