"""What ``sp.shard`` costs beside a training step on the graph that it makes, in CPU seconds of all ranks.

    python -m benchmarks.shard_cost [--ranks 1 4]

20,000 nodes of 64 features and 800,000 edges; GAT of two layers, 4 heads of 16. ``new`` edges are in tensors that no
rank has seen before, ``known`` ones in those of the step before, beside new features. Medians of rounds in turn. Bars:
new at most a fifth of a step, known at most a fiftieth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GAT

import shardpass as sp

NODES, EDGES, FEATURES, ROUNDS = 20_000, 800_000, 64, 9


def costs(comm: sp.Communicator) -> dict[str, float]:
    """CPU seconds of all ranks, by what they do."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    edges, x = torch.randint(NODES, (2, EDGES), generator=draw), torch.randn(NODES, FEATURES, generator=draw)
    with sp.seed(0, comm):
        model = sp.pyg.wrap(GAT(FEATURES, 64, 2, 64, heads=4), comm)
    optimizer, seconds = torch.optim.Adam(model.parameters()), dict[str, list[float]]()

    def timed(name: str, act: Callable[[], Any]) -> Any:
        comm.barrier()
        start = time.thread_time()
        found = act()
        spent = comm.all_reduce(torch.tensor([time.thread_time() - start], dtype=torch.float64), "sum", name)
        seconds.setdefault(name, []).append(float(spent))
        return found

    def step(graph: Any) -> None:
        optimizer.zero_grad()
        loss: Tensor = sp.mean(model(graph.x, graph).square().mean(-1), None, comm)
        loss.backward()
        optimizer.step()

    for number in range(ROUNDS):
        fresh, again = edges.clone(), x + number
        graph = timed("new", lambda fresh=fresh: sp.shard({"edge_index": fresh, "x": x}, comm))
        timed("known", lambda fresh=fresh, x=again: sp.shard({"edge_index": fresh, "x": x}, comm))
        timed("step", lambda graph=graph: step(graph))
    return {name: median(found[2:]) for name, found in seconds.items()}


def main() -> None:
    """Print a line for each number of ranks, which are processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    for ranks in parser.parse_args().ranks:
        found = sp.spawn(costs, ranks, "processes")[0]
        new, known = (found[name] / found["step"] for name in ("new", "known"))
        print(
            f"{ranks} ranks: a step {1000 * found['step']:.0f} ms, shard of new edges {1000 * found['new']:.1f} ms, "
            f"{new:.3f} of a step (bar 0.2), of known edges {1000 * found['known']:.2f} ms, {known:.3f} (bar 0.02)",
            flush=True,
        )


if __name__ == "__main__":
    main()
