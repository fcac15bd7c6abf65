"""Sampled edges per CPU second, beside DGL's NeighborSampler in the same run.

    python -m benchmarks.sampling --local 0.9            # a random graph of 100,000 nodes and 3 million edges
    python -m benchmarks.sampling graph.npz --ranks 1 2 4

Batches of seeds and the edges drawn for them, without features. DGL makes blocks in one process; ours makes DGL's
blocks, or the numbers of PyG's subgraphs (which draw less), on ranks that are processes, a thread each. As many seeds
per rank and step, one run after the other, and the best round of each counts. A rank owns a run of ids; how many edges
cross between ranks is what --local says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardpass.backends.communicator import Communicator
from shardpass.backends.spawn import spawn
from shardpass.core.graph import ShardedGraph
from shardpass.core.sampling.loader import Settings
from shardpass.core.sampling.neighbours import Drawer
from shardpass.core.sampling.sample import sample
from shardpass.core.sampling.source import source_of
from shardpass.testing.graphs import WholeGraph, shard_in_memory


def random_graph(num_nodes: int, num_edges: int, local: float) -> WholeGraph:
    """Ends drawn with a bias, so that degrees are spread; the fraction `local` stays within 100 communities."""
    generator = np.random.default_rng(0)
    ends = (num_nodes * generator.random((2, num_edges // 2)) ** 1.5).astype(np.int64)
    size = num_nodes // 100
    inside = (size * generator.random(num_edges // 2) ** 1.5).astype(np.int64) + ends[0] // size * size
    ends[1] = np.where(generator.random(num_edges // 2) < local, np.minimum(inside, num_nodes - 1), ends[1])
    return WholeGraph(num_nodes, torch.from_numpy(np.concatenate([ends, ends[::-1]], axis=1)))


def read(path: str | None, local: float) -> WholeGraph:
    """The graph of an npz, or the random one."""
    if path is None:
        return random_graph(100_000, 3_000_000, local)
    arrays = np.load(path)
    edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    return WholeGraph(int(edge_index.max()) + 1, edge_index)


def batches(num_nodes: int, batch_size: int, count: int) -> list[Any]:
    """Seeds of `count` batches."""
    order = np.random.default_rng(1).permutation(num_nodes)
    return [order[np.arange(i * batch_size, (i + 1) * batch_size) % num_nodes] for i in range(count)]


def ours(
    comm: Communicator, graph: WholeGraph, batch_size: int, count: int, fanouts: list[int], blocks: bool, rounds: int
) -> list[dict[str, float]]:
    """Seconds and edges of each round on this rank: of DGL blocks, or of the numbers of PyG's subgraphs."""
    torch.set_num_threads(1)
    owners = torch.arange(graph.num_nodes) * comm.size // graph.num_nodes
    draw = (_blocks if blocks else _subgraphs)(shard_in_memory(graph, owners, comm), fanouts)
    every = batches(graph.num_nodes, batch_size * comm.size, count)
    mine = [seeds[owners[seeds].numpy() == comm.rank] for seeds in every]  # about equal; the loader evens them out
    found = []
    for number in range(rounds + 1):
        comm.barrier()
        start, wall = time.process_time(), time.perf_counter()
        edges = sum(draw(seeds, step) for step, seeds in enumerate(mine))
        figures = {"cpu": time.process_time() - start, "wall": time.perf_counter() - wall, "edges": float(edges)}
        if number:  # the first compiles
            found.append(figures)
    return found


def _blocks(graph: ShardedGraph, fanouts: list[int]) -> Callable[[Any, int], int]:
    from shardpass.frontends.dgl import graph as to_dgl
    from shardpass.frontends.dgl.loader import Blocks

    whole = to_dgl(graph)
    (kind,), (ntype,) = whole.canonical_etypes, whole.ntypes
    made = Blocks(whole, Settings([{kind: fanout} for fanout in reversed(fanouts)], 1, prefetch=0, every_layer=True))

    def draw(seeds: Any, step: int) -> int:
        _, _, blocks = made.of({ntype: seeds}, step, {ntype: []}, {ntype: []})
        return sum(block.num_edges() for block in blocks)

    return draw


def _subgraphs(graph: ShardedGraph, fanouts: list[int]) -> Callable[[Any, int], int]:
    drawer = Drawer(source_of(graph))
    (kind,) = drawer.source.edges
    hops = [{kind: fanout} for fanout in reversed(fanouts)]

    def draw(seeds: Any, step: int) -> int:
        drawn, _ = sample(drawer, {"node": seeds}, hops, step, every_layer=False)
        return sum(len(hop[kind].src) for hop in drawn.hops)

    return draw


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
    """Of the best round: edges per CPU second of all ranks, and per CPU second of the busiest rank."""
    return {
        "edges per CPU second": max(r["edges"] / r["cpu"] for r in rounds),
        "edges per CPU second of a rank": max(r["edges"] / r["busiest"] for r in rounds),
        "edges per second": max(r["edges"] / r["wall"] for r in rounds),
        "edges": rounds[0]["edges"],
    }


def summed(ranks: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Rounds over all ranks: CPU seconds and edges add up, the slowest rank counts."""
    return [
        {
            "cpu": sum(r["cpu"] for r in step),
            "busiest": max(r["cpu"] for r in step),
            "wall": max(r["wall"] for r in step),
            "edges": sum(r["edges"] for r in step),
        }
        for step in zip(*ranks)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", help="an .npz with edge_index")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--local", type=float, default=0.9, help="of the random graph: edges within communities")
    parser.add_argument("--batch-size", type=int, default=1024, help="per rank")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    graph = read(given.graph, given.local)
    setting = given.batch_size, given.batches, given.fanouts
    show("DGL, one process", [dgl_rounds(graph, *setting, given.rounds)])
    for ranks in given.ranks:
        backend: Any = "threads" if ranks == 1 else "processes"
        for blocks, name in ((True, "blocks"), (False, "subgraphs")):
            arguments = (graph, *setting, blocks, given.rounds)
            show(f"{name}, {ranks} rank(s)", spawn(ours, ranks, backend, args=arguments))


def show(name: str, ranks: list[list[dict[str, float]]]) -> None:
    """Print the best round."""
    figures = {key: round(value) for key, value in best(summed(ranks)).items()}
    print(json.dumps({"run": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
