"""Partitioning in bounded memory: a graph in files gives the store that the same graph in memory gives, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_helpers import assert_sorted

import shardpass as sp
from shardpass.data import open_store, partition, read_edge_list, stream_edge_list

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


@pytest.mark.parametrize("method", ["ldg", "fennel", "metis", "random", "range"])
@pytest.mark.parametrize(("num_nodes", "num_edges", "parts"), [(300, 4000, 5), (7, 9, 12), (40, 0, 3), (1, 3, 2)])
def test_store_of_files_is_that_of_memory(tmp_path, method, num_nodes, num_edges, parts):
    if method == "metis":
        pytest.importorskip("pymetis")
    given = files(tmp_path, num_nodes, random_edges(num_nodes, num_edges, np.int32), by_column=num_edges == 9)
    expected = partition(read_edge_list(**given), tmp_path / "memory", parts, method)
    found = partition(stream_edge_list(**given), tmp_path / "files", parts, method, memory_bytes=TINY)
    assert found == expected
    assert_sorted(open_store(tmp_path / "files"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["files", "memory"]


def test_store_of_files_trains(tmp_path):
    GraphSAGE = pytest.importorskip("torch_geometric.nn").GraphSAGE
    given = files(tmp_path, 200, random_edges(200, 2000))
    partition(stream_edge_list(**given), tmp_path / "store", 4, "fennel", memory_bytes=TINY)

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
