"""What partial sums save, by the objective of METIS, and what it costs to find them.

    python -m benchmarks.covers FILE.npz 50k30 community:50000:20        # rows of one layer
    python -m benchmarks.covers --edges 100_000_000                      # loading and covers on eight ranks

A table has, for 4, 8 and 16 parts by METIS: the edges cut, the rows of the halo, and the rows with partial sums. METIS
cuts few edges (the package's way), or sends few rows ("volume": METIS_OBJTYPE_VOL of METIS 5.1).
The second command writes a planted graph of `benchmarks.scale`, cuts it into ranges, and has each rank load its part
and find its covers. It prints CPU seconds, and the highest resident memory of a rank after loading and after each call.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pymetis
import torch
from torch_geometric.nn import SAGEConv

import shardpass as sp
from benchmarks.graphs import make_graph
from benchmarks.machine import machine
from benchmarks.scale import make_files
from shardpass.core.exchange import minimum_cover
from shardpass.data import inspect, inspect_pairs, stream_edge_list

PARTS, RANKS = (4, 8, 16), 8


def compare(name: str) -> None:
    """Print a line for each number of parts and objective."""
    edges = np.asarray(make_graph(name)["edge_index"]).astype(np.int64)
    num_nodes = int(edges.max()) + 1
    both = np.unique(np.concatenate([edges, edges[::-1]], 1), axis=1)
    both = both[:, both[0] != both[1]]
    starts = np.concatenate([[0], np.cumsum(np.bincount(both[0], minlength=num_nodes))])
    lists = pymetis.CSRAdjacency(*(ends.astype(pymetis.zero_copy_dtype()) for ends in (starts, both[1])))
    weights = (1 + np.bincount(edges[1], minlength=num_nodes)).tolist()
    for parts in PARTS:
        for objective, kind in (("edges", pymetis.ObjType.CUT), ("volume", pymetis.ObjType.VOL)):
            options = pymetis.Options(seed=0, objtype=int(kind))
            _, part_of = pymetis.part_graph(parts, lists, vweights=weights, recursive=False, options=options)
            with tempfile.TemporaryDirectory() as path:
                graph = {"edge_index": torch.from_numpy(edges), "num_nodes": num_nodes}
                sp.partition(graph, path, parts, assignment=torch.as_tensor(part_of), overwrite=True)
                report, (halo, fewest) = inspect(path), inspect_pairs(path)
            cut = report.num_cut_edges / edges.shape[1]
            print(
                f"{Path(name).stem:20} {parts:3} parts, few {objective:7} cut {cut:.3f}, rows {int(halo.sum()):8,}, "
                f"with partial sums {int(fewest.sum()):8,}, balance of edges {report.balance('num_edges'):.2f}",
                flush=True,
            )


def cpu_seconds() -> float:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_bytes() -> int:
    """The most resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_a_rank(path: str) -> None:
    """Load, and call a layer with the covers of its graph and without; rank 0 prints the figures of all."""
    comm, start = sp.connect(), cpu_seconds()
    graph = sp.load(path, comm, sp.Options(partial_sums=True, share_memory=False, backward="push"))
    x = graph.x.clone().requires_grad_()
    figures: dict[str, Any] = {"load": cpu_seconds() - start, "load_peak": peak_bytes()}
    start, none = cpu_seconds(), torch.zeros(0, dtype=torch.int64)
    minimum_cover(none, none, 0, 0)  # which loads SciPy
    figures["scipy"] = cpu_seconds() - start
    layer = sp.pyg.wrap(SAGEConv(graph.num_features, 16), comm)
    for call in ("first", "second"):
        start, began = cpu_seconds(), comm.bytes_sent
        layer(x, graph.edge_index)
        figures |= {call: cpu_seconds() - start, f"{call}_peak": peak_bytes(), "bytes": comm.bytes_sent - began}
    every = comm.all_gather_object(figures, "figures")
    if comm.rank == 0:
        print(json.dumps(every), flush=True)


def cost(num_edges: int, num_nodes: int) -> None:
    """Print what covers cost beside loading."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, num_nodes, num_edges)
        files = stream_edge_list(
            folder / "edges.npy", features=folder / "x.npy", labels=folder / "y.npy", num_nodes=num_nodes
        )
        start = time.monotonic()
        sp.partition(files, folder / "store", RANKS, "range")
        print(f"partitioned in {time.monotonic() - start:.0f} s", flush=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"]
        command += ["benchmarks.covers", "--rank", str(folder / "store")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    ranks = json.loads(done.stdout.splitlines()[-1])
    load, scipy, first, second = (sum(one[name] for one in ranks) for name in ("load", "scipy", "first", "second"))
    print(
        f"{num_edges:,} edges, {num_nodes:,} nodes, {RANKS} ranks, CPU s of all: load {load:.1f}, covers "
        f"{first - second:.1f} (and {scipy:.1f} to load SciPy), the forward of one layer {second:.1f}"
    )
    for name in ("load_peak", "first_peak", "second_peak"):
        print(f"{name}: {max(one[name] for one in ranks) / 2**20:,.0f} MiB")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", help="as of `benchmarks.graphs`, or .npz files")
    parser.add_argument("--edges", type=int)
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        on_a_rank(args.rank)
        return
    print(*(f"{name}: {value}" for name, value in machine().items()), sep="\n")
    for name in args.graphs:
        compare(name)
    if args.edges:
        cost(args.edges, args.nodes)


if __name__ == "__main__":
    main()
