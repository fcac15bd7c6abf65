"""Hosts that are lost, processes that are stopped, launchers that are killed: with real processes."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from benchmarks.jobs import survivors, why_no_namespaces

from . import launchers
from .launchers import command, free_port, rank_variables

pytestmark = pytest.mark.processes
LIMIT = 240.0  # for whatever a test waits for, on a busy machine

PROGRAM = """
import multiprocessing, os, sys, time
from pathlib import Path
import shardpass as sp
from shardpass.backends import watch

watch._NOTICE_SECONDS = 2.0  # a rank that computes on is ended this soon
comm = sp.connect()
comm.barrier("first")
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
child.start()
child.terminate()  # which concerns nobody but the child
child.join()
print("the child has ended with", child.exitcode, flush=True)
print(f"rank {comm.rank} is up, process {os.getpid()}, with ranks {comm.local_ranks} here", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
comm.barrier("last")
comm.barrier("the very last")
print(f"rank {comm.rank} is done", flush=True)
"""


needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces() or "-")


class Job:
    """Processes started in a folder, with one file for all their output, and a signal file for `PROGRAM`."""

    def __init__(self, folder: Path) -> None:
        self.log, self.go, self.token = folder / "log", folder / "go", uuid.uuid4().hex
        self.program = folder / f"{self.token}.py"
        self.program.write_text(PROGRAM)
        self.children: list[subprocess.Popen] = []

    def start(self, *arguments, **env):
        path = os.pathsep.join([os.getcwd(), *sys.path])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SHARDPASS_HOST_TIMEOUT": "2"} | env
        env |= {"SHARDPASS_CONNECT_TIMEOUT": str(LIMIT)}
        with self.log.open("ab") as log:
            self.children.append(subprocess.Popen(arguments, stdout=log, stderr=log, env=env, start_new_session=True))

    def two_ranks(self) -> None:
        """Start two ranks by hand, and return when both are up."""
        port = free_port()
        for rank in range(2):
            self.start(sys.executable, str(self.program), str(self.go), **rank_variables(rank, 2, port))
        self.until("is up", 2)

    def text(self) -> str:
        return self.log.read_text()

    def until(self, words: str, times: int = 1) -> list[str]:
        """What `words` match, once there are so many."""
        deadline = time.monotonic() + LIMIT
        while len(found := re.findall(words, self.text())) < times:
            assert time.monotonic() < deadline, f"not said: {words}\n{self.text()}"
            time.sleep(0.05)
        return found

    def codes(self) -> list[int]:
        return [child.wait(LIMIT) for child in self.children]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    for child in made.children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for process in survivors(made.token):
        os.kill(process, signal.SIGKILL)


@pytest.mark.long
def test_a_stopped_process_is_missed_and_waited_for(job):
    job.two_ranks()
    job.children[1].send_signal(signal.SIGSTOP)
    job.go.touch()
    job.until("rank 0 has not heard of rank 1 for .* though its host answers: its process is stopped")
    job.children[1].send_signal(signal.SIGCONT)
    assert job.codes() == [0, 0] and job.text().count("is done") == 2, job.text()
    assert job.text().count("the child has ended with -15") == 2, job.text()


@pytest.mark.long  # by mpirun in test_failures.py
def test_a_rank_that_is_told_to_end_says_so(job):
    job.two_ranks()
    job.children[1].terminate()  # both compute
    job.until(r"shardpass: rank \d ends: rank 1 failed first: it was told to end \(SIGTERM\)", 2)
    assert job.codes() == [1, 128 + signal.SIGTERM]


@pytest.mark.long
def test_ranks_end_when_their_launcher_is_killed(job, monkeypatch):
    monkeypatch.setattr(launchers, "PROGRAM", job.program)
    job.start(*command("torchrun", 2, str(job.go), job.token))
    ranks = [int(number) for number in job.until(r"is up, process (\d+)", 2)]
    job.children[0].kill()
    assert len(set(job.until(r"its launcher, process (\d+), has gone", 1))) == 1
    assert not survivors(job.token), f"{ranks}\n{job.text()}"


ONE_NAMESPACE = """
ip link set lo up
for rank in 0 1; do RANK=$rank "$@" & done
until [ "$(grep -c 'is up' $LOG)" = 2 ]; do sleep 0.1; done
ip link set lo down
touch $GO
wait
"""


@needs_namespaces
def test_a_lost_host(job):
    """The network between two ranks goes away, and nothing closes their connections."""
    env = rank_variables(0, 2, 29400) | {"LOG": str(job.log), "GO": str(job.go)}  # the script sets RANK
    program = [sys.executable, str(job.program), str(job.go)]
    job.start("unshare", "-rn", "bash", "-c", ONE_NAMESPACE, "-", *program, **env)
    job.codes()
    for rank in range(2):
        words = f"rank {1 - rank} was lost first: its host has not answered rank {rank} within 2 s"
        assert words in job.text(), job.text()
    assert "is done" not in job.text() and not survivors(job.token), job.text()


IN_EACH_NAMESPACE = """
rank=0
for holder in $NAMESPACES; do
    RANK=$rank nsenter -t $holder -n "$@" &
    rank=$((rank + 1))
done
wait
"""


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("lost", [0, 2])  # rank 0 keeps torch's store
def test_one_of_three_hosts_is_lost(job, lost):
    fault, script = job.go.with_name("fault"), Path(__file__).parents[2] / "benchmarks" / "three_hosts.sh"
    program = ["bash", "-c", IN_EACH_NAMESPACE, "-", sys.executable, str(job.program), str(job.go)]
    job.start("unshare", "-rn", "bash", str(script), *program, FAULT=str(fault), GO=str(job.go), LOST=str(lost))
    job.until("is up", 3)
    fault.touch()
    job.codes()
    assert job.text().count(f"rank {lost} was lost first: its host has not answered") >= 2, job.text()
    assert job.text().count("was lost first") >= 3 and "is done" not in job.text(), job.text()
    assert not survivors(job.token), job.text()
