"""Measure whether memory stays flat while every step trains on a new graph in memory.

    python -m benchmarks.flat_memory
    python -m benchmarks.flat_memory --ranks 3 --steps 10000

Each step draws a structure of 30 to 120 atoms, finds the pairs of them that are close to one another, shares it by
`shard`, and does forward, backward and a step of Adam with a model of two GAT layers whose edges have a length. One
process and ranks as threads are measured in fresh processes. The resident set is printed at a tenth of the steps and
later; the bar is that it ends at most 1 % above what it was at a tenth. The live heap is what malloc has given out, by
its own count: what leaks is in it, and what is fragmented is not.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv

import shardpass as sp
from benchmarks.meter import live_heap, resident

BAR = 1.01
MIB = 1 << 20
_MARKS = (0.1, 0.25, 0.5, 0.75, 1.0)


class Model(nn.Module):
    """Two layers, and the energy of each atom."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GATConv(8, 8, heads=4, edge_dim=1), GATConv(32, 8, heads=4, edge_dim=1)
        self.energy = nn.Linear(32, 1)

    def forward(self, x: Tensor, edge_index: Any, length: Tensor) -> Tensor:
        h = self.first(x, edge_index, length).relu()
        return self.energy(self.second(h, edge_index, length).relu())


def structure(step: int) -> Data:
    """Atoms at random places, with about the same number of neighbours each; every rank draws the same."""
    draws = torch.Generator().manual_seed(step)
    count = int(torch.randint(30, 121, (), generator=draws))
    points = torch.rand(count, 3, generator=draws) * (count / 100) ** (1 / 3)
    distance = torch.cdist(points, points)
    edges = ((distance < 0.35) & (distance > 0)).nonzero().T
    length = distance[edges[0], edges[1]].unsqueeze(1)
    return Data(x=torch.randn(count, 8, generator=draws), edge_index=edges, edge_attr=length)


def train(comm: Any, steps: int) -> list[tuple[int, int, int]]:
    """``(step, resident set, live heap)`` at some steps, in bytes."""
    found, marks = [], {int(steps * share) for share in _MARKS}
    with sp.seed(0, comm):
        model = Model()
    sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        graph = sp.shard(structure(step), comm)
        loss = sp.mean(model(graph.x, graph, graph.edge_attr).square(), None, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in marks:
            gc.collect()
            comm.barrier()
            found.append((step, resident("VmRSS"), live_heap()))
            comm.barrier()
    return found


def child(ranks: int, steps: int) -> bool:
    """Train in this process and print what was measured; whether the bar is kept."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = train(sp.connect("local"), steps) if ranks == 1 else sp.spawn(train, ranks, "threads", args=(steps,))[0]
    each = (time.perf_counter() - start) / steps
    for step, rss, heap in found:
        print(f"{ranks} rank(s), step {step:6}: resident {rss / MIB:7.2f} MiB, live heap {heap / MIB:7.2f} MiB")
    growth = found[-1][1] / found[0][1]
    kept = growth <= BAR
    print(
        f"{ranks} rank(s): {growth:.4f} times, {1000 * each:.1f} ms a step: the bar is {'kept' if kept else 'NOT kept'}"
    )
    return kept


def main() -> None:
    """Measure and print; exit code 1 if a bar is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        raise SystemExit(not child(args.child, args.steps))
    command = [sys.executable, "-m", "benchmarks.flat_memory", "--steps", str(args.steps), "--child"]
    codes = [subprocess.run([*command, str(ranks)], check=False).returncode for ranks in args.ranks]
    raise SystemExit(any(codes))


if __name__ == "__main__":
    main()
