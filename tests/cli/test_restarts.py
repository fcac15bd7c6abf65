"""`shardpass train --restarts`: ranks that are killed come back, and the run ends as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from cli_helpers import MODULE, epochs, passed, refused

from shardpass.cli import restarts
from shardpass.cli.config import TrainConfig
from shardpass.cli.launch import launcher_environment
from shardpass.core.training import read_verified
from shardpass.errors import CommunicationError, DivergenceError, StoreError

COMMON = ("--model", "gcn", "--hidden", 8, "--eval-every", 1000)
LIMIT = 480.0


def ranks_of(parent: int) -> list[int]:
    """The processes of the ranks that `spawn` or torchrun has started in this process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (entry / "status").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in status and (b"spawn_main" in command or MODULE.encode() in command):
            found.append(int(entry.name))
    return sorted(found)


def kill_some(words: list[str], log: Path, kills: int, between: int) -> str:
    """Run a command, of which a rank is killed so often, each time ``between`` epochs later. Returns its stderr."""
    child = subprocess.Popen(words, env=launcher_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline, lines = monotonic() + LIMIT * (1 + kills // 10), 0
    try:
        for number in range(kills):
            lines += between
            while not (log.exists() and log.read_text().count("\n") >= lines):
                assert child.poll() is None and monotonic() < deadline, f"kill {number}: {log.exists()}"
                sleep(0.01)
            lines = log.read_text().count("\n")
            sleep(number % 5 / 100)  # while it writes a checkpoint, or computes
            os.kill(ranks_of(child.pid)[number % 2], signal.SIGKILL)
        _, err = child.communicate(timeout=LIMIT)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0, err.decode()
    return err.decode()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kills", "last", "ranks", "dropout", "backend"),
    [
        pytest.param(1, 40, 2, 0.0, "threads", marks=pytest.mark.long),  # which draw from one generator
        pytest.param(20, 160, 3, 0.3, "processes", marks=pytest.mark.long),
    ],
)
def test_killed_ranks_come_back_and_the_run_ends_with_the_same_bits(
    kills: int, last: int, ranks: int, dropout: float, backend: str, store: Path, tmp_path: Path
) -> None:
    words = ("train", store, *COMMON, "--epochs", last, "--ranks", ranks, "--dropout", dropout)
    plain, killed, log = tmp_path / "plain", tmp_path / "killed", tmp_path / "log"
    passed(*words, "--backend", backend, "--checkpoint", plain, "--log", tmp_path / "plain.log")
    options = ("--checkpoint", killed, "--restarts", kills, "--log", log)
    said = kill_some([sys.executable, "-m", MODULE, *map(str, (*words, *options))], log, kills, between=2)
    for number in range(1, kills + 1):
        assert f"Restart {number} of {kills}, from {killed}" in said, said
    assert said.count("its process was ended by SIGKILL (often: out of memory)") == kills, said
    assert_same_bits(killed, plain, but="random/" if backend == "threads" else "-")
    losses = {record["epoch"]: record["loss"] for record in epochs(log)}
    assert losses == {record["epoch"]: record["loss"] for record in epochs(tmp_path / "plain.log")}


def assert_same_bits(killed: Path, plain: Path, but: str) -> None:
    """Two checkpoints hold the same, except for the tensors whose names begin with ``but``."""
    (text, tensors), (as_text, as_tensors) = read_verified(plain), read_verified(killed)
    assert as_text == text and sorted(as_tensors) == sorted(tensors)
    for name, value in tensors.items():
        assert name.startswith(but) or torch.equal(as_tensors[name], value), name


@pytest.mark.long
@pytest.mark.processes
def test_torchrun_starts_a_killed_rank_again(store: Path, tmp_path: Path) -> None:
    words, plain, killed, log = (
        ("train", store, *COMMON, "--epochs", 40),
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "l",
    )
    passed(*words, "--ranks", 2, "--checkpoint", plain)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ("--checkpoint", killed, "--resume", "--log-file", log)
    said = kill_some([*torchrun, "--max-restarts", "1", "-m", MODULE, *map(str, (*words, *options))], log, 1, between=2)
    assert "exitcode: -9" in said, said
    assert_same_bits(killed, plain, but="random/")


@dataclass
class Spawned:
    """Stands for `spawn`: each time, it writes the checkpoint or not, and raises or not."""

    path: Path
    ends: list[tuple[bool, Exception | None]]
    resumed: list[bool] = field(default_factory=list)

    def __call__(self, work: Any, ranks: int, backend: str, args: tuple[TrainConfig]) -> list[Any]:
        writes, error = self.ends[len(self.resumed)]
        self.resumed.append(args[0].resume)
        if writes:
            (self.path.parent / "new").write_text("")
            (self.path.parent / "new").replace(self.path)
        if error is not None:
            raise error
        return ["the record"]


KILLED = CommunicationError("rank 1 failed first: its process was ended by SIGKILL")
BAD, APART = StoreError("there is no directory"), DivergenceError("the ranks are in different calls")


@pytest.mark.parametrize(
    ("there", "ends", "resumed", "words"),
    [
        (False, [(False, None)], [False], r"^$"),
        (
            False,
            [(True, KILLED), (True, KILLED), (True, None)],
            [False, True, True],
            "Restart 2 of 2, from .*ckpt",
        ),
        (False, [(False, KILLED), (True, None)], [False, False], "Restart 1 of 2, from the beginning"),
        (True, [(False, KILLED), (True, None)], [False, False], "Restart 1 of 2, from the beginning"),  # another run's
        (True, [(True, BAD), (True, None)], [False, True], "there is no directory. Restart 1 of 2, from"),
        (True, [(True, BAD), (False, BAD)], [False, True], "this error would come again"),
        (False, [(False, BAD)], [False], "this error would come again"),
        (False, [(False, APART)], [False], "this error would come again"),
        (False, [(True, KILLED)] * 3, [False, True, True], "no restart of 2 is left"),
    ],
)
def test_what_is_started_again_and_from_where(
    there: bool, ends: list[Any], resumed: list[bool], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "ckpt"
    if there:
        path.write_text("")
    spawned = Spawned(path, ends)
    monkeypatch.setattr(restarts, "spawn", spawned)
    config = TrainConfig(store="s", checkpoint=str(path))
    error = ends[-1][1]
    if error is None:
        assert restarts.train_with_restarts(config, "auto", 2, 2) == "the record"
    else:
        with pytest.raises(type(error)) as caught:
            restarts.train_with_restarts(config, "auto", 2, 2)
        assert caught.value is error
    assert spawned.resumed == resumed and re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("env", "options", "words"),
    [
        ({}, (), "--restarts starts from the file of --checkpoint"),
        ({}, ("--checkpoint", "c", "--backend", "threads"), "--backend is threads: leave it away"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ("--checkpoint", "c"),
         "a launcher started 2 processes (WORLD_SIZE=2): use torchrun --max-restarts"),
    ],
)  # fmt: skip
def test_refusals(
    env: dict[str, str], options: tuple[str, ...], words: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert words in refused("train", store, "--restarts", 2, *options)
