"""A rank that fails ends all ranks within seconds, with the first cause in words and no process left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from benchmarks.jobs import survivors
from shardpass.backends import spawn
from shardpass.errors import CommunicationError, PeerFailure

from . import contract
from .launchers import launch, needs_mpi

pytestmark = pytest.mark.processes
LIMIT = 45.0  # seconds from the failure to the end of the last rank: generous, but less than a wait lasts
MARKS = {"bare": [], "torchrun": [], "mpirun": [needs_mpi, pytest.mark.mpi]}


def on(*launchers, later=()):
    """`launchers` by default, and those of `later` with the long tests: starting processes takes most of the time."""
    return [
        *(pytest.param(launcher, marks=MARKS[launcher]) for launcher in launchers),
        *(pytest.param(launcher, marks=[*MARKS[launcher], pytest.mark.long]) for launcher in later),
    ]


@pytest.mark.parametrize("launcher", on("bare", later=["torchrun", "mpirun"]))
def test_an_exception_on_one_rank(launcher):
    ended = launch(launcher, 3, "raise")
    assert ended.code != 0 and ended.seconds_after_fault() < LIMIT, ended.text
    assert "shardpass: rank 2 failed first: ValueError: boo" in ended.text
    assert 'raise ValueError("boo")' in ended.text, "the traceback"
    assert "is done" not in ended.text
    if launcher == "bare":
        assert ended.text.count("PeerFailure: rank 2 failed first: ValueError: boo") == 2, ended.text
        assert ended.text.count("Traceback (most recent call last)") == 1, "that of the rank that failed"


@pytest.mark.parametrize("launcher", on("mpirun", later=["bare", "torchrun"]))
def test_a_killed_rank(launcher):
    ended = launch(launcher, 3, "kill")
    assert ended.code != 0 and ended.seconds_after_fault() < LIMIT, ended.text
    assert "is done" not in ended.text
    words = "rank 2 died first: its process ended without a word"
    assert words in ended.text and "failed first" not in ended.text, ended.text
    if launcher == "bare":
        assert ended.text.count(f"PeerFailure: {words}") == 2, ended.text


@pytest.mark.long
@pytest.mark.parametrize("launcher", on("torchrun", later=["bare", "mpirun"]))
def test_a_rank_that_leaves_early(launcher):
    ended = launch(launcher, 3, "exit")
    assert ended.code != 0 and ended.seconds_after_fault() < LIMIT, ended.text
    assert "rank 2 ended first" in ended.text and "failed first" not in ended.text, ended.text
    assert "is done" not in ended.text


@pytest.mark.long
def test_an_exception_while_the_others_compute():
    ended = launch("bare", 2, "raise while others compute")
    assert ended.seconds_after_fault() < LIMIT, ended.text
    assert "shardpass: rank 0 ends: rank 1 failed first: ValueError: boo" in ended.text


def test_abort():
    ended = launch("bare", 2, "abort")
    assert ended.seconds_after_fault() < LIMIT, ended.text
    assert ended.text.count("rank 1 failed first: the loss is nan") >= 2, ended.text


@pytest.mark.long
@pytest.mark.parametrize("launcher", on("bare", later=["mpirun"]))
def test_a_slow_rank_is_waited_for_and_a_clean_end_is_silent(launcher):
    ended = launch(launcher, 2, "slow", SLOW_SECONDS="2.5")
    assert ended.code == 0 and ended.text.count("is done") == 2, ended.text
    if launcher == "bare":
        assert len([line for line in ended.text.splitlines() if line.strip()]) == 4, ended.text


def fail_as_told(comm, what):
    contract.assert_exchange(comm)
    if comm.rank == 1 and what == "raise":
        raise KeyError("boo")
    if comm.rank == 1 and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    to, source = contract.ring(comm)
    comm.exchange(torch.ones(300_000), to, torch.zeros(300_000), source, 5, "late").wait()
    comm.barrier()


def test_spawned_processes_raise_the_first_exception():
    with pytest.raises(KeyError, match="boo") as caught:
        spawn(fail_as_told, 2, "processes", args=("raise",))
    assert "fail_as_told" in str(caught.value.__cause__), "the traceback of the rank"
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_a_killed_spawned_process_is_named():
    with pytest.raises(CommunicationError, match="rank 1 failed first: its process was ended by SIGKILL") as caught:
        spawn(fail_as_told, 2, "processes", args=("kill",))
    assert not isinstance(caught.value, PeerFailure)
    assert not multiprocessing.active_children()


def test_functions_that_cannot_be_sent():
    with pytest.raises(ValueError, match="define the function at module level"):
        spawn(lambda comm: 1, 2, "processes")


@pytest.mark.long
def test_functions_that_other_processes_cannot_import():
    """As in a notebook, the main program is no file."""
    program = "import shardpass as sp\ndef train(comm): return 1\nsp.spawn(train, 2, 'processes')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "ValueError: spawn(backend='processes') has every process import the function, and" in ended.stderr
    assert "'train'" in ended.stderr and "write it to a file" in ended.stderr


PARENT = """
import os, signal, sys, time
from shardpass.backends.spawn import spawn
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
def wait(comm):
    os.write(1, b"up\\n")  # one write: lines of two processes must not mix
    time.sleep(60)
if __name__ == "__main__":
    spawn(wait, 2, "processes")
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_no_orphans_when_the_parent_ends(tmp_path, ending):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    try:
        assert parent.stdout is not None
        assert [parent.stdout.readline().strip() for _ in range(2)] == [b"up", b"up"]
        children = _children(parent.pid)
        assert len(children) >= 2
        parent.send_signal(ending)
        parent.wait(LIMIT)
        deadline = time.monotonic() + LIMIT
        while any(_alive(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in children if _alive(pid)]
    finally:
        parent.kill()
        parent.wait()
    assert not survivors(str(script))


def _children(parent):
    found = []
    for thread in os.listdir(f"/proc/{parent}/task"):
        with open(f"/proc/{parent}/task/{thread}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_ends_threads():
    def program(comm):
        if comm.rank == 0:
            time.sleep(0.3)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        comm.exchange(None, 0, torch.zeros(1), 0, 1).wait() if comm.rank else comm.barrier()

    with pytest.raises((KeyboardInterrupt, CommunicationError)):
        spawn(program, 2)
    deadline = time.monotonic() + LIMIT
    while any("shardpass rank" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
