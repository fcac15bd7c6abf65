"""Measure one configuration, or several: CPU seconds per epoch, peak memory and bytes sent per rank.

    python -m benchmarks.run --graph 20k150 --model gat --ranks 1 2 4 --backend mpi --peer pyg

Each configuration runs in fresh processes with one computing thread per rank, twice: once for memory, once for time
(see benchmarks/meter.py for why). All of them, plain PyG and DGL too, may use huge pages for large tensors
(shardpass.backends.CHEAP_TENSORS), unless a configuration says otherwise: without, page faults of fresh tensors are up
to a third of an epoch's CPU seconds. Prints a table; ``--json FILE`` appends one JSON line per configuration.
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
from shardpass.backends import CHEAP_TENSORS
from shardpass.cli.launch import launch_command, launcher_environment
from shardpass.cli.memory import exact_allocator
from shardpass.data import partition

Record = dict[str, Any]
MIB = 2**20
_TIME = ("cpu_seconds", "wall_seconds")
_MEMORY_EPOCHS = 3  # what an epoch needs, the second shows as well as the tenth
_REPOSITORY = Path(__file__).resolve().parent.parent


class Bench:
    """Makes graphs and stores once, in a folder, and runs configurations on them."""

    def __init__(self, folder: Path, method: str = "random") -> None:
        self.folder, self.method = folder, method

    def files(self, graph: str, parts: int) -> tuple[Path, Path]:
        """The .npz and the store of a graph, made if they are not there yet."""
        stem = graph.replace(":", "-") if not graph.endswith(".npz") else Path(graph).stem
        npz, store = self.folder / f"{stem}.npz", self.folder / f"{stem}-{self.method}-{parts}"
        if not npz.exists():
            arrays = make_graph(graph)
            np.savez(npz, **{name: arrays[name] for name in ("edge_index", "x", "y", "train_mask")})
        if not store.exists():
            partition(npz, store, parts, self.method)
        return npz, store

    def measure(self, config: Record, parts: int = 4, what: tuple[str, ...] = ("memory", "time")) -> Record:
        """The record of a configuration: its own fields, what was measured (`ranks`: of each rank), and `world`.

        Args:
            config: graph, model, ranks, mode, backend, epochs, peer; frontend ("pyg" unless given), checkpoint,
                huge_pages (True unless given).
            parts: of the store; at least the number of ranks.
            what: "memory" and "time" take one run each; without "time" CPU seconds are absent.
        """
        npz, store = self.files(config["graph"], parts)
        config = {**config, "npz": str(npz), "store": str(store)}
        env = {"memory": exact_allocator(), "time": {}}
        epochs = {"memory": min(config["epochs"], _MEMORY_EPOCHS), "time": config["epochs"]}
        found = {kind: _child({**config, "epochs": epochs[kind]}, env[kind]) for kind in what}
        result = found.get("memory") or found["time"]
        result["losses"] = (found.get("time") or result)["losses"]
        for rank, figures in enumerate(result["ranks"]):
            for name in _TIME:
                figures.pop(name) if "time" not in found else figures.update({name: found["time"]["ranks"][rank][name]})
            if "memory" not in found:
                for name in [name for name in figures if name.endswith("bytes") and name != "bytes_sent"]:
                    figures.pop(name)
        return {
            **{key: value for key, value in config.items() if key not in ("npz", "store")},
            **result,
            "world": config["ranks"],
        }


def huge_pages(enabled: bool) -> dict[str, str]:
    """The environment in which fresh tensors are cheap, with huge pages for large ones, or not."""
    return CHEAP_TENSORS if enabled else {"THP_MEM_ALLOC_ENABLE": "0"}


def _child(config: Record, env: dict[str, str]) -> Record:
    under_mpi = config["backend"] == "mpi" and config["peer"] is None and config["ranks"] > 1
    command = launch_command("mpirun" if under_mpi else "none", config["ranks"], "benchmarks.worker")
    if command is None:
        raise SystemExit("there is no mpirun: use --backend processes")
    env = {
        **launcher_environment(),
        **huge_pages(config.get("huge_pages", True)),
        "PYTHONPATH": str(_REPOSITORY),
        **env,
    }
    run = subprocess.run([*command, json.dumps(config)], env=env, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise SystemExit(f"{config} failed with exit code {run.returncode}:\n{run.stderr[-3000:]}")
    found: Record = json.loads(lines[-1])
    return found


def table(records: list[Record]) -> Table:
    """The records, one row each; memory in MiB, the largest rank's."""
    out = Table()
    for title in ("graph", "model", "system"):
        out.add_column(title)
    for title in (
        "W",
        "CPU s/epoch (all) in s",
        "peak MiB/rank",
        "kept",
        "transient",
        "MB sent/epoch (all)",
        "last loss",
    ):
        out.add_column(title, justify="right")
    for record in records:
        out.add_row(*row(record))
    return out


def row(record: Record) -> list[str]:
    """One record as text."""
    ranks = record["ranks"]
    peers = {"pyg": "PyG, one process", "dgl": "DGL, one process"}
    shared = "" if record.get("share_memory", True) else ", messages"
    shared += ", sp.shard" if record.get("in_memory") else ""
    shared += "" if record.get("huge_pages", True) else ", small pages"
    mode = record["mode"] + (f", checkpoint={record['checkpoint']}" if record.get("checkpoint") else "")
    own = f"shardpass{'.dgl' if record.get('frontend') == 'dgl' else ''} {mode} ({record['backend']}{shared})"
    system = peers[record["peer"]] if record["peer"] else own
    cpu = "-"
    if "cpu_seconds" in ranks[0]:
        cpu = f"{sum(r['cpu_seconds'] for r in ranks):.2f} in {max(r['wall_seconds'] for r in ranks):.2f} s"
    memory = [
        f"{max(rank[name] for rank in ranks) / MIB:.1f}" if name in ranks[0] else "-"
        for name in ("peak_bytes", "kept_bytes", "transient_bytes")
    ]
    sent = f"{sum(rank['bytes_sent'] for rank in ranks) / 1e6:.0f}"
    edges = f"{record['graph']} ({record['num_edges'] / 1e6:.2f} M edges)"
    return [edges, record["model"], system, str(len(ranks)), cpu, *memory, sent, f"{record['losses'][-1]:.6f}"]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="50k30", help=KINDS)
    parser.add_argument("--model", choices=("sage", "gat", "gcn", "gin"), default="sage")
    parser.add_argument("--frontend", choices=("pyg", "dgl"), default="pyg", help="whose model shardpass runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--mode", choices=("sar", "keep", "halo"), default="sar")
    parser.add_argument("--backward", choices=("auto", "push", "pull"), default="auto")
    parser.add_argument("--backend", choices=("processes", "mpi"), default="processes")
    parser.add_argument("--partition", choices=("random", "metis", "range"), default="random")
    parser.add_argument("--no-share", action="store_true", help="rows travel as messages, not in shared memory")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--measure", choices=("memory", "time", "both"), default="both")
    parser.add_argument(
        "--peer", choices=("pyg", "dgl"), nargs="+", default=[], help="measure these too, in one process"
    )
    parser.add_argument("--checkpoint", choices=("activations",), help="as in shardpass.pyg.wrap")
    parser.add_argument("--json", type=Path, help="append one JSON line per configuration to this file")
    parser.add_argument("--folder", type=Path, help="where graphs are kept between calls (default: a temporary one)")
    args = parser.parse_args()
    what = ("memory", "time") if args.measure == "both" else (args.measure,)
    names = ("graph", "model", "mode", "backward", "checkpoint", "backend", "epochs")
    base = {**{name: getattr(args, name) for name in names}, "share_memory": not args.no_share}
    configs = [{**base, "ranks": ranks, "peer": None, "frontend": args.frontend} for ranks in args.ranks]
    configs += [{**base, "ranks": 1, "peer": peer} for peer in args.peer]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.folder or Path(scratch), args.partition)
        bench.folder.mkdir(parents=True, exist_ok=True)
        records = []
        for config in configs:
            print(f"measuring {config} ...", file=sys.stderr, flush=True)
            records.append(bench.measure(config, max(args.ranks), what))
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(records[-1]) + os.linesep)
    Console(width=None if sys.stdout.isatty() else 160).print(table(records))


if __name__ == "__main__":
    main()
