"""Sampled edges per CPU second, beside DGL's NeighborSampler in the same run.

    python -m benchmarks.sampling                        # a random graph of 100,000 nodes and 3 million edges
    python -m benchmarks.sampling graph.npz --ranks 1 2 4

Batches of seeds and the edges drawn for them, without features. DGL runs in one process and ours on ranks that are
processes, a thread each; both draw the same number of neighbours for the same number of seeds, one round after the
other, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from shardpass.backends.communicator import Communicator
from shardpass.backends.spawn import spawn
from shardpass.core.sampling.neighbours import Drawer
from shardpass.core.sampling.sample import sample
from shardpass.core.sampling.source import source_of
from shardpass.testing.graphs import WholeGraph, shard_in_memory


def random_graph(num_nodes: int, num_edges: int) -> WholeGraph:
    """Ends drawn with a bias to small ids, so that degrees are spread; both directions are in."""
    generator = np.random.default_rng(0)
    ends = (num_nodes * generator.random((2, num_edges // 2)) ** 1.5).astype(np.int64)
    return WholeGraph(num_nodes, torch.from_numpy(np.concatenate([ends, ends[::-1]], axis=1)))


def read(path: str | None) -> WholeGraph:
    """The graph of an npz, or the random one."""
    if path is None:
        return random_graph(100_000, 3_000_000)
    arrays = np.load(path)
    edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    return WholeGraph(int(edge_index.max()) + 1, edge_index)


def batches(num_nodes: int, batch_size: int, count: int) -> list[Any]:
    """Seeds of `count` batches."""
    order = np.random.default_rng(1).permutation(num_nodes)
    return [order[np.arange(i * batch_size, (i + 1) * batch_size) % num_nodes] for i in range(count)]


def ours(
    comm: Communicator,
    graph: WholeGraph,
    batch_size: int,
    count: int,
    fanouts: list[int],
    every_layer: bool,
    rounds: int,
) -> list[dict[str, float]]:
    """Seconds and edges of each round on this rank."""
    torch.set_num_threads(1)
    owners = torch.arange(graph.num_nodes) * comm.size // graph.num_nodes
    source = source_of(shard_in_memory(graph, owners, comm))
    drawer, (kind,) = Drawer(source), source.edges
    hops = [{kind: fanout} for fanout in reversed(fanouts)]
    mine = [seeds[comm.rank :: comm.size] for seeds in batches(graph.num_nodes, batch_size, count)]
    found = []
    for number in range(rounds + 1):
        comm.barrier()
        start, wall, edges = time.process_time(), time.perf_counter(), 0
        for step, seeds in enumerate(mine):
            drawn, _ = sample(drawer, {"node": seeds}, hops, step, every_layer)
            edges += sum(len(hop[kind].src) for hop in drawn.hops)
        figures = {"cpu": time.process_time() - start, "wall": time.perf_counter() - wall, "edges": float(edges)}
        if number:  # the first compiles
            found.append(figures)
    return found


def dgl_rounds(
    graph: WholeGraph, batch_size: int, count: int, fanouts: list[int], rounds: int
) -> list[dict[str, float]]:
    """The same with DGL's NeighborSampler in this process."""
    import dgl

    torch.set_num_threads(1)
    dgl.utils.set_num_threads(1)
    whole = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_nodes).formats("csc")
    sampler = dgl.dataloading.NeighborSampler(fanouts)
    found = []
    for number in range(rounds + 1):
        start, wall, edges = time.process_time(), time.perf_counter(), 0
        for seeds in batches(graph.num_nodes, batch_size, count):
            _, _, blocks = sampler.sample(whole, torch.from_numpy(seeds))
            edges += sum(block.num_edges() for block in blocks)
        if number:
            found.append(
                {"cpu": time.process_time() - start, "wall": time.perf_counter() - wall, "edges": float(edges)}
            )
    return found


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Edges per second of the best round."""
    return {
        "edges per CPU second": max(r["edges"] / r["cpu"] for r in rounds),
        "edges per second": max(r["edges"] / r["wall"] for r in rounds),
        "edges": rounds[0]["edges"],
    }


def summed(ranks: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Rounds over all ranks: CPU seconds and edges add up, the slowest rank counts."""
    return [
        {
            "cpu": sum(r["cpu"] for r in step),
            "wall": max(r["wall"] for r in step),
            "edges": sum(r["edges"] for r in step),
        }
        for step in zip(*ranks)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", help="an .npz with edge_index")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch-size", type=int, default=1024, help="of all ranks together")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    graph = read(given.graph)
    setting = given.batch_size, given.batches, given.fanouts
    results = {"DGL, one process": best(dgl_rounds(graph, *setting, given.rounds))}
    for ranks in given.ranks:
        backend: Any = "threads" if ranks == 1 else "processes"
        for every_layer, name in ((True, "blocks"), (False, "subgraphs")):
            arguments = (graph, *setting, every_layer, given.rounds)
            results[f"{name}, {ranks} rank(s)"] = best(summed(spawn(ours, ranks, backend, args=arguments)))
    for name, figures in results.items():
        print(json.dumps({"run": name, **{key: round(value) for key, value in figures.items()}}))


if __name__ == "__main__":
    main()
