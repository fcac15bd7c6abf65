"""The two stages of the demo: less memory on a larger graph, then the same result on a small real one."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console

from shardpass.cli.console import output
from shardpass.cli.demo.chart import draw
from shardpass.cli.demo.program import Program, Stage, follow
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


_POWERLAW = Setup("powerlaw", 64, 8, 3, 0.01)
_DIGITS = Setup("digits", 64, 8, 30, 0.02)


def run_demo(folder: Path, ranks: int, num_nodes: int) -> None:
    """Run both stages, print what they show, write ``demo.json`` and ``demo.png`` into `folder`."""
    for module in ("torch_geometric", "sklearn", "matplotlib", "kaminpar"):
        require(module, "all", "shardpass demo")
    console, start = output(), perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    launcher = choose_launcher(console)
    console.print(
        f"This takes one to two minutes on two quiet cores. Both programs train PyG's own GAT on the whole graph; peak "
        f"memory is above the loaded graph.\n[bold]1 of 2, memory[/bold]: a power-law graph of {num_nodes:,} nodes"
    )
    graph = powerlaw(num_nodes)
    num_edges = int(graph["edge_index"].shape[1])
    large = _run_stage(_POWERLAW, graph, folder, ranks, launcher, console)
    (plain,), peaks = large.plain.peaks, large.sharded.peaks
    console.print(
        large.table(has_learnt=False),
        f"Memory: a rank needs {bytes_text(max(peaks))} where plain PyG needs {bytes_text(plain)}, "
        f"{max(1, plain) / max(1, max(peaks)):.1f} times as much; all {ranks} ranks together need "
        f"{bytes_text(sum(peaks))}. Messages are made in chunks, and ranks share the graph.\n"
        f"Time: an epoch takes {large.sharded.seconds / large.plain.seconds:.1f} times as long as plain PyG's, on "
        f"{os.cpu_count()} cores. Losses: the largest gap is {large.gap:.0e}.",
    )
    console.print("[bold]2 of 2, the same result[/bold]: 1,797 handwritten digits, each with its 10 nearest neighbours")
    small = _run_stage(_DIGITS, digits(), folder, ranks, launcher, console)
    console.print(
        small.table(has_learnt=True),
        f"Results: losses of one process and of {ranks} ranks differ by {small.gap:.0e} at most, in float32.\n"
        f"Fixed cost: of these {bytes_text(max(small.sharded.peaks))} per rank, nearly all is code, compiled loops and "
        f"buffers, which do not grow with the graph. So a graph as tiny as this one gains nothing from ranks.",
    )
    draw(large, small, f"{num_nodes:,} nodes, {num_edges / 1e6:.1f} M edges", folder / "demo.png")
    _write({"powerlaw": large, "digits": small}, num_nodes, num_edges, ranks, folder / "demo.json")
    console.print(f"Files: {folder}/demo.png (a chart), demo.json (all numbers), *-parts (the graphs).")
    console.print(f"The whole demo took {perf_counter() - start:.0f} s. Next:")
    command, store = typed_command(), shlex.quote(str(folder / "digits-parts"))
    console.print(f"  {command} train {store} --model gat --ranks {min(2, ranks)}", markup=False, soft_wrap=True)
    console.print(f"  {command} new train.py", markup=False, soft_wrap=True)


def choose_launcher(console: Console) -> str:
    """``"mpirun"`` if it and mpi4py are there, else ``"torchrun"``, which comes with torch; says why."""
    reason = ""
    try:
        require("mpi4py", "mpi", "a run under mpirun")
    except MissingDependencyError:
        reason = "mpi4py is not installed"
    if not find_program("mpirun", "mpiexec"):
        reason = reason or "there is no mpirun here"
    if not reason:
        return "mpirun"
    console.print(f"{reason}, so the ranks run under torchrun (gloo) instead of mpirun")
    return "torchrun"


def _run_stage(setup: Setup, graph: Arrays, folder: Path, ranks: int, launcher: str, console: Console) -> Stage:
    file, store = folder / f"{setup.name}.npz", folder / f"{setup.name}-parts"
    np.savez(file, **graph)
    console.print(f"  cutting the graph into {ranks} parts with KaMinPar")
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
