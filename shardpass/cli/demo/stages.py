"""The two stages of the demo: less memory on a larger graph, then the same result on a small real one."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
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

_HIDDEN, _HEADS = "64", "8"  # of the GAT that both programs of both stages train


def run_demo(folder: Path, ranks: int, num_nodes: int) -> None:
    """Run both stages, print what they show, and draw it into ``demo.png`` in `folder`."""
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
    large = _run_stage(folder / "powerlaw", graph, 3, 0.01, ranks, launcher, console)
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
    small = _run_stage(folder / "digits", digits(), 30, 0.02, ranks, launcher, console)
    console.print(
        small.table(has_learnt=True),
        f"Results: losses of one process and of {ranks} ranks differ by {small.gap:.0e} at most, in float32.\n"
        f"Fixed cost: of these {bytes_text(max(small.sharded.peaks))} per rank, nearly all is code, compiled loops and "
        f"buffers, which do not grow with the graph. So a graph as tiny as this one gains nothing from ranks.",
    )
    draw(large, small, f"{num_nodes:,} nodes, {num_edges / 1e6:.1f} M edges", folder / "demo.png")
    console.print(f"Files: {folder}/demo.png (a chart), *-parts (the graphs).")
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


def _run_stage(name: Path, graph: Arrays, epochs: int, lr: float, ranks: int, launcher: str, console: Console) -> Stage:
    file, store = name.with_suffix(".npz"), name.with_name(f"{name.name}-parts")
    np.savez(file, **graph)
    console.print(f"  cutting the graph into {ranks} parts with KaMinPar")
    partition(graph, store, ranks, overwrite=store.exists())
    env = {**os.environ, **exact_allocator(), "OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1))}
    script = [sys.executable, str(Path(__file__).with_name("plain_pyg.py")), str(file)]
    plain = follow([*script, _HIDDEN, _HEADS, str(epochs), str(lr)], env, "plain PyG, one process", epochs, console)
    command = launch_command(launcher, ranks, "shardpass.cli")
    assert command is not None
    command += [
        "train", str(store), "--model", "gat", "--hidden", _HIDDEN, "--heads", _HEADS, "--epochs", str(epochs),
        "--lr", str(lr), "--eval-every", str(epochs), "--log-file", "-",
    ]  # fmt: skip
    env = {**launcher_environment(), **exact_allocator()}
    sharded = follow(command, env, f"shardpass, {ranks} ranks ({launcher})", epochs, console)
    file.unlink()
    return Stage(Program(plain), Program(sharded), launcher)
