"""The two stages of the demo: the same result on a small real graph, and less memory per rank on a larger one."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from shardpass.cli.console import output
from shardpass.cli.demo.child import Record, follow
from shardpass.cli.graphs import Arrays, digits, powerlaw
from shardpass.cli.launch import find_program, launch_command, launcher_environment, typed_command
from shardpass.cli.memory import exact_allocator
from shardpass.core.ranks import bytes_text
from shardpass.data import partition
from shardpass.errors import MissingDependencyError, require


@dataclass(frozen=True)
class Setup:
    """What a stage trains: the same GAT in both programs."""

    name: str
    hidden: int
    heads: int
    epochs: int
    lr: float


_DIGITS = Setup("digits", 64, 8, 60, 0.01)
_POWERLAW = Setup("powerlaw", 64, 8, 4, 0.01)


@dataclass(frozen=True)
class Program:
    """What one of the two programs of a stage printed."""

    records: list[Record]

    @property
    def losses(self) -> list[float]:
        """The loss of every epoch."""
        return [record["loss"] for record in self.records if record["event"] == "epoch"]

    @property
    def seconds(self) -> float:
        """The median seconds of a training step (forward, backward, update)."""
        return statistics.median_high(r["seconds"] for r in self.records if r["event"] == "epoch")

    @property
    def peaks(self) -> list[int]:
        """Bytes of each process at its peak, above the loaded graph."""
        found: list[int] = self.records[-1]["peak_bytes"]
        return found


@dataclass(frozen=True)
class Stage:
    """The two programs of a stage."""

    plain: Program
    sharded: Program
    launcher: str

    def table(self, ranks: int) -> Table:
        """The two programs side by side."""
        table = Table()
        for title in ("", "plain PyG, 1 process", f"shardpass, {ranks} ranks ({self.launcher})"):
            table.add_column(title, justify="right" if title else "left")
        sides = (self.plain, self.sharded)
        table.add_row("test accuracy", *(f"{side.records[-1]['test']:.4f}" for side in sides))
        table.add_row("loss, first epoch", *(f"{side.losses[0]:.6f}" for side in sides))
        table.add_row("loss, last epoch", *(f"{side.losses[-1]:.6f}" for side in sides))
        table.add_row("seconds per epoch (training)", *(f"{side.seconds:.2f}" for side in sides))
        largest = (bytes_text(max(self.plain.peaks)), f"the largest {bytes_text(max(self.sharded.peaks))}")
        table.add_row("peak memory above the loaded graph", *largest)
        table.add_row("the same, all processes together", *(bytes_text(sum(side.peaks)) for side in sides))
        return table


def run_demo(folder: Path, ranks: int, num_nodes: int) -> None:
    """Run both stages, print what they show, write ``demo.json`` and ``memory.png`` into `folder`."""
    for module, extra in (
        ("torch_geometric", "pyg"),
        ("sklearn", "all"),
        ("matplotlib", "all"),
        ("kaminpar", "kaminpar"),
    ):
        require(module, extra, "shardpass demo")
    console, start = output(), perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    launcher = choose_launcher(console)
    console.print(f"[bold]Stage 1[/bold]: 1,797 handwritten digits, a 10-nearest-neighbour graph in {ranks} parts")
    first = _run_stage(_DIGITS, digits(), folder, ranks, launcher, console)
    console.print(first.table(ranks))
    console.print(f"[bold]Stage 2[/bold]: a power-law graph of {num_nodes:,} nodes; the same GAT, peak memory compared")
    graph = powerlaw(num_nodes)
    num_edges = int(graph["edge_index"].shape[1])
    second = _run_stage(_POWERLAW, graph, folder, ranks, launcher, console)
    console.print(second.table(ranks))
    _draw(second, num_nodes, num_edges, folder / "memory.png")
    _write({"digits": first, "powerlaw": second}, num_nodes, num_edges, ranks, folder / "demo.json")
    console.print(_shown(first, second, ranks))
    console.print(f"Files: {folder}/demo.json (all numbers), memory.png (peak memory), *-parts (the graphs).")
    console.print(f"The whole demo took {perf_counter() - start:.0f} s. Next:")
    command, store = typed_command(), shlex.quote(str(folder / "digits-parts"))
    console.print(f"  {command} train {store} --model gat --ranks {min(2, ranks)}", markup=False, soft_wrap=True)
    console.print(f"  {command} doctor", markup=False, soft_wrap=True)


def choose_launcher(console: Console) -> str:
    """``"mpirun"`` if it and mpi4py are there, else ``"torchrun"``, which comes with torch; says why."""
    reason = ""
    try:
        require("mpi4py", "mpi", "a run under mpirun")
    except MissingDependencyError:
        reason = "mpi4py is not installed"
    if not (find_program("mpirun") or find_program("mpiexec")):
        reason = reason or "there is no mpirun here"
    if not reason:
        return "mpirun"
    console.print(f"{reason}, so the ranks run under torchrun (gloo) instead of mpirun")
    return "torchrun"


def _run_stage(setup: Setup, graph: Arrays, folder: Path, ranks: int, launcher: str, console: Console) -> Stage:
    file, store = folder / f"{setup.name}.npz", folder / f"{setup.name}-parts"
    np.savez(file, **graph)
    with console.status("  partitioning with KaMinPar"):
        partition(graph, store, ranks, overwrite=store.exists())
    words = [str(word) for word in (setup.hidden, setup.heads, setup.epochs, setup.lr)]
    env = {**os.environ, **exact_allocator(), "OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1))}
    title, script = "plain PyG, one process", Path(__file__).with_name("plain_pyg.py")
    plain = follow([sys.executable, str(script), str(file), *words], env, title, setup.epochs, console)
    command = launch_command(launcher, ranks, "shardpass.cli")
    assert command is not None
    arguments = [
        "train", str(store), "--model", "gat", "--hidden", words[0], "--heads", words[1], "--epochs", words[2],
        "--lr", words[3], "--eval-every", words[2], "--log-file", "-",
    ]  # fmt: skip
    env = {**launcher_environment(), **exact_allocator()}
    title = f"shardpass, {ranks} ranks ({launcher})"
    sharded = follow([*command, *arguments], env, title, setup.epochs, console)
    file.unlink()
    return Stage(Program(plain), Program(sharded), launcher)


def _shown(first: Stage, second: Stage, ranks: int) -> str:
    gap = max(abs(a - b) for a, b in zip(first.plain.losses, first.sharded.losses))
    text = f"Shown: an unmodified GAT gives the same losses in one process and on {ranks} ranks (largest gap {gap:.1e})"
    (plain,), sharded = second.plain.peaks, second.sharded.peaks
    slower = second.sharded.seconds / second.plain.seconds
    return (
        f"{text}.\nOn the larger graph, peak memory relative to plain PyG: all {ranks} ranks together "
        f"{sum(sharded) / max(1, plain):.2f} (messages are made in chunks), the largest rank "
        f"{max(sharded) / max(1, plain):.2f} (and ranks share the graph).\n"
        f"Time of an epoch relative to plain PyG there: {slower:.1f}, on {os.cpu_count()} cores."
    )


def _draw(stage: Stage, num_nodes: int, num_edges: int, path: Path) -> None:
    """Write a bar chart of peak memory: one bar for plain PyG, one per rank."""
    from matplotlib.figure import Figure

    plain, sharded = stage.plain.peaks, stage.sharded.peaks
    names = ["plain PyG\n1 process" for _ in plain] + [
        f"rank {rank}\nof {len(sharded)}" for rank in range(len(sharded))
    ]
    colours = ["tab:gray"] * len(plain) + ["tab:blue"] * len(sharded)
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.bar(names, [peak / 2**20 for peak in (*plain, *sharded)], color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_ylabel("peak memory above the\nloaded graph (MiB)")
    axes.set_title(f"Full-graph GAT, {num_nodes:,} nodes, {num_edges / 1e6:.1f} M edges", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _write(stages: dict[str, Stage], num_nodes: int, num_edges: int, ranks: int, path: Path) -> None:
    """Write all numbers as JSON."""
    import torch_geometric

    versions = {"python": platform.python_version(), "torch": torch.__version__, "pyg": torch_geometric.__version__}
    found = {
        name: {"launcher": stage.launcher, "plain": stage.plain.records, "sharded": stage.sharded.records}
        for name, stage in stages.items()
    }
    size = {"nodes": num_nodes, "edges": num_edges}
    numbers = {"versions": versions, "cores": os.cpu_count(), "ranks": ranks, "powerlaw": size, "stages": found}
    path.write_text(json.dumps(numbers, indent=1) + "\n")
