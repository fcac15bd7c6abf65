"""One simulated run of a seed: its program, its transport, its fault, and what is wrong with how it ended."""

import random
import shutil
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .faults import Fault, Injector, Operations, disk, fault_of
from .programs import RUNS, Program, Work, program_of
from .transport import SimulatedCommunicator
from .verdict import judge
from .world import Policy, Process, World

TIMEOUT = 60.0
NUM_PROGRAMS = (24, 96)  # the default tests use the first ones, since each needs a reference
DEFAULT_SEEDS = 500
_ON_DISK = ("checkpoint", "infer")
_FOLDERS = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@dataclass
class Undisturbed:
    """What a program gives if nothing goes wrong.

    Attributes:
        results: by rank.
        output: the file that it writes, or `None`.
        counts: by rank, how many points of each kind there are.
    """

    results: list[dict[str, Tensor]]
    output: np.ndarray | None
    counts: list[Counter[str]]


@dataclass
class Run:
    """A run that has ended."""

    seed: int
    program: Program
    policy: Policy
    fault: Fault
    world: World
    happened: float | None
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        program = self.program
        return (
            f"seed {self.seed}: {program.kind} on {program.ranks} ranks ({program.graph}, {program.spread}, "
            f"{'+'.join(program.layers)}, {program.options.mode}), {self.fault}"
        )


def policy_of(draw: random.Random) -> Policy:
    """A transport."""
    return Policy(
        rendezvous=draw.choice((0.0, 0.5, 1.0)),
        latency=draw.choice(((1e-5,), (1e-5, 1e-3, 0.1), (1e-3,), (0.01, 1.0))),
        polls=draw.random() < 0.3,
        shares_memory=draw.random() < 0.15,
        is_direct=draw.random() < 0.5,
    )


def run_program(program: Program, world: World, folder: Path, injector: Injector, counts_ops: bool = False) -> None:
    """Run a program in a world."""
    injector.world, world.on_point = world, injector.at

    def rank(comm: Any, process: Process) -> dict[str, Tensor]:
        fault = injector.fault
        is_watched = counts_ops or (fault.point == "op" and fault.rank == process.rank)
        work = Work(
            program,
            folder,
            lambda: world.point(process, "user"),
            lambda call: injector.strays(process, call),
        )
        with Operations(world, process) if is_watched else nullcontext():
            return RUNS[program.kind](comm, work)

    with disk(world) if program.kind in _ON_DISK else nullcontext():
        world.run(rank, SimulatedCommunicator)


@cache
def undisturbed(number: int) -> Undisturbed:
    """The reference of a program."""
    program = program_of(number)
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS))
    try:
        world = World(program.ranks, 0, Policy(0.0, (1e-6,)), TIMEOUT * program.length)
        run_program(program, world, folder, Injector(Fault()), counts_ops=True)
        for process in world.processes:
            if process.error is not None:
                raise process.error
        assert not world.problems, world.problems
        return Undisturbed(
            [process.result for process in world.processes],
            output_of(folder),
            [process.counts for process in world.processes],
        )
    finally:
        shutil.rmtree(folder)


def output_of(folder: Path) -> np.ndarray | None:
    """What an inference has written."""
    return np.load(folder / "out.npy") if (folder / "out.npy").exists() else None


def simulate(
    seed: int,
    trace: list[str] | None = None,
    policy: Policy | None = None,
    fault: Fault | None = None,
    number: int | None = None,
    is_direct: bool | None = None,
) -> Run:
    """Run a seed, and say what is wrong with how it ended.

    Args:
        seed: chooses everything.
        trace: is given a line for each step.
        policy, fault, number: of the program; instead of those that the seed chooses.
        is_direct: whether messages go without tags, in order, as between devices; instead of what the policy says.
    """
    draw = random.Random(seed)
    drawn = draw.randrange(NUM_PROGRAMS[seed >= DEFAULT_SEEDS])
    program = program_of(drawn if number is None else number)
    right = undisturbed(program.number)
    policy_drawn, fault_drawn = policy_of(draw), fault_of(draw, program.kind, right.counts, TIMEOUT * program.length)
    policy, fault = policy or policy_drawn, fault or fault_drawn
    policy = policy if is_direct is None else replace(policy, is_direct=is_direct)
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS)) if program.kind in _ON_DISK else Path("/nowhere")
    world = World(program.ranks, seed, policy, TIMEOUT * program.length, trace=trace)
    injector = Injector(fault)
    run = Run(seed, program, policy, fault, world, None)
    try:
        run_program(program, world, folder, injector)
        run.happened = injector.happened
        run.problems = judge(run, right, output_of(folder), sorted(p.name for p in _listed(folder)))
        if program.kind in _ON_DISK and run.happened is not None and fault.kind != "stray":
            run.problems += _resumed(run, right, folder)
    finally:
        if folder.exists():
            shutil.rmtree(folder)
    return run


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def _damage(folder: Path, draw: random.Random) -> bool:
    """Change one bit of one file. Whether there is any."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if files:
        path = draw.choice(files)
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    return bool(files)


def _resumed(run: Run, right: Undisturbed, folder: Path) -> list[str]:
    """What is wrong after the same program has run again, with nothing in its way."""
    world = World(run.program.ranks, run.seed, run.policy, TIMEOUT * run.program.length)
    again = Run(run.seed, run.program, run.policy, Fault(), world, None)
    if run.fault.kind == "rot" and _damage(folder, random.Random(run.seed)):
        again.fault, again.happened = Fault("rot"), 0.0
    run_program(run.program, world, folder, Injector(Fault()))
    names = sorted(path.name for path in _listed(folder))
    return [f"resumed: {problem}" for problem in judge(again, right, output_of(folder), names, is_resumed=True)]
