"""Jobs of several processes: how mpirun is called, what this machine allows, and what a job has left behind."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from shardpass.cli.launch import find_program


def mpirun_command(ranks: int) -> list[str]:
    """What stands before the interpreter to start ranks on a machine that may have fewer cores, also as root."""
    options = ["--oversubscribe", "--allow-run-as-root", "--mca", "osc", "^ucx"]
    return [str(find_program("mpirun")), *options, "-n", str(ranks)]


def why_no_namespaces() -> str:
    """Why no network namespaces can be made here; empty if they can."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "there is no unshare or no ip command"
    tried = ["unshare", "-rn", "ip", "link", "add", "name", "a", "type", "veth", "peer", "name", "b"]
    can = subprocess.run(tried, capture_output=True).returncode == 0
    return "" if can else "this machine does not let us make network namespaces"


def processes_of(token: str) -> list[int]:
    """The processes with ``token`` on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def survivors(token: str) -> list[int]:
    """The processes that are left, after a moment for their launcher to reap them."""
    for _ in range(100):
        left = processes_of(token)
        if not left:
            break
        time.sleep(0.1)
    return left
