"""The benchmark graphs, made on the spot, the same for the same numpy: R-MAT, dense random, power law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardpass.cli.graphs import powerlaw

NUM_FEATURES, NUM_CLASSES = 128, 32
RMAT = {"50k30": (50_000, 30), "20k150": (20_000, 150)}
KINDS = "50k30, 20k150, dense:NODES:DEGREE, powerlaw:NODES:DEGREE, community:NODES:DEGREE or the path of an .npz"


def make_graph(name: str) -> dict[str, Any]:
    """The arrays of a benchmark graph: ``edge_index`` int32 [2, E], ``x`` float32 [N, 128], ``y``, ``train_mask``.

    Args:
        name: one of `KINDS`. An .npz brings its own features, labels and training mask.

    Raises:
        ValueError: for another name.
    """
    if name.endswith(".npz"):
        with np.load(Path(name), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    if name in RMAT:
        num_nodes, degree = RMAT[name]
        return {"edge_index": rmat_edges(num_nodes, degree), **node_data(num_nodes)}
    kind, *numbers = name.split(":")
    if (
        kind not in ("dense", "powerlaw", "community")
        or len(numbers) != 2
        or not all(number.isdigit() for number in numbers)
    ):
        raise ValueError(f"unknown graph {name!r}; expected {KINDS}")
    num_nodes, degree = int(numbers[0]), int(numbers[1])
    if kind == "powerlaw":
        return {"edge_index": powerlaw(num_nodes, degree)["edge_index"], **node_data(num_nodes)}
    edges = dense_edges(num_nodes, degree) if kind == "dense" else community_edges(num_nodes, degree)
    return {"edge_index": edges, **node_data(num_nodes)}


def dense_edges(num_nodes: int, degree: int, seed: int = 0) -> Any:
    """``num_nodes * degree`` directed edges with uniformly random ends (so every part needs rows of every other)."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_nodes, (2, num_nodes * degree), dtype=np.int32)


def community_edges(num_nodes: int, degree: int, size: int = 500, inside: float = 0.8, seed: int = 0) -> Any:
    """``num_nodes * degree`` directed edges, `inside` of them within communities of `size` nodes, ids shuffled."""
    rng = np.random.default_rng(seed)
    shuffle = rng.permutation(num_nodes).astype(np.int32)
    src = rng.integers(0, num_nodes, num_nodes * degree)
    near = np.minimum(src // size * size + rng.integers(0, size, len(src)), num_nodes - 1)
    dst = np.where(rng.random(len(src)) < inside, near, rng.integers(0, num_nodes, len(src)))
    return np.stack([shuffle[src], shuffle[dst]])


def rmat_edges(num_nodes: int, degree: int, seed: int = 0, corners: tuple[float, ...] = (0.45, 0.22, 0.22)) -> Any:
    """An undirected R-MAT graph (Chakrabarti et al. 2004): both directions, no duplicates, self-loops, shuffled ids.

    Args:
        degree: average degree without self-loops.
        corners: probabilities of the three first quadrants of the adjacency matrix.
    """
    rng = np.random.default_rng(seed)
    a, b, c = corners
    levels, wanted = int(np.ceil(np.log2(num_nodes))), int(num_nodes * degree / 2)
    keys = np.empty(0, np.int64)
    while keys.size < wanted:
        count = int((wanted - keys.size) * 1.6) + 1000
        low, high = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for _ in range(levels):
            draw = rng.random(count)
            low = (low << 1) | (draw >= a + b)
            high = (high << 1) | (((draw >= a) & (draw < a + b)) | (draw >= a + b + c))
        inside = (low < num_nodes) & (high < num_nodes) & (low != high)
        low, high = low[inside], high[inside]
        keys = np.unique(np.concatenate([keys, np.minimum(low, high) * num_nodes + np.maximum(low, high)]))
    keys = rng.permutation(keys)[:wanted]
    shuffle = rng.permutation(num_nodes)
    low, high, loops = shuffle[keys // num_nodes], shuffle[keys % num_nodes], np.arange(num_nodes)
    return np.stack([np.concatenate([low, high, loops]), np.concatenate([high, low, loops])]).astype(np.int32)


def node_data(num_nodes: int, seed: int = 0) -> dict[str, Any]:
    """Features, labels that depend on them, and a random half of the nodes for training."""
    rng = np.random.default_rng(seed + 1)
    weights = rng.standard_normal((NUM_FEATURES, NUM_CLASSES)).astype(np.float32)
    x = rng.standard_normal((num_nodes, NUM_FEATURES)).astype(np.float32)
    noise = 3 * rng.standard_normal((num_nodes, NUM_CLASSES)).astype(np.float32)
    return {"x": x, "y": (x @ weights + noise).argmax(1), "train_mask": rng.random(num_nodes) < 0.5}
