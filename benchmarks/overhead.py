"""What shardpass costs on small graphs: its epochs beside those of plain PyG, in one process.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --data FOLDER

The models are those of PyG's examples: GCN (16 hidden, dropout 0.5, with and without ``cached=True``) and GAT (8 heads
of 8, dropout 0.6), on graphs of the size of Cora and Citeseer, or on cora.npz and citeseer.npz in a folder. The epochs
of plain PyG and of shardpass on one rank alternate, so that both meet the same machine; CPU seconds, one thread. Epochs
whose operations are followed (the first, second, fourth, eighth, ...) are told apart: the median says nothing of them.
The last line of each row is a bar, and whether it is met: an epoch takes at most 1.05 times that of PyG, and the first
at most 0.3 s more than the first of PyG.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv

import shardpass as sp
from benchmarks.run import huge_pages
from shardpass.data import read
from shardpass.testing import WholeGraph, shard_in_memory

SIZES = {"cora": (2708, 10556, 1433, 7), "citeseer": (3327, 9104, 3703, 6)}
"""Nodes, directed edges, features and classes."""
MODELS = ("gcn", "gcn cached", "gat")
LATER, FIRST = 1.05, 0.3
"""The bars: at most this many times an epoch of PyG; at most so many seconds more in the first one."""
SECONDS, FEWEST = 5.0, 20
"""How long later epochs are repeated, and at least how often."""


class Data(NamedTuple):
    """A graph with features that sum to one, labels and the mask of the nodes to train on."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    mask: Tensor


class Net(nn.Module):
    """Two layers, as in PyG's examples."""

    def __init__(self, kind: str, channels: int, classes: int) -> None:
        super().__init__()
        self.dropout, self.activation = (0.6, F.elu) if kind == "gat" else (0.5, F.relu)
        if kind == "gat":
            self.first: nn.Module = GATConv(channels, 8, heads=8, dropout=0.6)
            self.second: nn.Module = GATConv(64, classes, heads=1, concat=False, dropout=0.6)
        else:
            self.first = GCNConv(channels, 16, cached=kind == "gcn cached")
            self.second = GCNConv(16, classes, cached=kind == "gcn cached")

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = self.activation(self.first(x, edge_index))
        return self.second(F.dropout(x, self.dropout, self.training), edge_index)


def data_of(name: str, folder: Path | None) -> Data:
    """The graph of that name in `folder`, or one of its size."""
    if folder is not None and (folder / f"{name}.npz").exists():
        found = read(folder / f"{name}.npz")
        fields, edges = found.node_fields["node"], found.edges[("node", "to", "node")]
        x, y = fields["x"].to_dense(), torch.as_tensor(fields["y"]).long()
        mask = torch.as_tensor(fields["train_mask"])
        edge_index = torch.stack([torch.as_tensor(edges.src), torch.as_tensor(edges.dst)]).long()
    else:
        nodes, edges, channels, classes = SIZES[name]
        rng = np.random.default_rng(0)
        half = torch.from_numpy(rng.integers(0, nodes, (2, edges // 2)))
        edge_index = torch.cat([half, half.flip(0)], 1)
        x = torch.from_numpy((rng.random((nodes, channels)) < 0.01).astype(np.float32))
        y, mask = torch.from_numpy(rng.integers(0, classes, nodes)), torch.arange(nodes) < 140
    return Data(x / x.sum(1, keepdim=True).clamp(min=1), edge_index, y, mask)


def plain_epoch(kind: str, data: Data) -> Callable[[], None]:
    """What trains a new model of plain PyG for an epoch."""
    model, optimizer = _made(kind, data)

    def epoch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index)[data.mask], data.y[data.mask]).backward()
        optimizer.step()

    return epoch


def sharded_epoch(kind: str, data: Data) -> Callable[[], None]:
    """What trains the same model on one rank for an epoch."""
    comm = sp.connect("local")
    whole = WholeGraph(len(data.x), data.edge_index, {"x": data.x, "y": data.y, "mask": data.mask})
    graph = shard_in_memory(whole, torch.zeros(len(data.x), dtype=torch.int64), comm)
    model, optimizer = _made(kind, data)
    sp.pyg.wrap(model, comm)

    def epoch() -> None:
        optimizer.zero_grad()
        sp.cross_entropy(model(graph.x, graph), graph.y, graph.mask, comm).backward()
        optimizer.step()

    return epoch


def _made(kind: str, data: Data) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(kind, data.x.size(1), int(data.y.max()) + 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.005 if kind == "gat" else 0.01, weight_decay=5e-4)


def seconds(epoch: Callable[[], None]) -> float:
    """CPU seconds of an epoch."""
    start = time.process_time()
    epoch()
    return time.process_time() - start


def first_epoch(kind: str, data: Data, sharded: bool) -> float:
    """CPU seconds of the first epoch of this process."""
    return seconds((sharded_epoch if sharded else plain_epoch)(kind, data))


def later_epochs(kind: str, data: Data) -> dict[str, float]:
    """Medians over later epochs: of PyG, of shardpass, and of those epochs of shardpass that are followed."""
    plain, ours = plain_epoch(kind, data), sharded_epoch(kind, data)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < FEWEST or sum(map(sum, pairs)) < SECONDS:
        pairs.append((seconds(plain), seconds(ours)))
    is_followed = [number & (number - 1) == 0 for number in range(1, len(pairs) + 1)]
    steady = [pair for pair, skip in zip(pairs, is_followed) if not skip]
    found = {"plain": median(pair[0] for pair in steady), "ours": median(pair[1] for pair in steady)}
    return {**found, "followed": median(pair[1] for pair, one in zip(pairs[1:], is_followed[1:]) if one)}


def in_fresh_process(*task: str) -> Any:
    """What this script prints when it is called with a task."""
    environment = {**os.environ, **huge_pages(True), "OMP_NUM_THREADS": "1"}  # else epochs differ by their page faults
    command = [sys.executable, "-m", "benchmarks.overhead", "--task", *task]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def row(name: str, kind: str, folder: str) -> str:
    """The figures of one model on one graph, and the bars."""
    in_fresh_process("ours", name, kind, folder)  # compiles
    first = {who: in_fresh_process(who, name, kind, folder) for who in ("plain", "ours")}
    later = in_fresh_process("later", name, kind, folder)
    ratio, more = later["ours"] / later["plain"], first["ours"] - first["plain"]
    verdicts = ["holds" if good else "does NOT hold" for good in (ratio <= LATER, more <= FIRST)]
    return (
        f"{kind} on {name}: an epoch {later['ours'] * 1e3:.1f} ms, PyG {later['plain'] * 1e3:.1f}, {ratio:.3f} times. "
        f"At most {LATER}: {verdicts[0]}. A followed epoch {later['followed'] * 1e3:.1f} ms. The first "
        f"{first['ours']:.3f} s, PyG {first['plain']:.3f}, {more:.3f} more. At most {FIRST}: {verdicts[1]}."
    )


def main() -> None:
    """Measure and print, or do one task in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a folder with cora.npz and citeseer.npz")
    parser.add_argument("--task", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.task:
        what, name, kind, folder = args.task
        data = data_of(name, Path(folder) if folder else None)
        found = later_epochs(kind, data) if what == "later" else first_epoch(kind, data, what == "ours")
        return print(json.dumps(found))
    for name in SIZES:
        for kind in MODELS:
            print(row(name, kind, args.data), flush=True)


if __name__ == "__main__":
    main()
