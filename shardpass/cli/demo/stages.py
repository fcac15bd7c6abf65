"""The two stages of the demo: the same result on a small real graph; less memory per rank on a larger one."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from shardpass.cli.console import bytes_text, output
from shardpass.cli.demo.child import Record, follow, losses, seconds_per_epoch
from shardpass.cli.graphs import Arrays, digits, powerlaw
from shardpass.cli.launch import find_program, launch_command, launcher_environment, typed_command
from shardpass.cli.memory import exact_allocator
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
class Both:
    """The records of the two programs of a stage."""

    plain: list[Record]
    sharded: list[Record]
    launcher: str


def run_demo(folder: Path, ranks: int, num_nodes: int) -> None:
    """Run both stages, print what they show, write ``demo.json`` and ``memory.png`` into `folder`."""
    for module, extra in (("torch_geometric", "pyg"), ("sklearn", "all"), ("matplotlib", "all"), ("pymetis", "metis")):
        require(module, extra, "shardpass demo")
    console, start = output(), perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    launcher = choose_launcher(console)
    console.print(f"[bold]Stage 1[/bold]: 1,797 handwritten digits, a 10-nearest-neighbour graph in {ranks} parts")
    first = _stage(_DIGITS, digits(), folder, ranks, launcher, console)
    console.print(comparison(first, ranks))
    console.print(f"[bold]Stage 2[/bold]: a power-law graph of {num_nodes:,} nodes; the same GAT, peak memory compared")
    graph = powerlaw(num_nodes)
    num_edges = int(graph["edge_index"].shape[1])
    second = _stage(_POWERLAW, graph, folder, ranks, launcher, console)
    console.print(comparison(second, ranks))
    from shardpass.cli.demo.chart import memory_chart

    chart = memory_chart(second.plain[-1], second.sharded[-1], num_nodes, num_edges, folder / "memory.png")
    numbers = _numbers({"digits": first, "powerlaw": second}, num_nodes, num_edges, ranks)
    (folder / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(_shown(first, second, ranks))
    console.print(f"Files: {folder / 'demo.json'} (all numbers), {chart} (peak memory), {folder}/*-parts (the graphs).")
    console.print(f"The whole demo took {perf_counter() - start:.0f} s. Next:")
    command, store = typed_command(), shlex.quote(str(folder / "digits-parts"))
    console.print(f"  {command} train {store} --model gat --ranks {min(2, ranks)}", markup=False, soft_wrap=True)
    console.print(f"  {command} doctor", markup=False, soft_wrap=True)


def choose_launcher(console: Console) -> str:
    """``"mpirun"`` if it and mpi4py are there, else ``"torchrun"``, which comes with torch; says which and why."""
    try:
        require("mpi4py", "mpi", "a run under mpirun")
    except MissingDependencyError:
        console.print("mpi4py is not installed, so the ranks run under torchrun (gloo) instead of mpirun")
        return "torchrun"
    if not (find_program("mpirun") or find_program("mpiexec")):
        console.print("there is no mpirun here, so the ranks run under torchrun (gloo) instead")
        return "torchrun"
    return "mpirun"


def _stage(setup: Setup, graph: Arrays, folder: Path, ranks: int, launcher: str, console: Console) -> Both:
    file, store = folder / f"{setup.name}.npz", folder / f"{setup.name}-parts"
    np.savez(file, **graph)
    with console.status("  partitioning with METIS"):
        partition(graph, store, ranks, "metis", overwrite=store.exists())
    words = [str(word) for word in (setup.hidden, setup.heads, setup.epochs, setup.lr)]
    env = {**os.environ, **exact_allocator(), "OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1))}
    title, script = "plain PyG, one process", Path(__file__).with_name("plain_pyg.py")
    plain = follow([sys.executable, str(script), str(file), *words], env, title, setup.epochs, console)
    command = launch_command(launcher, ranks, "shardpass.cli")
    assert command is not None
    arguments = [
        "train", str(store), "--model", "gat", "--hidden", words[0], "--heads", words[1], "--epochs", words[2],
        "--lr", words[3], "--eval-every", words[2], "--events",
    ]  # fmt: skip
    env = {**launcher_environment(), **exact_allocator()}
    title = f"shardpass, {ranks} ranks ({launcher})"
    sharded = follow([*command, *arguments], env, title, setup.epochs, console)
    file.unlink()
    return Both(plain, sharded, launcher)


def comparison(both: Both, ranks: int) -> Table:
    """The two programs of a stage side by side."""
    table = Table()
    table.add_column("")
    table.add_column("plain PyG, 1 process", justify="right")
    table.add_column(f"shardpass, {ranks} ranks ({both.launcher})", justify="right")
    sides = (both.plain, both.sharded)
    table.add_row("test accuracy", *(f"{side[-1]['test']:.4f}" for side in sides))
    table.add_row("loss, first epoch", *(f"{losses(side)[0]:.6f}" for side in sides))
    table.add_row("loss, last epoch", *(f"{losses(side)[-1]:.6f}" for side in sides))
    table.add_row("seconds per epoch (training)", *(f"{seconds_per_epoch(side):.2f}" for side in sides))
    peaks = (_peak(both.plain), "the largest " + _peak(both.sharded))
    table.add_row("peak memory above the loaded graph", *peaks)
    table.add_row("the same, all processes together", *(_peak(side, sum) for side in sides))
    return table


def _peak(records: list[Record], of: Callable[[list[int]], int] = max) -> str:
    peaks = records[-1]["peak_bytes"]
    return bytes_text(of(peaks)) if peaks else "unknown here"


def _shown(first: Both, second: Both, ranks: int) -> str:
    gap = max(abs(a - b) for a, b in zip(losses(first.plain), losses(first.sharded)))
    text = f"Shown: an unmodified GAT gives the same losses in one process and on {ranks} ranks (largest gap {gap:.1e})"
    plain, sharded = second.plain[-1]["peak_bytes"], second.sharded[-1]["peak_bytes"]
    if plain and sharded:
        largest, together = max(sharded) / max(1, *plain), sum(sharded) / max(1, *plain)
        text += (
            f".\nOn the larger graph, peak memory relative to plain PyG: all {ranks} ranks together {together:.2f} "
            f"(messages are made in chunks), the largest rank {largest:.2f} (and ranks share the graph)"
        )
    slower = seconds_per_epoch(second.sharded) / seconds_per_epoch(second.plain)
    return f"{text}.\nTime of an epoch relative to plain PyG there: {slower:.1f}, on {os.cpu_count()} cores."


def _numbers(stages: dict[str, Both], num_nodes: int, num_edges: int, ranks: int) -> dict[str, Any]:
    import torch
    import torch_geometric

    versions = {"python": platform.python_version(), "torch": torch.__version__, "pyg": torch_geometric.__version__}
    return {
        "versions": versions,
        "cores": os.cpu_count(),
        "ranks": ranks,
        "powerlaw": {"nodes": num_nodes, "edges": num_edges},
        "stages": {
            name: {"launcher": both.launcher, "plain": both.plain, "sharded": both.sharded}
            for name, both in stages.items()
        },
    }
