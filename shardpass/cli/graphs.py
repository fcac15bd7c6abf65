"""The built-in graphs of `shardpass partition demo:...`: made on the spot, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardpass.errors import require

Arrays = dict[str, Any]


def demo_graph(name: str) -> Arrays:
    """The arrays of a built-in graph: ``demo:digits``, ``demo:powerlaw`` or ``demo:powerlaw:NODES``."""
    words = name.split(":")
    if words[1:] == ["digits"]:
        return digits()
    if words[1:2] == ["powerlaw"] and len(words) <= 3 and all(word.isdigit() for word in words[2:]):
        return powerlaw(*(int(word) for word in words[2:]))
    raise ValueError(f"unknown built-in graph {name!r}; there are demo:digits, demo:powerlaw and demo:powerlaw:NODES")


def digits() -> Arrays:
    """scikit-learn's 1,797 handwritten digits, each with edges from the 10 nearest others (by pixels), both directions.

    Returns:
        ``x`` [1797, 64] in [0, 1], ``y`` [1797] in [0, 10), ``edge_index``, and train, val and test masks
        (20, 20 and 60 per cent, the same in every call).
    """
    purpose = "the built-in graph demo:digits"
    datasets = require("sklearn.datasets", "all", purpose)
    search = require("sklearn.neighbors", "all", purpose)
    images, labels = datasets.load_digits(return_X_y=True)
    nearest = search.NearestNeighbors(n_neighbors=11, algorithm="brute").fit(images)
    near = nearest.kneighbors(images, return_distance=False)  # each digit itself is the nearest
    dst = np.repeat(np.arange(len(images)), 11)
    edge_index = _both_directions(near.reshape(-1), dst, len(images))
    x = (images / 16).astype(np.float32)
    return {"x": x, "y": labels.astype(np.int64), "edge_index": edge_index, **_masks(len(x), 0.2)}


def powerlaw(num_nodes: int = 100_000, degree: int = 20, channels: int = 64, classes: int = 10) -> Arrays:
    """A graph whose degrees follow a power law, with communities that share a class most of the time.

    Ends of edges are drawn in proportion to node weights (Pareto, exponent 2.5; Chung and Lu 2002); three of four edges
    stay in a community of about 500 nodes.

    Returns:
        ``x`` [num_nodes, channels], ``y``, ``edge_index`` of about ``num_nodes * degree`` edges (both directions, no
        duplicates, no self-loops), and train, val and test masks (10, 10 and 80 per cent).
    """
    rng = np.random.default_rng(0)
    draws = num_nodes * degree * 11 // 20  # a tenth more, since duplicates and loops are dropped
    communities = max(1, num_nodes // 500)
    weights = np.minimum((1 - rng.random(num_nodes)) ** (-1 / 1.5), num_nodes**0.5)
    bounds = np.linspace(0, num_nodes, communities + 1).astype(np.int64)
    cumulative = np.concatenate([[0.0], np.cumsum(weights)])
    src = np.searchsorted(cumulative, rng.random(draws) * cumulative[-1], side="right") - 1
    community = np.searchsorted(bounds, src, side="right") - 1
    local = rng.random(draws) < 0.75
    low = np.where(local, cumulative[bounds[community]], 0.0)
    high = np.where(local, cumulative[bounds[community + 1]], cumulative[-1])
    dst = np.searchsorted(cumulative, low + rng.random(draws) * (high - low), side="right") - 1
    edge_index = _both_directions(src.clip(0, num_nodes - 1), dst.clip(0, num_nodes - 1), num_nodes)
    of_community = rng.integers(0, classes, communities)
    home = np.searchsorted(bounds, np.arange(num_nodes), side="right") - 1
    y = np.where(rng.random(num_nodes) < 0.9, of_community[home], rng.integers(0, classes, num_nodes))
    centres = rng.standard_normal((classes, channels))
    x = (0.3 * centres[y] + rng.standard_normal((num_nodes, channels))).astype(np.float32)
    shuffle = rng.permutation(num_nodes)  # original ids tell nothing about communities
    order = np.argsort(shuffle)
    return {
        "x": x[order], "y": y[order].astype(np.int64), "edge_index": shuffle[edge_index].astype(np.int32),
        **_masks(num_nodes, 0.1),
    }  # fmt: skip


def _both_directions(src: Any, dst: Any, num_nodes: int) -> Any:
    """The edges and their reverses, each once, without self-loops: ``[2, num_edges]`` int32."""
    keys = np.concatenate([src * np.int64(num_nodes) + dst, dst * np.int64(num_nodes) + src])
    keys = np.unique(keys)
    src, dst = keys // num_nodes, keys % num_nodes
    return np.stack([src, dst])[:, src != dst].astype(np.int32)


def _masks(num_nodes: int, share: float) -> Arrays:
    """Masks of which those for training and for validation have this share of the nodes each."""
    draw = np.random.default_rng(1).random(num_nodes)
    val = (draw >= share) & (draw < 2 * share)
    return {"train_mask": draw < share, "val_mask": val, "test_mask": draw >= 2 * share}
