"""Compare the parts of ``shard(by="space")`` with KaMinPar's: edges cut, balance and CPU seconds.

    python -m benchmarks.space_cut
    python -m benchmarks.space_cut --shape flow knn --points 100000

The shapes: points in a cube with edges to the nearest neighbours (knn) or to all within a radius; triangulated meshes
of a square, and of a channel around a cylinder that is much finer near it (flow). KaMinPar sees all edges. The bars are
1.5 times its cut, and one CPU second of `by="space"` for a million points.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.spatial import Delaunay, cKDTree

from shardpass.data import NODE, read
from shardpass.data.by_space import bisected, refined
from shardpass.data.partitioners import assign
from shardpass.data.streaming import Budget

TIMES, SECONDS = 1.5, 1.0
_BUDGET = 8 << 30  # which is more than KaMinPar needs, so that it sees all edges


def _cube(count: int) -> np.ndarray:
    return np.random.default_rng(0).random((count, 3))


def knn(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in a cube, ``[count, 3]``, and the edges from their 8 nearest neighbours, ``[2, num_edges]``."""
    points = _cube(count)
    near = cKDTree(points).query(points, 9, workers=1)[1][:, 1:]
    return points, np.stack([near.ravel(), np.repeat(np.arange(count), 8)])


def radius(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in a cube and the edges between those that are close, about 12 for each point."""
    points = _cube(count)
    pairs = cKDTree(points).query_pairs((12 * 3 / 4 / np.pi / count) ** (1 / 3), output_type="ndarray").T
    return points, np.concatenate([pairs, pairs[::-1]], 1)


def _mesh(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    triangles = Delaunay(points).simplices
    sides = np.concatenate([triangles[:, pair] for pair in ([0, 1], [1, 2], [2, 0])])
    sides = np.unique(np.sort(sides, 1), axis=0).T
    return points, np.concatenate([sides, sides[::-1]], 1)


def square(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The triangulation of points in a square."""
    return _mesh(np.random.default_rng(0).random((count, 2)))


def flow(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The mesh of a channel around a cylinder, with half of its points in the layer around it."""
    draws = np.random.default_rng(0)
    channel = draws.uniform([-2, -2], [8, 2], (count, 2))
    channel = channel[np.hypot(*channel.T) > 0.6][: count // 2]
    length, angle = (
        0.5 + 0.1 * draws.random(count - len(channel)) ** 2,
        draws.uniform(0, 2 * np.pi, count - len(channel)),
    )
    return _mesh(np.concatenate([channel, np.stack([length * np.cos(angle), length * np.sin(angle)], 1)]))


SHAPES: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {
    "knn": knn, "radius": radius, "square": square, "flow": flow
}  # fmt: skip


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def measure(shape: str, count: int, parts: int) -> list[str]:
    """The row of the table for one shape."""
    points, edges = SHAPES[shape](count)
    graph = read({"edge_index": edges, "num_nodes": count})
    places, ends = torch.from_numpy(points), (torch.from_numpy(edges[0]), torch.from_numpy(edges[1]))
    start = _cpu_seconds()
    ours = refined(bisected(places, parts), [ends], parts).numpy()
    seconds = _cpu_seconds() - start
    start = _cpu_seconds()
    theirs = assign(graph, parts, "kaminpar", budget=Budget(memory_bytes=_BUDGET))[NODE].numpy()
    their_seconds = _cpu_seconds() - start
    cuts = [float((part[edges[0]] != part[edges[1]]).mean()) for part in (ours, theirs)]
    balance = [np.bincount(part, minlength=parts).max() * parts / count for part in (ours, theirs)]
    ratio = cuts[0] / cuts[1]
    verdict = "kept" if ratio <= TIMES and seconds * 1e6 / count <= SECONDS else "NOT kept"
    return [
        f"{shape} ({edges.shape[1] / 1e6:.1f} M edges)", f"{cuts[0]:.3%}", f"{cuts[1]:.3%}", f"{ratio:.2f}",
        f"{balance[0]:.3f}", f"{balance[1]:.3f}", f"{seconds:.2f}", f"{their_seconds:.1f}", verdict,
    ]  # fmt: skip


def main() -> None:
    """Measure and print; exit code 1 if a bar is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    titles = "cut", "of KaMinPar", "ratio", "balance", "of KaMinPar", "CPU s", "of KaMinPar", "bars"
    table = Table("shape", *titles)
    rows = [measure(shape, args.points, args.parts) for shape in args.shape]
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    raise SystemExit(any(row[-1] != "kept" for row in rows))


if __name__ == "__main__":
    main()
