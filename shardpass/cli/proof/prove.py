"""`prove_rank`: one rank's part of `shardpass test`."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from time import perf_counter, sleep

import torch
from rich.table import Table

import shardpass as sp
from shardpass.backends.hosts import machine, usable_cores
from shardpass.cli.console import fail, output
from shardpass.cli.proof.exactness import BOUND, Exactness, compare
from shardpass.cli.proof.limits import memory_limit
from shardpass.cli.proof.links import Link, measure, slowest, stragglers
from shardpass.core.exchange import shares_rows
from shardpass.core.ranks import Ranks, bytes_text


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and what it may use there.

    Attributes:
        machine: the running kernel, which tells hosts apart whatever their names.
        cores: those that the rank may use.
        memory, bound_by: the fewest bytes that bound the process, and what sets them.
    """

    host: str
    machine: str
    device: str
    gpus: int
    cores: list[int]
    threads: int
    memory: int
    bound_by: str
    versions: str

    @classmethod
    def of_this_process(cls, comm: Ranks) -> Place:
        """That of the rank `comm`."""
        gpus, threads = torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.get_num_threads()
        versions = f"shardpass {sp.__version__}, torch {torch.__version__}"
        cores, memory = sorted(usable_cores()), memory_limit()
        return cls(socket.gethostname(), machine(), str(comm.device), gpus, cores, threads, *memory, versions)


@dataclass(frozen=True)
class Proof:
    """What is wrong, in sentences, the same on every rank; and the rank that says it."""

    problems: list[str]
    rank: int

    def end(self) -> None:
        """End this process with code 1 if there are problems, which rank 0 tells."""
        if self.problems and self.rank == 0:
            first, *others = self.problems
            fail(first + (f" (and {_count(len(others), 'more problem')}: {'; '.join(others)})" if others else ""))
        if self.problems:
            sleep(1.0)  # a launcher ends all ranks with the first one, and rank 0 has something to say
            raise SystemExit(1)


def prove_rank(comm: Ranks, config: None = None) -> Proof:
    """What was found of these ranks, which rank 0 shows as tables. Collective."""
    start, console = perf_counter(), output()
    console.quiet = comm.rank > 0
    backend = type(comm.inner).__name__.removesuffix("Communicator")
    places = [Place(**found) for found in comm.all_gather_object(asdict(Place.of_this_process(comm)), "test: ranks")]
    console.print(f"{_count(comm.size, 'rank')} on {_count(len({p.machine for p in places}), 'host')} ({backend})")
    console.print(_ranks_table(places))
    if comm.size > 1:
        console.print("measuring messages between ranks ...")
    links = measure(comm)
    if links:
        console.print(_links_table(links, places))
    console.print("comparing a model on these ranks with one process (a first run compiles loops) ...")
    exact = compare(comm)
    shared = shares_rows(comm)
    problems = _problems(places, links, exact)
    if exact is not None:
        worst = max(exact.errors.values())
        console.print(
            f"exactness: {exact.model} on {exact.graph}, in float64: output and gradients differ from those of "
            f"one process by {worst:.0e} at most, in the modes {', '.join(exact.errors)}"
        )
    for note in _notes(places, links, exact, shared):
        console.print(f"note: {note}", markup=False)
    if not problems:
        console.print(f"passed: {_count(comm.size, 'rank')} in {perf_counter() - start:.1f} s")
    if not problems and comm.size == 1:
        console.print(
            "This was one rank alone. To test more, put a launcher before it, as in `mpirun -n 4 shardpass test` or "
            "`torchrun --nproc-per-node 4 --no-python shardpass test`, or add --ranks 4."
        )
    return Proof(problems, comm.rank)


def _ranks_table(places: list[Place]) -> Table:
    """A line for each group of ranks that have the same place."""
    table = Table(title="ranks", title_justify="left")
    for title in ("ranks", "host", "device", "cores", "threads", "memory", "bounded by"):
        table.add_column(title, justify="right" if title in ("cores", "threads", "memory") else "left")
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, place in enumerate(places):
        device = place.device + (f" ({_count(place.gpus, 'GPU')} here)" if place.gpus else "")
        memory = bytes_text(place.memory) if place.memory else "unknown"
        cells = (place.host, device, str(len(place.cores)), str(place.threads), memory, place.bound_by)
        groups.setdefault(cells, []).append(rank)
    for group, ranks in groups.items():
        table.add_row(_ranges(ranks), *group)
    return table


def _links_table(links: list[Link], places: list[Place]) -> Table:
    pairs = len(places) * (len(places) - 1)
    which = f"all {pairs}" if len(links) == pairs else f"{len(links)} of {pairs:,}"
    table = Table(title=f"messages between ranks: the slowest of {which} pairs", title_justify="left")
    for title in ("from", "to", "bandwidth", "latency"):
        table.add_column(title, justify="left" if title in ("from", "to") else "right")
    for link in slowest(links):
        ends = (f"{rank} on {places[rank].host}" for rank in (link.source, link.target))
        table.add_row(*ends, f"{bytes_text(int(link.bandwidth))}/s", f"{link.latency * 1e6:,.0f} us")
    bandwidth = sorted(link.bandwidth for link in links)[len(links) // 2]
    latency = sorted(link.latency for link in links)[len(links) // 2]
    table.add_row("median", "", f"{bytes_text(int(bandwidth))}/s", f"{latency * 1e6:,.0f} us")
    return table


def _problems(places: list[Place], links: list[Link], exact: Exactness | None) -> list[str]:
    first, told = places[0], list[str]()
    for rank, place in enumerate(places):
        if place.versions != first.versions and not told:
            told.append(
                f"rank {rank} on {place.host} runs {place.versions}, but rank 0 on {first.host} runs "
                f"{first.versions}: install the same versions on every host"
            )
    told += [
        f"rank {link.target} on {places[link.target].host} received other numbers than rank {link.source} on "
        f"{places[link.source].host} sent: the network or the MPI library between them is broken"
        for link in links
        if not link.is_right
    ]
    mode, worst = max(exact.errors.items(), key=lambda entry: entry[1]) if exact else ("", 0.0)
    if exact and not worst <= BOUND:
        told.append(
            f"a {exact.model} on these ranks differs from the same model in one process by {worst:.0e} in mode {mode}, "
            f"but at most {BOUND:.0e} is expected: please report it with this output"
        )
    return told


def _notes(places: list[Place], links: list[Link], exact: Exactness | None, shared: bool) -> list[str]:
    """What is no fault but worth knowing."""
    notes = stragglers(links, [place.host for place in places])
    if shared and len(places) > 1:
        notes.append("ranks of one host read each other's rows in shared memory while training, not by messages")
    if exact is None:
        notes.append("neither PyG nor DGL is installed on every rank, so no model was compared")
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.machine, []).append(place)
    for here in hosts.values():
        cores = len({core for place in here for core in place.cores})
        if len(here) > cores:
            notes.append(f"{here[0].host} runs {len(here)} ranks on {_count(cores, 'core')}, so they take turns")
    return notes


def _ranges(ranks: list[int]) -> str:
    """Increasing numbers as people write them: ``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
