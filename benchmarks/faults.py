"""Inject faults into running jobs and write down what their ranks say: benchmarks/reports/faults-YYYY-MM-DD.md.

    python -m benchmarks.faults                           # every fault, in every phase, however the ranks are started
    python -m benchmarks.faults --how fork --phase save   # some of them

A fault passes if every other rank says within 15 seconds (30 for a lost host) what was wrong with which rank, and
nothing else; the job ends; no process and no shared memory is left; the checkpoint can be loaded; and the doctor
names the rank. There are 200 faults, which take about 20 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

import shardpass as sp
from benchmarks.faulty_rank import GUILTY, PHASES, RANKS
from benchmarks.jobs import mpirun_command, processes_of, survivors, why_no_namespaces
from shardpass.cli.black_box import read_black_boxes
from shardpass.cli.diagnosis import diagnose
from shardpass.cli.launch import find_program
from shardpass.data import verify

HOWS = ("threads", "fork", "torchrun", "mpirun", "namespaces")
FAULTS = ("kill", "stop", "exit", "abort", "raise", "link", "launcher")
SECONDS, LINK_SECONDS = 15.0, 30.0  # that a rank may take to say it
GIVE_UP_SECONDS = 240.0
FEATURES, CLASSES = 6, 3
SAYS = {
    "kill": "rank {0} died first: its process ended without a word",
    "stop": "has not heard of rank {0} for .* though its host answers",
    "exit": "rank {0} (ended first|failed first: SystemExit: 3)",
    "abort": "rank {0} failed first: the loss is nan",
    "raise": "rank {0} failed first: ValueError: boo",
    "link": "rank {0} was lost first: its host has not answered",
    "launcher": r"rank \d failed first: its launcher, process \d+, has gone",
}


@dataclass
class Injected:
    """What became of a job."""

    how: str
    phase: str
    fault: str
    seconds: list[float] = field(default_factory=list)  # until each innocent rank had said what was wrong
    problems: list[str] = field(default_factory=list)


def why_not(how: str, fault: str) -> str:
    """Why a fault cannot be injected; empty if it can."""
    if how == "threads" and fault in ("kill", "stop"):
        return "it would hit all threads"
    if fault == "link" and how != "namespaces":
        return "only hosts have links"
    if fault == "launcher" and how != "torchrun":
        return "torchrun's agent stands for all launchers"
    if how == "mpirun" and find_program("mpirun") is None:
        return "there is no mpirun"
    return why_no_namespaces() if how == "namespaces" else ""


def make_store(path: Path) -> None:
    """A random graph of 60 nodes, partitioned."""
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(60, FEATURES, generator=generator),
        edge_index=torch.randint(0, 60, (2, 300), generator=generator),
        y=torch.arange(60) % CLASSES,
        train_mask=torch.rand(60, generator=generator) < 0.5,
    )
    sp.partition(data, path, 4, method="random")


def inject(store: Path, how: str, phase: str, fault: str, limit: float = SECONDS) -> Injected:
    """Run a job with a fault, in which every other rank has ``limit`` seconds to say what is wrong."""
    found = Injected(how, phase, fault)
    with tempfile.TemporaryDirectory(prefix="shardpass-faults-") as name:
        folder, shared = Path(name), set(os.listdir("/dev/shm"))
        shutil.copytree(store, folder / "store")
        with (folder / "launcher.log").open("wb") as log:
            job = subprocess.Popen(
                _command(folder, how, phase, fault), stdout=log, stderr=log, env=_environment(folder, phase, fault)
            )
        try:
            _observe(job, folder, found, LINK_SECONDS if fault == "link" else limit)
        finally:
            left = survivors(str(folder))
            for process in left:
                os.kill(process, signal.SIGKILL)
            job.wait()
        found.problems += [f"{len(left)} processes were left"] * bool(left)
        found.problems += [f"left in /dev/shm: {new}" for new in _unused(set(os.listdir("/dev/shm")) - shared)]
        found.problems += _damage(folder)
        found.problems += _misled(folder / "black boxes", found)
        if found.problems:
            found.problems += [f"{path.name}: {path.read_text()[-1000:]}" for path in sorted(folder.glob("*.log"))]
    return found


def _command(folder: Path, how: str, phase: str, fault: str) -> list[str]:
    program = ["-m", "benchmarks.faulty_rank", str(folder), how, phase, fault]
    if how == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *program]
    if how == "mpirun":
        return [*mpirun_command(RANKS), sys.executable, *program]
    hosts = ["unshare", "-rn", "bash", str(Path(__file__).with_name("three_hosts.sh"))] if how == "namespaces" else []
    return [*hosts, sys.executable, *program]


def _environment(folder: Path, phase: str, fault: str) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "SHARDPASS_HOST_TIMEOUT": "4", "SHARDPASS_CONNECT_TIMEOUT": str(GIVE_UP_SECONDS),
        "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "FAULT": str(folder / "fault"), "GO": str(folder / "go"), "LOST": str(GUILTY[phase]) * (fault == "link"),
        "SHARDPASS_BLACK_BOX": str(folder / "black boxes"),
    }  # fmt: skip


def _observe(job: subprocess.Popen[bytes], folder: Path, found: Injected, limit: float) -> None:
    """Wait for what the innocent ranks say, and for the end of the job."""
    guilty = GUILTY[found.phase] if found.fault != "launcher" else -1
    innocent = set(range(RANKS)) - {guilty}
    said: dict[int, float] = {}
    start = time.monotonic()
    while time.monotonic() < start + GIVE_UP_SECONDS and (job.poll() is None or len(said) < len(innocent)):
        ended = job.poll() is not None and not (found.fault == "launcher" and processes_of(str(folder)))
        for rank in innocent - set(said):
            if re.search(SAYS[found.fault].format(guilty), _log(folder, rank)):
                said[rank] = time.time()
        if found.fault == "stop" and len(said) == len(innocent) and not (folder / "go").exists():
            os.kill(int((folder / "fault").read_text().split()[1]), signal.SIGCONT)
            (folder / "go").touch()
        if ended:
            break
        time.sleep(0.05)
    if not (folder / "fault").exists():
        found.problems.append("the fault did not happen")
        return
    fault_at = float((folder / "fault").read_text().split()[0])
    found.seconds = [at - fault_at for at in said.values()]
    found.problems += [f"rank {r} does not say it" for r in innocent - set(said)]
    found.problems += [f"said after {seconds:.1f} s" for seconds in found.seconds if seconds > limit]
    if job.poll() is None or (job.returncode == 0) != (found.fault == "stop"):
        found.problems.append(f"the job ended with {job.poll()}")
    for rank in innocent if found.fault != "launcher" else ():
        wrong = re.search(rf"rank (?!{guilty})\d (failed|died|was lost|ended) first", _log(folder, rank))
        found.problems += [f"rank {rank} says: {wrong[0]}"] if wrong else []


def _log(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def _unused(names: set[str]) -> list[str]:
    """Those files of /dev/shm that no process has mapped, but for those that Open MPI leaves when it is aborted.

    Temporary files are those of other programs: no job makes any there.
    """
    names = {name for name in names if not name.startswith(("sm_segment.", "tmp"))}
    mapped = ""
    for entry in Path("/proc").glob("[0-9]*/maps") if names else ():  # other jobs have files there too
        with contextlib.suppress(OSError):
            mapped += entry.read_text()
    return sorted(name for name in names if name not in mapped and Path("/dev/shm", name).exists())


def _damage(folder: Path) -> Iterator[str]:
    verify(folder / "store")
    if (folder / "checkpoint").exists():
        comm = sp.connect("local")
        model = sp.pyg.wrap(GCN(FEATURES, 8, 2, CLASSES), comm, check=False)
        try:
            sp.load_checkpoint(folder / "checkpoint", comm, model, torch.optim.Adam(model.parameters()))
        except Exception as error:
            yield f"the checkpoint cannot be loaded: {error}"


def _misled(folder: Path, found: Injected) -> Iterator[str]:
    """What is wrong with what the doctor says of the black boxes."""
    files = sorted(folder.glob("*")) if folder.exists() else []
    if found.fault == "stop":
        yield from [f"black boxes of a run that went well: {len(files)}"] * bool(files)
        return
    try:
        said = diagnose(read_black_boxes(files)) if files else ["no black box"]
    except ValueError as error:
        said = [str(error)]
    if found.fault != "launcher" and not said[-1].startswith(f"Look at rank {GUILTY[found.phase]} first"):
        yield "the doctor is wrong: " + "\n".join(said)


def table(all_found: list[Injected], skipped: dict[str, str]) -> str:
    """The report in Markdown."""
    bad = [one for one in all_found if one.problems]
    command = shlex.join(["python", "-m", "benchmarks.faults", *sys.argv[1:]])
    lines = [
        f"# Faults injected, {date.today()}", "", f"`{command}`", "",
        f"{len(all_found)} faults, {len(bad)} of them with a problem. A cell holds the seconds after which the last of "
        "the other ranks had said what was wrong with which rank. Hosts are lost after 4 seconds here.",
        "",
    ]  # fmt: skip
    for how in dict.fromkeys(one.how for one in all_found):
        here = [one for one in all_found if one.how == how]
        faults = list(dict.fromkeys(one.fault for one in here))
        lines += [f"## {how}", "", f"| phase | {' | '.join(faults)} |", "|---" * (len(faults) + 1) + "|"]
        cells = {(one.phase, one.fault): _cell(one) for one in here}
        for phase in dict.fromkeys(one.phase for one in here):
            lines.append(f"| {phase} | {' | '.join(cells.get((phase, fault), '-') for fault in faults)} |")
        lines.append("")
    lines += [f"Not on this machine: {what}: {why}." for what, why in skipped.items()]
    lines += [f"* {one.how}, {one.phase}, {one.fault}: {one.problems[0]}" for one in bad]
    return "\n".join(lines).rstrip() + "\n"


def _cell(one: Injected) -> str:
    return "problem" if one.problems else f"{max(one.seconds):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=HOWS, nargs="*", default=HOWS)
    parser.add_argument("--phase", choices=PHASES, nargs="*", default=PHASES)
    parser.add_argument("--fault", choices=FAULTS, nargs="*", default=FAULTS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "reports")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    skipped: dict[str, str] = {}
    all_found = []
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "store"
        make_store(store)
        for how in options.how:
            for fault in options.fault:
                why = why_not(how, fault)
                if why:
                    skipped |= {how: why} if why.startswith(("there", "this")) else {}
                    continue
                for phase in options.phase:
                    found = inject(store, how, phase, fault)
                    all_found.append(found)
                    print(f"{how}, {phase}, {fault}: {_cell(found)}", *found.problems, sep="\n  ", flush=True)
            (options.output / f"faults-{date.today()}.md").write_text(table(all_found, skipped))
    sys.exit(any(found.problems for found in all_found))


if __name__ == "__main__":
    main()
