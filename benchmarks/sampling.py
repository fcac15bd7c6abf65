"""Sampled edges per CPU second, beside DGL's NeighborSampler in the same run; writes the report of sampling.

    python -m benchmarks.sampling --local 0.9            # a random graph of 100,000 nodes and 3 million edges
    python -m benchmarks.sampling graph.npz --ranks 1 2 4
    python -m benchmarks.sampling --accuracy cora.json computers.json --output benchmarks/reports

Batches of seeds and the edges drawn for them, without features. DGL makes blocks in one process; ours makes DGL's
blocks, or the numbers of PyG's subgraphs (which draw less), on ranks that are processes, a thread each. Every rank has
as many seeds per step as DGL has. A rank owns a run of ids; how many edges cross between ranks is what --local says.
Ranks of one host read each other's structure in shared memory; with messages they work as on several hosts.

The figure is the throughput of W ranks for one who has W cores: the sampled edges of all ranks, divided by the CPU
seconds of the rank that used the most. CPU seconds are user and system time of all threads of the process. The other
figure divides by the CPU seconds of all ranks together. Systems take turns, --passes times; the best round of each
counts. The agreement of the ranks on each batch, which the loaders make, is not in it, as DGL's loader is not.

With --accuracy the report has what `benchmarks.accuracy_sampling --json` wrote, too; files of the same graph and
settings (other seeds) are pooled.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy_sampling import compared
from benchmarks.machine import machine
from shardpass.backends.communicator import Communicator
from shardpass.backends.spawn import spawn
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Options
from shardpass.core.sampling import Drawer, Settings, sample, source_of
from shardpass.testing.graphs import WholeGraph, shard_in_memory

Figures = dict[str, float]

THROUGHPUT = (
    "Million sampled edges of all ranks together, divided by CPU seconds; a random graph of 100,000 nodes and 3",
    "million edges unless the command names another, nine in ten of them within communities; 15, 10 and 5",
    "neighbours, 1,024 seeds per rank and step, a thread per process, ids of nodes and edges without features, best",
    "round. Messages go over gloo and the loopback interface, as they would between hosts. With more ranks, the seeds",
    "of a rank are nearer to each other, so its batches have fewer edges. See `benchmarks/sampling.py`.",
)


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
    comm: Communicator, graph: WholeGraph, batch_size: int, count: int, fanouts: list[int], rounds: int
) -> dict[str, list[Figures]]:
    """Seconds and edges of each round on this rank, by what is made (blocks of DGL, or PyG's subgraphs) and how."""
    torch.set_num_threads(1)
    owners = torch.arange(graph.num_nodes) * comm.size // graph.num_nodes
    every = batches(graph.num_nodes, batch_size * comm.size, count)
    mine = [seeds[owners[seeds].numpy() == comm.rank] for seeds in every]  # about equal; the loader evens them out
    found: dict[str, list[Figures]] = {}
    for share_memory in (True, False) if comm.size > 1 else (True,):
        share = shard_in_memory(graph, owners, comm, Options(share_memory=share_memory))
        for name, make in (("blocks", _blocks), ("subgraphs", _subgraphs)):
            draw = make(share, fanouts)
            shared = source_of(share).parts is not None
            way = "shared memory" if shared else "messages" if comm.size > 1 else "one rank"
            steps = [partial(draw, seeds, step) for step, seeds in enumerate(mine)]
            found[f"{name}, {way}"] = [measured(steps, comm) for _ in range(rounds + 1)][1:]  # the first compiles
    return found


def measured(steps: Sequence[Callable[[], int]], comm: Communicator | None = None) -> Figures:
    """CPU and wall seconds of this process, and the edges drawn."""
    if comm is not None:
        comm.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    edges = sum(step() for step in steps)
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "edges": float(edges)}


def _blocks(graph: ShardedGraph, fanouts: list[int]) -> Callable[[Any, int], int]:
    from shardpass.frontends.dgl import graph as to_dgl
    from shardpass.frontends.dgl.loader import draw_blocks, sampler_of

    whole = to_dgl(graph)
    (kind,), (ntype,) = whole.canonical_etypes, whole.ntypes
    hops = [{kind: fanout} for fanout in reversed(fanouts)]
    sampler = sampler_of(whole, Settings(hops, 1, prefetch=0, every_layer=True))

    def draw(seeds: Any, step: int) -> int:
        _, _, blocks = draw_blocks(sampler, {ntype: seeds}, step, {ntype: []}, {ntype: []})
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


def dgl_rounds(graph: WholeGraph, batch_size: int, count: int, fanouts: list[int], rounds: int) -> list[Figures]:
    """The same with DGL's NeighborSampler in this process."""
    import dgl

    torch.set_num_threads(1)
    dgl.utils.set_num_threads(1)
    whole = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_nodes).formats("csc")
    sampler = dgl.dataloading.NeighborSampler(fanouts)

    def draw(seeds: Any) -> int:
        _, _, blocks = sampler.sample(whole, torch.from_numpy(seeds))
        return sum(block.num_edges() for block in blocks)

    steps = [partial(draw, seeds) for seeds in batches(graph.num_nodes, batch_size, count)]
    return [measured(steps) for _ in range(rounds + 1)][1:]


def best(rounds: list[Figures]) -> Figures:
    """Of the best round: million edges of all ranks per CPU second of the busiest rank, and of all ranks."""
    return {
        "busiest": max(r["edges"] / r["busiest"] for r in rounds) / 1e6,
        "all": max(r["edges"] / r["cpu"] for r in rounds) / 1e6,
        "edges": rounds[0]["edges"],
    }


def summed(ranks: Sequence[list[Figures]]) -> list[Figures]:
    """Rounds over all ranks: CPU seconds and edges add up."""
    return [
        {
            "cpu": sum(r["cpu"] for r in step),
            "busiest": max(r["cpu"] for r in step),
            "edges": sum(r["edges"] for r in step),
        }
        for step in zip(*ranks)
    ]


def compare(graph: WholeGraph, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A record per system and number of ranks."""
    setting = graph, given.batch_size, given.batches, given.fanouts
    rounds: dict[tuple[str, int], list[Figures]] = {}
    for _ in range(given.passes):
        rounds.setdefault(("DGL's NeighborSampler", 1), []).extend(summed([dgl_rounds(*setting, given.rounds)]))
        for ranks in given.ranks:
            backend: Any = "threads" if ranks == 1 else "processes"
            found = spawn(ours, ranks, backend, args=(*setting, given.rounds))
            for name in found[0]:
                rounds.setdefault((name, ranks), []).extend(summed([rank[name] for rank in found]))
    return [{"run": name, "ranks": ranks, **best(every)} for (name, ranks), every in rounds.items()]


def markdown(found: dict[str, Any]) -> str:
    """The report."""
    lines = [f"# Sampling, {found['date']}", "", *THROUGHPUT, ""]
    lines += ["| | ranks | per CPU second of the busiest rank | per CPU second of all ranks |", "|---|---|---|---|"]
    lines += [f"| {r['run']} | {r['ranks']} | {r['busiest']:.1f} | {r['all']:.1f} |" for r in found["throughput"]]
    for accuracy in found["accuracy"]:
        lines += ["", f"## Accuracy: {accuracy['graph']}", ""]
        lines += [accuracy_words(accuracy), "", "| | mean | std | difference from DGL's loader | in standard errors |"]
        lines += ["|---|---|---|---|---|"]
        for name, row in compared(accuracy["accuracy"]).items():
            ratio = f"{row['difference'] / row['standard error']:+.1f}" if row["difference"] else ""
            difference = f"{row['difference']:+.2f} ± {row['standard error']:.2f}" if ratio else ""
            lines.append(f"| {name} | {row['mean']:.2f} | {row['std']:.2f} | {difference} | {ratio} |")
    where = found["machine"]
    lines += [
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}. Python "
        f"{where['python']}, torch {where['torch']}, shardpass {where['shardpass']}.",
        "",
        f"Command: `{found['command']}`",
    ]
    return "\n".join(lines) + "\n"


def accuracy_words(accuracy: dict[str, Any]) -> str:
    """How a graph's accuracy was measured."""
    seeds = ", ".join(str(len(scores)) for scores in accuracy["accuracy"].values())
    return (
        f"Test accuracy in per cent, mean over {seeds} seeds (in the order of the rows), {accuracy['epochs']} epochs, "
        f"{accuracy['batch_size']} seeds a step over all ranks, at {accuracy['revision']}; see "
        f"`benchmarks/accuracy_sampling.py`. The ± is the standard error of the difference."
    )


def pooled(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of the same graph and settings as one."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        settings = record["graph"], record["epochs"], record["batch_size"]
        if settings not in found:
            found[settings] = {**record, "accuracy": {name: [*scores] for name, scores in record["accuracy"].items()}}
            continue
        one = found[settings]
        if record["revision"] not in one["revision"].split(", "):
            one["revision"] += f", {record['revision']}"
        for name, scores in record["accuracy"].items():
            one["accuracy"].setdefault(name, []).extend(scores)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", help="an .npz with edge_index")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--local", type=float, default=0.9, help="of the random graph: edges within communities")
    parser.add_argument("--batch-size", type=int, default=1024, help="per rank")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--accuracy", type=Path, nargs="*", default=[], help="what accuracy_sampling --json wrote")
    parser.add_argument("--output", type=Path, help="folder to write the report to")
    parser.add_argument("--again", type=Path, metavar="JSON", help="with the throughput of this earlier report")
    given = parser.parse_args()
    if given.again is not None:
        found = json.loads(given.again.read_text())
    else:
        found = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python -m benchmarks.sampling", *sys.argv[1:]]),
            "machine": machine(),
            "throughput": compare(read(given.graph, given.local), given),
            "accuracy": [],
        }
    for record in found["throughput"]:
        print(json.dumps(record), flush=True)
    found["accuracy"] = pooled([json.loads(path.read_text()) for path in given.accuracy]) or found["accuracy"]
    if given.output is not None:
        stem = given.output / f"sampling-{found['date']}"
        stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
