"""Train within a memory budget below the size of the features: benchmarks/reports/out-of-core-YYYY-MM-DD.md and .json.

    python -m benchmarks.out_of_core

A GCN in float64 on a power-law graph, one rank, 10 epochs: plain PyG; ours with features in memory; with features
mapped from disk; with features mapped and saved tensors offloaded. Then the three of ours under a budget that the
kernel enforces (RLIMIT_DATA): only the one that offloads fits in.
`benchmarks/limited.py` says what is bounded and measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import shardpass as sp
from benchmarks.limited import ENVIRONMENT, SYSTEMS
from benchmarks.machine import REPORTS, machine
from shardpass.cli.graphs import powerlaw

MIB = 2**20
SYSTEM_NAMES = {
    "pyg": "PyG",
    "memory": "shardpass, in memory",
    "mapped": "shardpass, features mapped",
    "offload": "shardpass, features mapped, `sp.offload`",
}
BOUNDED = ("memory", "mapped", "offload")
TOLERANCE = 1e-9
Record = dict[str, Any]
_HEADER = ("system", "budget MiB", "peak MiB", "s/epoch", "CPU s/epoch", "last loss")


def write_graph(folder: Path, num_nodes: int, degree: int, features: int) -> Record:
    """Write the graph with float64 features, as arrays for PyG and as a store of one part for us; its sizes."""
    graph = powerlaw(num_nodes, degree, features)
    graph["x"] = graph["x"].astype(np.float64)
    for name in ("x", "y", "train_mask", "edge_index"):
        np.save(folder / f"{name}.npy", graph[name])
    sp.partition(graph, folder / "store", parts=1, method="range")
    size = {"nodes": num_nodes, "edges": int(graph["edge_index"].shape[1]), "features": features}
    return {**size, "classes": int(graph["y"].max()) + 1, "feature_bytes": int(graph["x"].nbytes)}


def run_child(config: Record) -> Record:
    """The config with what its process printed."""
    command = [sys.executable, "-m", "benchmarks.limited", json.dumps(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT},
        cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip
    if done.returncode != 0:
        if config.get("budget") is None:
            raise RuntimeError(f"{config['system']} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        return {**config, "failed": f"ended with {done.returncode}: {last}"}
    return {**config, **json.loads(done.stdout.splitlines()[-1])}


def measure(folder: Path, sizes: tuple[int, int, int], model: Record, share: float) -> Record:
    """All runs, those without a bound first; the budget is `share` of our peak in memory."""
    graph = write_graph(folder, *sizes)
    base = {**model, **graph, "folder": str(folder)}
    records = [run_child({**base, "system": system, "budget": None}) for system in SYSTEMS]
    budget = int(share * records[SYSTEMS.index("memory")]["peak_bytes"])
    records += [run_child({**base, "system": system, "budget": budget}) for system in BOUNDED]
    for record in records:
        del record["folder"]
    return {"graph": graph, "model": model, "budget": budget, "share": share, "records": records}


def difference(found: Record) -> float:
    """The largest relative difference of losses: within the budget against all in memory without one."""
    bounded, free = found["records"][-1], found["records"][SYSTEMS.index("memory")]
    if "failed" in bounded:
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(bounded["losses"], free["losses"], strict=True))


def findings(found: Record) -> list[str]:
    """One sentence per claim, with whether it holds."""
    records, budget, graph = found["records"], found["budget"], found["graph"]
    in_memory, last = records[SYSTEMS.index("memory")]["peak_bytes"], records[-1]
    is_small = budget < in_memory / 2 and budget < graph["feature_bytes"]
    trains = "failed" not in last and difference(found) <= TOLERANCE and last["written_bytes"] == 0
    others = all("failed" in record for record in records[len(SYSTEMS) : -1])
    say = {True: "**holds**", False: "**does NOT hold**"}
    offload = records[SYSTEMS.index("offload")]["peak_bytes"] / MIB
    return [
        f"The budget of {budget / MIB:.0f} MiB is below half of our peak in memory ({in_memory / MIB:.0f} MiB) and "
        f"below the size of the features ({graph['feature_bytes'] / MIB:.0f} MiB): {say[is_small]}.",
        f"Within it, with features mapped and saved tensors offloaded, {found['model']['epochs']} epochs end with the "
        f"losses of the run without a bound (largest relative difference {difference(found):.1e}, at most "
        f"{TOLERANCE}): {say[trains]}.",
        f"Without offloading, or with features in memory, the same run ends for lack of memory: {say[others]}.",
        f"With offloading, without a bound, it peaks at {offload:.0f} MiB.",
    ]


def row(record: Record) -> list[str]:
    """The cells of the table."""
    budget = "none" if record["budget"] is None else f"{record['budget'] / MIB:.0f}"
    name = SYSTEM_NAMES[record["system"]]
    if "failed" in record:
        return [name, budget, "out of memory", "", "", ""]
    figures = [f"{record[key]:.2f}" for key in ("wall_seconds", "cpu_seconds")]
    return [name, budget, f"{record['peak_bytes'] / MIB:.0f}", *figures, f"{record['losses'][-1]:.12f}"]


def markdown(found: Record) -> str:
    """The report."""
    graph, model, where = found["graph"], found["model"], found["machine"]
    lines = [f"# Larger than memory, {found['date']}", "", *(f"- {text}" for text in findings(found)), ""]
    lines += ["| " + " | ".join(_HEADER) + " |", "|" + "---|" * len(_HEADER)]
    lines += ["| " + " | ".join(row(record)) + " |" for record in found["records"]]
    lines += [
        "",
        f"Graph: power law, {graph['nodes']:,} nodes, {graph['edges']:,} directed edges, {graph['features']} float64 "
        f"features. Model: PyG's GCN, {model['layers']} layers of {model['hidden']}, BatchNorm, Adam, float64. One "
        f"rank, one computing thread.",
        "",
        "The peak is resident anonymous memory above that after the imports, so a graph and features in memory count;",
        "pages of the mapped file, which the kernel can drop at any time, do not. RLIMIT_DATA enforces the budget from",
        "before the graph is loaded. Seconds are medians of an epoch; the file of features may have been in the page",
        "cache, and then mapped features are read from memory. `benchmarks/limited.py` says more.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}. Python "
        f"{where['python']}, torch {where['torch']}, torch_geometric {where['torch_geometric']}, shardpass "
        f"{where['shardpass']}.",
        "",
        "Command: `python -m benchmarks.out_of_core`",
    ]
    return "\n".join(lines) + "\n"


def show(found: Record) -> None:
    """The table and the findings, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*_HEADER, title="Larger than memory")
    for record in found["records"]:
        table.add_row(*row(record), style="red" if "failed" in record else None)
    console = Console()
    console.print(table)
    for text in findings(found):
        console.print("- " + text.replace("**", ""))


def main() -> None:
    """Measure and write the report; exit code 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.37, help="the budget, as a share of our peak in memory")
    parser.add_argument("--scratch", type=Path, help="a folder on a disk; default: the system's temporary one")
    parser.add_argument("--output", type=Path, default=REPORTS)
    args = parser.parse_args()
    model = {name: getattr(args, name) for name in ("hidden", "layers", "epochs")}
    where = machine()
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        found = measure(Path(folder), (args.nodes, args.degree, args.features), model, args.share)
    found = {"date": datetime.date.today().isoformat(), "machine": where, **found}
    stem = args.output / f"out-of-core-{found['date']}"
    args.output.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(found))
    show(found)
    print(f"wrote {stem}.md and .json")
    raise SystemExit(any("NOT" in text for text in findings(found)))


if __name__ == "__main__":
    main()
