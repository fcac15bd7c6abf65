"""One training script with and without shardpass: what it logs and ends with is the same, on ranks of every kind."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric")

from backends.launchers import free_port, needs_mpi

import shardpass as sp
from benchmarks.jobs import mpirun_command
from shardpass.cli.launch import launcher_environment
from shardpass.testing import run

from . import one_script

SCRIPT = Path(one_script.__file__)
MARKS = {"torchrun": [pytest.mark.processes], "mpirun": [pytest.mark.mpi, needs_mpi]}
LAUNCHED = [pytest.param(name, ranks, marks=MARKS[name]) for name in MARKS for ranks in (1, 3, 4)]


@cache
def expected() -> Any:
    return one_script.whole()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("one script") / "parts"
    sp.partition(one_script.graph(), path, parts=one_script.PARTS, method="range")
    return str(path)


def check(every: list[Any]) -> None:
    log, tensors = expected()
    for found_log, found in (ended for of_rank in every for ended in of_rank):
        assert [name for name, _ in found_log] == [name for name, _ in log]
        numbers = [torch.tensor([number for _, number in of], dtype=torch.float64) for of in (found_log, log)]
        torch.testing.assert_close(*numbers, rtol=0, atol=1e-10, equal_nan=True)
        torch.testing.assert_close(found, tensors, rtol=0, atol=1e-10)


def test_the_script_does_what_it_says() -> None:
    """Gradients are clipped, a step is skipped, a layer frozen, rates fall, and all of it changes the loss."""
    log, tensors = expected()

    def of(name: str) -> list[float]:
        return [number for key, number in log if key == name]

    norms = of("norm")[: one_script.STEPS]
    assert [number for number, norm in enumerate(norms) if not math.isfinite(norm)] == [one_script.SPIKE]
    assert sum(norm > one_script.CLIP for norm in norms) > 3
    assert 16.0 in of("scale") and of("scale")[one_script.SPIKE] < of("scale")[one_script.SPIKE - 1]
    seen = of("attention.att_src")
    frozen = [step for step in range(1, one_script.STEPS) if seen[step] == seen[step - 1]]
    assert frozen == [*one_script.FROZEN]
    assert len({*of("rate")[-4:]}) > 1 and of("loss")[10] < of("loss")[0]
    assert tensors["sigmas"].abs().min() > 1e-3


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.long)])
def test_ranks_that_are_threads(ranks: int, store: str) -> None:
    check(run(one_script.sharded, ranks, args=(store,)))


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "ranks"), LAUNCHED)
def test_ranks_of_a_launcher(launcher: str, ranks: int, store: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    command = [*torchrun, "--nproc-per-node", str(ranks)]
    if launcher == "mpirun":
        command = [*mpirun_command(ranks), sys.executable]
    env = {**launcher_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [*command, str(SCRIPT), store, str(tmp_path / "out")], env=env, capture_output=True, text=True, timeout=480
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check([torch.load(tmp_path / f"out.{rank}") for rank in range(ranks)])
