"""Bytes per edge of the structure that ranks keep, and the peak while they load it, against the bars.

    python -m benchmarks.edge_bytes [--edges 10000000] [--degree 16] [--parts 4] [--ranks 4 2 1]

A graph with communities is partitioned. For each number of ranks and each model, a fresh process loads the store on
that many ranks (threads) and trains two steps.

[Note: what is counted]
Structure is every live tensor of integers or booleans but labels and original node ids: row pointers, source rows,
halo rows, what backward and layers add. Tensors mapped from the store count as others do, though their pages can be
given back. The peak while loading is that of the resident set (VmHWM, reset before), above what was resident before
`load`, relative to what is resident after it; numbers of nodes (ids, labels) count on both sides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

import shardpass as sp
from benchmarks.meter import resident
from shardpass.testing import run

MODELS = {"sage": (GraphSAGE, 12.0), "gat": (GAT, 16.0), "gcn": (GCN, 16.0)}
"""Models, and the most bytes per edge that may be kept for training: of sums, and of what weighs edges."""
MOST_WHILE_LOADING = 1.25
NUM_FEATURES = 4
ENVIRONMENT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_ARENA_MAX": "1"}
"""Freed tensors leave the resident set at once."""


def make_store(path: Path, num_edges: int, degree: int, parts: int) -> None:
    """Write a graph in which most edges stay within a community, one community to a part."""
    generator = torch.Generator().manual_seed(0)
    num_nodes = num_edges // degree
    dst = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    size = -(-num_nodes // parts)
    near = (dst // size * size + torch.randint(0, size, (num_edges,), generator=generator)).clamp(max=num_nodes - 1)
    far = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    src = torch.where(torch.rand(num_edges, generator=generator) < 0.85, near, far)
    x = torch.rand(num_nodes, NUM_FEATURES, generator=generator)
    sp.partition(
        {"edge_index": torch.stack([src, dst]), "x": x, "y": torch.arange(num_nodes) % 4}, path, parts, "range"
    )


def structure_bytes(others: Iterable[Tensor]) -> int:
    """Bytes of all live tensors of integers and booleans but `others`; memory that several share counts once."""
    gc.collect()
    excluded = {tensor.data_ptr() for tensor in others}
    spans = []
    for found in gc.get_objects():
        if type(found).__name__ in ("Tensor", "ShardedEdgeIndex") and isinstance(found, Tensor):
            plain = found.detach().as_subclass(Tensor) if type(found) is Tensor else found.as_subclass(Tensor)
            if plain.layout is torch.strided and not (plain.is_floating_point() or plain.data_ptr() in excluded):
                stored = 1 + sum((size - 1) * step for size, step in zip(plain.shape, plain.stride()))
                spans.append((plain.data_ptr(), plain.data_ptr() + max(0, stored) * plain.itemsize))
    total = reached = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def measure(store: str, ranks: int, model: str) -> dict[str, float]:
    """What one case needs, in bytes."""
    with tempfile.TemporaryDirectory() as folder:  # what is imported at first use is no structure
        make_store(Path(folder, "store"), 200, 2, 2)
        run(lambda comm: sp.load(Path(folder, "store"), comm).y.sum(), 1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    loaded: dict[str, float] = {}

    def work(comm: Any) -> None:
        graph = sp.load(store, comm)
        ids, labels = graph.node_ids, graph.y
        graphs.append((ids, labels))
        comm.barrier()
        if comm.rank == 0:
            loaded["peak"], loaded["resident"] = resident("VmHWM") - before, resident("VmRSS") - before
            loaded["loaded"] = structure_bytes(tensor for pair in graphs for tensor in pair)
        comm.barrier()
        torch.manual_seed(0)
        net = sp.pyg.wrap(MODELS[model][0](NUM_FEATURES, 8, 2, 4), comm)
        for _ in range(2):
            loss = net(graph.x, graph.edge_index).sum()
            loss.backward()
            del loss
        comm.barrier()
        if comm.rank == 0:
            loaded["trained"] = structure_bytes(tensor for pair in graphs for tensor in pair)
        comm.barrier()

    graphs: list[tuple[Tensor, Tensor]] = []
    run(work, ranks)
    return loaded


def main(arguments: list[str] | None = None) -> int:
    """Print each figure beside its bar; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--degree", type=int, default=16)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(measure(**json.loads(options.case))))
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        make_store(store, options.edges, options.degree, options.parts)
        size = sum(file.stat().st_size for file in store.iterdir()) / options.edges
        print(f"{options.edges:,} edges, {options.degree} per node, {options.parts} parts: {size:.1f} bytes per edge")
        for ranks in options.ranks:
            for model in options.models:
                case = json.dumps({"store": str(store), "ranks": ranks, "model": model})
                command = [sys.executable, "-m", "benchmarks.edge_bytes", "--case", case]
                found = json.loads(
                    subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT).stdout
                )
                kept, bar = found["trained"] / options.edges, MODELS[model][1]
                loading = found["peak"] / max(1, found["resident"])
                missed += (kept > bar) + (loading > MOST_WHILE_LOADING)
                print(
                    f"{ranks} ranks, {model}: loaded {found['loaded'] / options.edges:.1f}, trained {kept:.1f} bytes "
                    f"per edge (bar {bar:g}); resident after load {found['resident'] / options.edges:.1f}, "
                    f"peak {loading:.2f} times that (bar {MOST_WHILE_LOADING})"
                )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
