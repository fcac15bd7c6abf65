"""Compare partitioners: edges cut, balance, CPU seconds and peak memory.

    python -m benchmarks.partitioning --graph 50k30 community:100000:20 cora.npz --parts 8

Each method partitions the same edge list, an .npy file, in a process of its own with one computing thread. "cut": edges
whose ends are in different parts. "halo": rows that all parts together fetch in one layer, per node. "balance": the
heaviest part over the mean, of nodes, of edges, of the bytes that are planned for them (there are no features here;
partitioners balance this), and of the bytes of the store, which has halo rows, too. CPU seconds
are those of the whole `partition`, the store included. Peak memory is above what the imported libraries need, and
without KaMinPar's own process. ``--json FILE`` appends one JSON line per row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.graphs import KINDS, make_graph
from shardpass.cli.memory import PeakMeter, exact_allocator

METHODS = ("random", "metis", "kaminpar")
_REPOSITORY = Path(__file__).resolve().parent.parent
Record = dict[str, Any]


def measure(edges: Path, num_nodes: int, store: Path, method: str, parts: int, options: Record) -> Record:
    """One partition, in this process: what is said of the columns above."""
    import torch

    from shardpass.backends.connect import connect
    from shardpass.data import EDGE, NODE, inspect, partition, stream_edge_list
    from shardpass.data.partitioners import assign
    from shardpass.data.streaming.adjacency import EDGE_BYTES, NODE_BYTES

    torch.set_num_threads(1)
    warm = {"edge_index": [[0, 1, 2], [1, 2, 3]], "num_nodes": 4}
    from shardpass.data import read

    assign(read(warm), 2, method)  # packages are imported
    meter, start = PeakMeter(), _cpu_seconds()
    partition(stream_edge_list(edges, num_nodes=num_nodes), store, parts, method, **options)
    seconds, peak = _cpu_seconds() - start, meter.peak(connect("local"))
    report = inspect(store, parts)
    planned = [group.nodes[NODE] * NODE_BYTES + group.edges[EDGE] * EDGE_BYTES for group in report.groups]
    total = sum(report.manifest.num_edges.values())
    return {
        "nodes": report.manifest.num_nodes[NODE], "edges": total, "cut": report.num_cut_edges / max(1, total),
        "halo": report.num_halo_rows / num_nodes, "node_balance": report.balance("num_nodes"),
        "edge_balance": report.balance("num_edges"), "byte_balance": report.balance("num_bytes"),
        "planned_balance": max(planned) * len(planned) / sum(planned),
        "cpu_seconds": seconds, "peak_bytes": peak,
    }  # fmt: skip


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def compare(graph: str, methods: list[str], parts: int, options: Record, folder: Path) -> list[Record]:
    """One record per method, each from a fresh process."""
    arrays = make_graph(graph)
    edges = arrays["edge_index"]
    num_nodes = len(arrays["x"]) if "x" in arrays else int(arrays["x_shape"][0])
    np.save(folder / "edges.npy", edges.astype(np.int64))
    records = []
    for method in methods:
        print(f"{graph}: {method} ...", file=sys.stderr, flush=True)
        config = [str(folder / "edges.npy"), num_nodes, str(folder / f"store-{method}"), method, parts, options]
        command = [sys.executable, "-m", "benchmarks.partitioning", "--child", json.dumps(config)]
        env = {**os.environ, **exact_allocator(), "PYTHONPATH": str(_REPOSITORY)}
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"{graph}: {method} failed with exit code {run.returncode}:\n{run.stderr[-3000:]}")
        name = Path(graph).stem if graph.endswith(".npz") else graph
        records.append({"graph": name, "method": method, "parts": parts, **json.loads(run.stdout.splitlines()[-1])})
    return records


def table(records: list[Record]) -> Table:
    """The records, one row each; memory in MiB."""
    out = Table()
    for title in ("graph", "method"):
        out.add_column(title)
    balances = ("balance nodes", "balance edges", "balance planned", "balance store")
    for title in ("cut", "halo rows/node", *balances, "CPU s", "peak MiB"):
        out.add_column(title, justify="right")
    for r in records:
        figures = (r["halo"], r["node_balance"], r["edge_balance"], r["planned_balance"], r["byte_balance"])
        out.add_row(
            f"{r['graph']} ({r['edges'] / 1e6:.2f} M edges)", r["method"], f"{r['cut']:.1%}",
            *(f"{figure:.2f}" for figure in figures), f"{r['cpu_seconds']:.1f}", f"{r['peak_bytes'] / 2**20:.0f}",
        )  # fmt: skip
    return out


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", nargs="+", default=["50k30", "community:100000:20"], help=KINDS)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of kaminpar")
    parser.add_argument("--memory", type=float, help="MiB for edges")
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        edges, num_nodes, store, method, parts, options = json.loads(args.child)
        print(json.dumps(measure(Path(edges), num_nodes, Path(store), method, parts, options)))
        return
    options: Record = {"threads": args.threads}
    if args.memory is not None:
        options["memory_bytes"] = int(args.memory * 2**20)
    records = []
    for graph in args.graph:
        with tempfile.TemporaryDirectory() as folder:
            records += compare(graph, args.method, args.parts, options, Path(folder))
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    Console(width=None if sys.stdout.isatty() else 130).print(table(records))


if __name__ == "__main__":
    main()
