"""How much memory inference over the whole graph needs, beside PyG's layer-wise inference.

    python -m benchmarks.inference_peak --nodes 300000 --degree 10

A GraphSAGE of three layers, as wide as its features, in float32. Each run is in fresh processes, which glibc makes give
freed blocks back at once. What is counted is memory above the graph's structure and the model: the highest RssAnon
while a thread looks every few milliseconds, and beside it the pages of mapped files (RssFile), which the kernel may
drop. The bar is own rows of two layers, the largest block of fetched rows, and `SLACK` for blocks of computed rows,
code and the transport.

PyG's side is ``inference()`` of its example ``reddit.py``: all rows of a layer, batch by batch with all neighbours.
Its `NeighborLoader` needs a package beside PyG; `batches` makes what it would.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import shardpass as sp
from benchmarks.graphs import dense_edges
from benchmarks.limited import status
from shardpass.cli.memory import exact_allocator

CHANNELS, LAYERS, BATCH = 128, 3, 1024
SLACK = 48 << 20
MIB = 1 << 20


class Peak:
    """The highest RssAnon and RssFile of this process above those at the start; a thread looks."""

    def __init__(self, seconds: float = 0.002) -> None:
        self._start = {name: status(name) for name in ("RssAnon", "RssFile")}
        self.bytes, self._seconds = dict.fromkeys(self._start, 0), seconds
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            for name, start in self._start.items():
                self.bytes[name] = max(self.bytes[name], status(name) - start)
            time.sleep(self._seconds)


def model_of() -> GraphSAGE:
    """The model, the same in every process."""
    torch.manual_seed(0)
    return GraphSAGE(CHANNELS, CHANNELS, LAYERS, CHANNELS).eval()


def our_rank(comm: sp.Communicator, folder: str) -> dict[str, Any]:
    """The figures of one rank of `sp.infer`."""
    torch.set_num_threads(1)
    graph = sp.load(Path(folder) / f"store-{comm.size}", comm)
    model = sp.pyg.wrap(model_of(), comm)
    if comm.size > 1:  # what its first message makes the transport keep is none of inference
        comm.all_reduce(torch.zeros(1 << 16), label="warm up")
    own, plan = graph.num_own_nodes, graph.relation.plan
    fetched = max((block.stop - block.start for block in plan.blocks[1:]), default=0)
    peak, began = Peak(), time.process_time()
    sp.infer(model, graph, Path(folder) / f"ours-{comm.size}.npy")
    seconds = time.process_time() - began
    layer = own * CHANNELS * 4
    return {"layer": layer, "bar": 2 * layer + fetched * CHANNELS * 4 + SLACK, "cpu_seconds": seconds, **peak.bytes}


def batches(indptr: Tensor, sources: Tensor, num_nodes: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """The nodes, edges and number of seeds of each batch of all nodes in order, with all in-neighbours of the seeds."""
    for start in range(0, num_nodes, BATCH):
        stop = min(num_nodes, start + BATCH)
        src = sources[indptr[start] : indptr[stop]]
        dst = torch.repeat_interleave(torch.arange(stop - start), indptr[start + 1 : stop + 1] - indptr[start:stop])
        others = torch.unique(src[(src < start) | (src >= stop)])
        nodes = torch.cat([torch.arange(start, stop), others])
        is_seed = (src >= start) & (src < stop)
        rows = torch.where(is_seed, src - start, torch.searchsorted(others, src) + stop - start)
        yield nodes, torch.stack([rows, dst]), stop - start


@torch.no_grad()
def pyg(folder: Path) -> dict[str, Any]:
    """The figures of PyG's layer-wise inference."""
    torch.set_num_threads(1)
    edge_index = torch.from_numpy(np.load(folder / "edge_index.npy")).long()
    num_nodes = len(np.load(folder / "x.npy", mmap_mode="r"))
    order = torch.argsort(edge_index[1], stable=True)
    sources = edge_index[0][order]
    indptr = torch.searchsorted(edge_index[1][order], torch.arange(num_nodes + 1))
    del edge_index, order
    model = model_of()
    peak, began = Peak(), time.process_time()
    x_all = torch.from_numpy(np.load(folder / "x.npy"))
    for layer, conv in enumerate(model.convs):
        rows = []
        for nodes, edges, seeds in batches(indptr, sources, num_nodes):
            x = conv(x_all[nodes], edges)
            x = x.relu_() if layer < LAYERS - 1 else x
            rows.append(x[:seeds].clone())  # the example's .cpu(), which copies from a GPU
        x_all = torch.cat(rows, dim=0)
    seconds = time.process_time() - began
    np.save(folder / "pyg.npy", x_all.numpy())
    return {"layer": x_all.nbytes, "bar": None, "cpu_seconds": seconds, **peak.bytes}


def make(folder: Path, num_nodes: int, degree: int) -> None:
    """Write the graph and its stores."""
    edges = dense_edges(num_nodes, degree)
    rng = np.random.default_rng(0)
    np.save(folder / "edge_index.npy", edges)
    np.save(folder / "x.npy", rng.standard_normal((num_nodes, CHANNELS), dtype=np.float32))
    arrays = {"edge_index": edges, "x": np.load(folder / "x.npy", mmap_mode="r")}
    np.savez(folder / "graph.npz", **arrays)
    for ranks in (1, 2):
        sp.partition(folder / "graph.npz", folder / f"store-{ranks}", parts=ranks, method="random")


def child(system: str, folder: str) -> None:
    """Run one system and print its figures."""
    if system == "pyg":
        found = [pyg(Path(folder))]
    elif system == "ours-1":
        found = [our_rank(sp.connect(), folder)]
    else:
        found = sp.spawn(our_rank, 2, "processes", args=(folder,))
    print(json.dumps(found), flush=True)


def measure(folder: Path, system: str) -> list[dict[str, Any]]:
    """The figures of each rank of a system, in fresh processes."""
    environment = {**os.environ, **exact_allocator(), "OMP_NUM_THREADS": "1", "MKL_DISABLE_FAST_MM": "1"}
    command = [sys.executable, "-m", "benchmarks.inference_peak", "--child", system, "--folder", str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(system: str, ranks: list[dict[str, Any]]) -> bool:
    """Print the figures of the largest rank beside the bar; whether it is kept."""
    most = max(ranks, key=lambda rank: rank["RssAnon"])
    anonymous, mapped = most["RssAnon"], most["RssFile"]
    line = f"{system:7} rows of a layer {most['layer'] / MIB:6.1f} MiB, peak {anonymous / MIB:6.1f} MiB"
    line += f" = {anonymous / most['layer']:.2f} layers, mapped pages {mapped / MIB:6.1f} MiB"
    line += f", {sum(rank['cpu_seconds'] for rank in ranks):5.1f} CPU s"
    kept = most["bar"] is None or anonymous <= most["bar"]
    if most["bar"] is not None:
        line += f"; bar {most['bar'] / MIB:.1f} MiB: {'kept' if kept else 'NOT kept'}"
    print(line, flush=True)
    return kept


def run(num_nodes: int, degree: int, folder: Path) -> bool:
    """Measure all systems, compare what they wrote; whether the bars are kept."""
    if not (folder / "store-2").exists():
        make(folder, num_nodes, degree)
    kept = True
    for system in ("pyg", "ours-1", "ours-2"):
        kept &= report(system, measure(folder, system))
    theirs = np.load(folder / "pyg.npy", mmap_mode="r")
    for ranks in (1, 2):
        path = folder / f"ours-{ranks}.npy"
        difference = np.abs(np.load(path, mmap_mode="r") - theirs).max() / np.abs(theirs).max()
        print(f"ours-{ranks}: largest difference from PyG {difference:.1e} of the largest output")
        kept &= bool(difference < 1e-5)
        path.unlink()
    return kept


def main() -> None:
    """Measure and print; exit code 1 if a bar is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where the graph is kept between calls (default: a temporary one)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, str(args.folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        raise SystemExit(not run(args.nodes, args.degree, folder))


if __name__ == "__main__":
    main()
