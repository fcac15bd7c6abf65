"""What a training step with forces costs, beside one without and beside PyG's, in one process with one thread.

    python -m benchmarks.forces_cost [--atoms 10000]

The models of ``examples/forces.py``, in float32, on atoms at random with 40 neighbours each. CPU seconds are the least
of three steps; memory is the peak above what is resident before the first. Each figure is measured in a process of its
own. Bars: at most 2.5 times a step without forces, which none holds, 1.2 times PyG's with them, and half of its memory,
which SchNet does not hold: what its networks of edges make is kept by autograd.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from scipy.spatial import KDTree
from torch import Tensor, nn
from torch_geometric.data import Data

import shardpass as sp

EXAMPLES = Path(__file__).parents[1] / "examples"
NEIGHBOURS, WIDTH = 40, {"SchNet": 64, "Mace": 32}


class Energies(nn.Module):
    """Energies of atoms from their positions."""

    def __init__(self, of_spans: nn.Module) -> None:
        super().__init__()
        self.of_spans = of_spans

    def forward(self, pos: Tensor, edge_index: Any) -> Tensor:
        """``[num_atoms]``."""
        src, dst = edge_index
        found: Tensor = self.of_spans(pos[src] - pos[dst], edge_index, pos.size(0))
        return found


def atoms(count: int) -> Data:
    """As many atoms as a cube of their number holds, and the nearest of each."""
    pos = torch.rand(count, 3, generator=torch.Generator().manual_seed(0)) * count ** (1 / 3)
    _, nearest = KDTree(pos.numpy()).query(pos.numpy(), k=NEIGHBOURS + 1)
    src = torch.from_numpy(nearest[:, 1:]).flatten().long()
    return Data(pos=pos, edge_index=torch.stack([src, torch.arange(count).repeat_interleave(NEIGHBOURS)]))


def measured(system: str, kind: str, forces: bool, count: int) -> dict[str, float]:
    """CPU seconds of a step, and its peak in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data: Any = atoms(count)
    sys.path.insert(0, str(EXAMPLES))  # PyG looks up the module in which a layer is defined
    model: Any = Energies(getattr(importlib.import_module("forces"), kind)(WIDTH[kind]))
    nn.init.normal_(model.of_spans.out[-1].weight)
    if system == "shardpass":
        data = sp.shard(data)
        model = sp.pyg.wrap(model)

    def step() -> float:
        model.zero_grad()
        pos = data.pos.clone().requires_grad_(forces)
        energies = model(pos, data.edge_index)
        loss = energies.square().mean()
        if forces:
            (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=True)
            loss = loss + slope.square().mean()
        loss.backward()
        return float(loss.detach())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss, seconds = step(), []
    for _ in range(3):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": min(seconds), "megabytes": peak / 1000, "loss": loss}


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, default=10_000)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one[0], args.one[1], args.one[2] == "forces", args.atoms)))
        return
    for kind in WIDTH:
        found = {}
        for system in ("PyG", "shardpass"):
            for what in ("energies", "forces"):
                command = [sys.executable, "-m", "benchmarks.forces_cost", "--atoms", str(args.atoms)]
                run = subprocess.run(
                    [*command, "--one", system, kind, what], capture_output=True, text=True, check=True
                )
                one = found[system, what] = json.loads(run.stdout.splitlines()[-1])
                print(f"{kind}, {system}, {what}: {one['seconds']:.2f} s, {one['megabytes']:.0f} MB, {one['loss']:.6g}")
        ours, theirs, first = found["shardpass", "forces"], found["PyG", "forces"], found["shardpass", "energies"]
        print(
            f"{kind} with forces: {ours['seconds'] / first['seconds']:.2f} times a step without (bar 2.5), "
            f"{ours['seconds'] / theirs['seconds']:.2f} times PyG's (bar 1.2), "
            f"{ours['megabytes'] / theirs['megabytes']:.2f} of its memory (bar 0.5)",
            flush=True,
        )


if __name__ == "__main__":
    main()
