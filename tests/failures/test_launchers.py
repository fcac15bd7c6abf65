"""Faults in processes: spawned, started by hand, by torchrun and by mpirun."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from backends import launchers
from backends.launchers import free_port, needs_mpi

import shardpass as sp
from shardpass.data import verify
from shardpass.errors import CommunicationError

from .training import LIMIT

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("program.py")
RANKS = 3
ALL = ["bare", "torchrun", pytest.param("mpirun", marks=[needs_mpi, pytest.mark.mpi])]
START = 480.0  # seconds that launchers and imports may take before the fault, on a busy machine


def run(monkeypatch, store, launcher, what, ranks=RANKS, **env):
    """The launcher's run of the program of this folder."""
    monkeypatch.setattr(launchers, "PROGRAM", PROGRAM)
    ended = launchers.launch(launcher, ranks, what, limit=START, STORE=str(store), **env)
    verify(store)
    return ended


def ends_with(monkeypatch, store, launcher, what, *words, **env):
    ended = run(monkeypatch, store, launcher, what, **env)
    seconds = ended.seconds_after_fault()
    assert ended.code != 0 and "did not end in time" not in ended.text, ended.text
    assert seconds < LIMIT, f"{seconds:.1f} s\n{ended.text}"
    for word in words:
        assert re.search(word, ended.text), f"not said: {word}\n{ended.text}"
    return ended


@pytest.mark.long  # by default in tests/backends, on threads
@pytest.mark.parametrize("launcher", ALL)
def test_ranks_that_take_different_paths(monkeypatch, store, launcher):
    ended = run(monkeypatch, store, launcher, "divergences")
    assert ended.code == 0 and ended.text.count("is done") == RANKS, ended.text
    for what, words in (
        ("skip", "ranks 0, 2 are in all_gather '(call|the same) .*; rank 1 is in all_gather 'cross_entropy'"),
        ("no backward", "the ranks wait for each other.* rank 1 waits in all_gather 'the same model on every rank"),
    ):
        for rank in range(RANKS):
            said = re.search(f"{what} on rank {rank} after ([0-9.]+) s: .*{words}.* depends on the rank", ended.text)
            assert said and float(said[1]) < LIMIT, f"{what} on rank {rank}\n{ended.text}"


@pytest.mark.long
@pytest.mark.parametrize("launcher", ALL)
def test_a_slow_rank_is_waited_for_and_one_with_fewer_epochs_is_named(monkeypatch, store, launcher):
    words = ["rank 1 ended first, after fewer calls than the others make .*: rank [02] waits in all_gather 'the same"]
    ended = ends_with(monkeypatch, store, launcher, "slow, then fewer epochs", *words, SLOW_SECONDS="4")
    assert ended.text.count("has done epoch 1") == RANKS, ended.text


@pytest.mark.long
@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_slow_for_a_minute_is_waited_for(monkeypatch, store, launcher):
    ended = run(monkeypatch, store, launcher, "slow", SLOW_SECONDS="60")
    assert ended.code == 0 and ended.text.count("is done") == RANKS, ended.text


@pytest.mark.long
@pytest.mark.parametrize("launcher", ALL[1:])
def test_a_missing_part_file(monkeypatch, store, tmp_path, launcher):
    copy = shutil.copytree(store, tmp_path / "copy")
    (copy / "part-00003.safetensors").unlink()
    monkeypatch.setattr(launchers, "PROGRAM", PROGRAM)
    ended = launchers.launch(launcher, RANKS, "-", limit=START, STORE=str(copy))
    assert ended.code != 0 and "part-00003.safetensors cannot be read (No such file or directory)" in ended.text


# ---- ranks that cannot meet


def alone(rank, world, port, store, limit):
    """One process with torchrun's variables, and nobody else; its output and the seconds from the fault."""
    env = {name: value for name, value in os.environ.items() if name not in launchers._LAUNCHER_VARIABLES}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"STORE": str(store), "SHARDPASS_CONNECT_TIMEOUT": str(limit), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), "alone", "-"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_address_nobody_listens_at(monkeypatch):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SHARDPASS_CONNECT_TIMEOUT": "1"}
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **meeting}.items():
        monkeypatch.setenv(name, value)
    words = r"rank 1 of 2 could not reach rank 0 at 127.0.0.1:\d+ within 1 s.*Check the address \(MASTER_ADDR, MASTER_P"
    with pytest.raises(CommunicationError, match=f"(?s){words}"):
        sp.connect()


@pytest.mark.long  # it waits for a time-out
def test_a_rank_that_was_never_started(store):
    port = free_port()
    children = [alone(rank, 3, port, store, 8) for rank in (0, 1)]
    for rank, child in enumerate(children):
        text, _ = child.communicate(timeout=START)
        seconds = time.time() - float(re.search(r"fault at ([\d.]+)", text).group(1))
        assert child.returncode != 0 and seconds < LIMIT + 8, f"{seconds:.1f} s\n{text}"
        assert re.search(f"rank {rank} waited 8 s at 127.0.0.1:{port}, but of 3 ranks these did not come: 2", text), (
            text
        )


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", **MEETING}, "RANK=2 and WORLD_SIZE=2 are set, but ranks are numbered from 0"),
        ({"RANK": "0", "WORLD_SIZE": "0", **MEETING}, "RANK=0 and WORLD_SIZE=0 are set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR and MASTER_PORT: .* start with torchrun"),
        ({"RANK": "one", "WORLD_SIZE": "2", **MEETING}, "the environment variable RANK is 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2", **MEETING, "MASTER_PORT": "http"}, "variable MASTER_PORT is 'http'"),
    ],
)
def test_an_environment_that_contradicts_itself(monkeypatch, variables, words):
    for name in launchers._LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        sp.connect()
