"""Partitioning in bounded memory: a graph in files gives the store that the same graph in memory gives, to the byte."""

import itertools
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_helpers import assert_sorted, bipartite

import shardpass as sp
from shardpass.data import (
    EDGE,
    NODE,
    EdgeArrays,
    GraphFiles,
    RawGraph,
    open_store,
    partition,
    read_edge_list,
    stream_edge_list,
)
from shardpass.data.file_rows import RowWriter
from shardpass.data.kaminpar_parts import write_parhip
from shardpass.data.partitioners import assign
from shardpass.data.streaming import Budget, adjacency
from shardpass.data.streaming.adjacency import Adjacency
from shardpass.data.streaming.buckets import key_ranges

TINY = 20_000
"""Bytes: dozens of buckets even for small graphs."""


def files(folder: Path, num_nodes: int, edges: Any, by_column: bool = False) -> dict[str, Any]:
    """A graph written as .npy files: the arguments of `read_edge_list` and `stream_edge_list`."""
    rng = np.random.default_rng(0)
    arrays = {
        "edges": np.ascontiguousarray(np.asarray(edges).T) if by_column else np.asarray(edges),
        "x": rng.standard_normal((num_nodes, 3)).astype(np.float32),
        "y": rng.integers(-1, 5, num_nodes),
        "train_mask": rng.random(num_nodes) < 0.5,
        "w": rng.random(np.asarray(edges).shape[1]),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {
        "edges": folder / "edges.npy", "features": folder / "x.npy", "labels": folder / "y.npy",
        "masks": {"train_mask": folder / "train_mask.npy"}, "weights": folder / "w.npy",
    }  # fmt: skip


def random_edges(num_nodes: int, num_edges: int, kind: Any = np.int64) -> np.ndarray:
    """Self-loops, duplicates, isolated nodes, and one node with a tenth of all edges."""
    rng = np.random.default_rng(1)
    edges = rng.integers(0, max(1, num_nodes - 2), (2, num_edges))
    edges[1, : num_edges // 10] = 0
    return edges.astype(kind)


@pytest.mark.parametrize("method", ["metis", "random", "range"])
@pytest.mark.parametrize(("num_nodes", "num_edges", "parts"), [(300, 4000, 5), (7, 9, 12), (40, 0, 3), (1, 3, 2)])
def test_store_of_files_is_that_of_memory(tmp_path, method, num_nodes, num_edges, parts):
    if method == "metis":
        pytest.importorskip("pymetis")
    paths = files(tmp_path, num_nodes, random_edges(num_nodes, num_edges, np.int32), by_column=num_edges == 9)
    expected = partition(read_edge_list(**paths), tmp_path / "memory", parts, method)
    found = partition(stream_edge_list(**paths), tmp_path / "files", parts, method, memory_bytes=TINY)
    assert found == expected
    assert_sorted(open_store(tmp_path / "files"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["files", "memory"]


def test_store_of_files_trains(tmp_path):
    GraphSAGE = pytest.importorskip("torch_geometric.nn").GraphSAGE
    paths = files(tmp_path, 200, random_edges(200, 2000))
    partition(stream_edge_list(**paths), tmp_path / "store", 4, memory_bytes=TINY)

    def losses(comm: sp.Communicator) -> list[float]:
        graph = sp.load(tmp_path / "store", comm)
        with sp.seed(0, comm):
            model = GraphSAGE(3, 8, 2, 5)
        model = sp.pyg.wrap(model, comm)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        found = []
        for _ in range(8):
            optimizer.zero_grad()
            mask = graph.train_mask & (graph.y >= 0)
            loss = sp.cross_entropy(model(graph.x, graph), graph.y, mask, comm)
            loss.backward()
            sp.sync_gradients(model, comm)
            optimizer.step()
            found.append(loss.item())
        return found

    one, three = sp.spawn(losses, 1)[0], sp.spawn(losses, 3)[0]
    assert np.allclose(one, three, atol=1e-4) and one[-1] < one[0]


def community_graph(num_nodes: int = 2000, communities: int = 40, degree: int = 10) -> RawGraph:
    """Nine of ten edges within communities, ids shuffled."""
    rng = np.random.default_rng(0)
    size, shuffle = num_nodes // communities, rng.permutation(num_nodes)
    src = rng.integers(0, num_nodes, num_nodes * degree)
    near = src // size * size + rng.integers(0, size, len(src))
    dst = np.where(rng.random(len(src)) < 0.9, near, rng.integers(0, num_nodes, len(src)))
    return RawGraph({NODE: num_nodes}, {EDGE: EdgeArrays(shuffle[src], shuffle[dst])}).validate()


def cut_and_balance(graph: RawGraph, part_of: torch.Tensor, parts: int) -> tuple[float, float]:
    src, dst = graph.edges[EDGE].src, graph.edges[EDGE].dst
    weights = torch.bincount(dst, minlength=len(part_of)) + max(1, len(dst) // len(part_of))
    loads = torch.bincount(part_of, weights, parts)
    return float((part_of[src] != part_of[dst]).float().mean()), float(loads.max() / loads.mean())


@pytest.mark.parametrize("threads", [1, 2])
def test_communities_are_found_and_parts_balanced(threads):
    pytest.importorskip("kaminpar")
    cut, balance = cut_and_balance(community_graph(), assign(community_graph(), 4, threads=threads)[NODE], 4)
    assert cut < 0.16 and balance <= 1.05  # random: 0.75


def test_a_node_heavier_than_a_part_leaves_room_for_others():
    pytest.importorskip("kaminpar")
    star = RawGraph({NODE: 49}, {EDGE: EdgeArrays(torch.arange(49), torch.zeros(49, dtype=torch.long))}).validate()
    sizes = torch.bincount(assign(star, 5)[NODE], minlength=5)
    assert int(sizes.min()) > 0 and int(sizes.max()) <= 15


def test_parallel_edges_weigh_more(tmp_path):
    """A ring of pairs that many edges join: no pair is cut."""
    pytest.importorskip("kaminpar")
    ends = np.arange(40)
    pairs = np.stack([ends[::2], ends[1::2]]).repeat(9, axis=1)
    edges = np.concatenate([pairs, np.stack([ends, np.roll(ends, -1)])], axis=1)
    np.save(tmp_path / "edges.npy", edges)
    store = partition(stream_edge_list(tmp_path / "edges.npy", num_nodes=40), tmp_path / "store", 4, memory_bytes=TINY)
    assert store.cut_edges[EDGE] == 4


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=st.lists(st.integers(0, 9), min_size=0, max_size=40),
    limit=st.integers(1, 30),
    breaks=st.lists(st.integers(0, 40), max_size=4),
)
def test_key_ranges(counts, limit, breaks):
    stops = torch.tensor(sorted({min(b, len(counts)) for b in breaks}), dtype=torch.long)
    starts = key_ranges(torch.tensor(counts, dtype=torch.long), limit, stops)
    assert starts[0] == 0 and starts[-1] == len(counts) and (np.diff(starts) > 0).all()
    assert set(stops.tolist()) <= set(starts.tolist())
    for first, last in itertools.pairwise(starts.tolist()):
        assert last == first + 1 or sum(counts[first:last]) <= limit


def test_one_run_or_many(tmp_path):
    """The neighbours are the same, in memory and through files."""
    paths = files(tmp_path, 90, random_edges(90, 700))
    budget = Budget(tmp_path, TINY)
    runs = {
        name: list(Adjacency(graph, budget).runs())
        for name, graph in {"memory": read_edge_list(**paths), "files": stream_edge_list(**paths).open(budget)}.items()
    }
    found = {
        name: [run.neighbours[a:b].tolist() for run in runs[name] for a, b in itertools.pairwise(run.starts)]
        for name in runs
    }
    assert len(runs["memory"]) == 1 < len(runs["files"])
    assert found["memory"] == found["files"] and len(found["files"]) == 90


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(300, 4000), (40, 0)])
def test_kaminpar_reads_the_same_file(tmp_path, num_nodes, num_edges):
    """To the byte, for a graph in memory and in files; KaMinPar itself does not promise the same parts."""
    paths, budget = files(tmp_path, num_nodes, random_edges(num_nodes, num_edges)), Budget(tmp_path, TINY)
    graphs = read_edge_list(**paths), stream_edge_list(**paths).open(budget)
    memory, streamed = (write_parhip(Adjacency(graph, budget), 5, budget).read_bytes() for graph in graphs)
    assert memory == streamed
    left_out, count, neighbours = np.frombuffer(memory, np.uint64, 3)
    starts = np.frombuffer(memory, np.uint64, num_nodes + 1, offset=24)
    first = 24 + 8 * (num_nodes + 1)
    assert count == num_nodes and starts[0] == first and starts[-1] == first + 4 * neighbours
    assert bool(left_out & 1) == (num_edges == 0), "parallel edges weigh more"


def test_a_sample_of_the_edges(tmp_path):
    """About as many as asked for, in both directions, and all of nodes with few; in memory as in files."""
    hub, ring = np.zeros(3000, np.int64), np.arange(1, 3001)  # the nodes of the ring have three edges each
    edges = np.concatenate([[hub, ring], [ring, np.roll(ring, 1)], 3001 + random_edges(400, 20_000)], axis=1)
    np.save(tmp_path / "edges.npy", edges)
    streamed, budget = stream_edge_list(tmp_path / "edges.npy", num_nodes=3401), Budget(tmp_path, 40_000)
    alike = [RawGraph({NODE: 3401}, {EDGE: EdgeArrays(*torch.from_numpy(edges))}).validate(), streamed.open(budget)]
    for most in (14_000, 30_000):
        (memory,), files = (list(Adjacency(graph, budget, most).runs()) for graph in alike)
        assert sum(len(run.neighbours) for run in files) == len(memory.neighbours) and len(files) > 1
        assert 0.85 * most < len(memory.neighbours) <= 1.05 * most
        starts, rows = memory.starts, np.repeat(np.arange(3401), np.diff(memory.starts))
        assert set(zip(rows, memory.neighbours)) == set(zip(memory.neighbours, rows))
        assert (np.diff(starts)[1:3001] == 3).all() and starts[1] == 3000


def test_a_sample_is_told_and_a_hub_costs_no_memory(tmp_path, monkeypatch):
    pytest.importorskip("kaminpar")
    edges = random_edges(300, 4000)
    np.save(tmp_path / "edges.npy", edges)
    files = stream_edge_list(tmp_path / "edges.npy", num_nodes=300)
    with pytest.warns(UserWarning, match="sees 2[0-9]% of the edges, .* with about 72.9 KiB") as told:
        partition(files, tmp_path / "store", 2, memory_bytes=20_000)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition(files, tmp_path / "all", 2, memory_bytes="73.5KiB")
    monkeypatch.setattr(adjacency, "_LARGEST_DEGREE", 40)  # below most degrees
    whole = RawGraph({NODE: 300}, {EDGE: EdgeArrays(*torch.from_numpy(edges))}).validate()
    (run,) = Adjacency(whole, Budget(tmp_path, 40_000), 3000).runs()
    assert 2000 < len(run.neighbours) <= 3150


def test_wrong_memory_and_progress(tmp_path):
    graph = files(tmp_path, 50, random_edges(50, 300))
    with pytest.raises(ValueError, match="memory_bytes: expected a number of bytes such as '6GiB'"):
        partition(stream_edge_list(**graph), tmp_path / "store", 2, memory_bytes=0)
    seen: dict[str, list[tuple[int, int]]] = {}
    partition(
        stream_edge_list(**graph), tmp_path / "store", 2, memory_bytes=TINY,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )  # fmt: skip
    assert list(seen) == ["read", "count", "bucket", "assign", "sort", "write"]
    for steps in seen.values():
        assert all(done <= total for done, total in steps) and steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("stage", ["read", "bucket", "assign", "sort", "write"])
def test_interruptions_leave_nothing(tmp_path, stage):
    paths = files(tmp_path, 50, random_edges(50, 300))

    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage and done:
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        partition(stream_edge_list(**paths), tmp_path / "store", 2, memory_bytes=TINY, progress=interrupt)
    assert sorted(tmp_path.iterdir()) == before


MEMORY = """
import resource, sys
import numpy as np, torch
from shardpass.data import partition, stream_edge_list

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name + ":"))

def run(name):
    files = stream_edge_list(f"{folder}/{name}_edges.npy", features=f"{folder}/{name}_x.npy")
    partition(files, f"{folder}/{name}", 4, "random", memory_bytes=16 << 20)

torch.set_num_threads(1)
folder, extra = sys.argv[1], int(sys.argv[2])
run("small")  # all modules are imported
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + extra,) * 2)
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts anew
before = status("VmRSS")
run("large")
print(status("VmHWM") - before)
try:
    np.load(f"{folder}/large_edges.npy")
except MemoryError:
    print("limited")
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the limit and the figures are Linux's")
def test_memory_is_bounded(tmp_path):
    """64 MB of edges and 51 MB of features: under a limit of 48 MiB on data, and with as little resident.

    At random, since KaMinPar reserves far more memory than it uses, in a process of its own.
    """
    for name, num_nodes, num_edges in [("small", 100, 500), ("large", 200_000, 4_000_000)]:
        np.save(tmp_path / f"{name}_edges.npy", random_edges(num_nodes, num_edges))
        np.save(tmp_path / f"{name}_x.npy", np.zeros((num_nodes, 64), np.float32))
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(48 << 20)]
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, env=exact)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, limited = done.stdout.split()
    assert int(grown) < 64 << 20 and limited == "limited"
    assert sum(open_store(tmp_path / "large").manifest.num_edges.values()) == 4_000_000


class Typed(GraphFiles):
    """The edges of a graph of several types, in files."""

    def __init__(self, graph: RawGraph) -> None:
        self.graph = graph.validate()

    def open(self, budget: Budget) -> RawGraph:
        edges = {}
        for kind, arrays in self.graph.edges.items():
            writers = [RowWriter(budget.file(), np.int64) for _ in range(2)]
            for writer, ends in zip(writers, (arrays.src, arrays.dst)):
                writer.append(ends.numpy())
            edges[kind] = EdgeArrays(*(writer.rows() for writer in writers))
        return replace(self.graph, edges=edges)


@pytest.mark.parametrize("method", ["metis", "random"])
def test_graphs_of_several_types(tmp_path, method):
    if method == "metis":
        pytest.importorskip("pymetis")
    expected = partition(bipartite(), tmp_path / "memory", 3, method)
    assert partition(Typed(bipartite()), tmp_path / "files", 3, method, memory_bytes=500) == expected
