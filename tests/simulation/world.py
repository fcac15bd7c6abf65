"""Ranks of one process of which exactly one runs at a time, and the events that happen between them in simulated time.

[Note: the baton] Every rank has a thread. A thread that waits hands the baton on: it takes the next events out of the
queue, lets them happen, and wakes the thread of the first rank that they let go on. So nothing happens at the same time
as anything else, and what happens next is drawn by one generator. Two runs with one seed are the same run.
"""

from __future__ import annotations

import heapq
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardpass.backends import reason_of
from shardpass.backends.news import News
from shardpass.core.ranks import Ranks
from shardpass.errors import PeerFailure

LOOK_SECONDS = 0.5
HOST_TIMEOUT = 30.0
_MAX_STEPS = 200_000  # a run takes some thousands


DEFECTS = (
    "loses messages",
    "damages messages",
    "does not wait for messages",
    "mixes up tags",
    "passes no failures on",
)


class Killed(BaseException):
    """Unwinds the thread of a rank whose process is killed."""


@dataclass(frozen=True)
class Policy:
    """How the transport behaves, within what the protocol of communicators allows.

    Attributes:
        rendezvous: the share of messages that leave the sender's buffer only when their receiver is there.
        latency: seconds; delays are drawn up to one of these.
        polls: waits look for failures themselves, as over MPI. Otherwise they end when connections break, as over gloo.
        shares_memory: the ranks are on one host.
        is_direct: rows travel as they do by NCCL: without tags, in the order of the calls, each rank doing one at a
            time.
        defect: what the transport does wrong on purpose, to see that it is found: one of `DEFECTS`.
    """

    rendezvous: float = 0.5
    latency: tuple[float, ...] = (1e-5, 1e-3, 0.1)
    polls: bool = False
    shares_memory: bool = False
    is_direct: bool = False
    defect: str = ""


class Process:
    """One rank: its thread, what it has heard from the others, and how it ended.

    Attributes:
        state: ``"runs"``, ``"ended"`` or ``"killed"``.
        counts: how many points of each kind the rank has come to.
        stopped_until: the simulated time at which a stopped process goes on.
        error: what its program raised.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.state = "runs"
        self.counts: Counter[str] = Counter()
        self.stopped_until = 0.0
        self.result: Any = None
        self.error: BaseException | None = None
        self.stack = ""
        self.epoch = 0  # of its waits
        self.ready: Callable[[], bool] | None = None
        self.lock = threading.Lock()
        self.lock.acquire()
        self.random_state = torch.get_rng_state()
        self.is_doomed = False
        self.said: list[str] = []
        self.comms: dict[str, Any] = {}
        self.gone: set[int] = set()  # ranks whose connections are closed
        self.listeners = {other: _Line(world, rank, other) for other in range(world.size) if other != rank}
        self.news = _News(self, world)


class _News(News):
    def __init__(self, process: Process, world: World) -> None:
        super().__init__(process.listeners, process.rank, HOST_TIMEOUT, world)
        self._process = process

    def say(self, text: str) -> None:
        self._process.said.append(text)


class _Line:
    """The connection of the news from one rank to another one."""

    def __init__(self, world: World, source: int, to: int) -> None:
        self._world, self._source, self._to = world, source, to

    def send(self, record: Any) -> None:
        """Send a record, which arrives after those before it."""
        world, record = self._world, list(record)
        if world.policy.defect == "passes no failures on" and record[0] == "failed":
            return
        if not world.is_cut(self._source, self._to):
            world.at(("news", self._source, self._to), self._to, lambda: self._arrive(record), f"news {record[0]}")

    def _arrive(self, record: list[str]) -> None:
        process = self._world.processes[self._to]
        if process.state == "runs":
            process.news.hear(self._source, [record])


@dataclass
class World:
    """The simulated world of `size` ranks.

    Args:
        size: how many ranks.
        seed: draws what happens next.
        policy: of the transport.
        timeout: seconds that a wait of a rank may take.
        on_point: called with a process and the kind of point that it has come to; a fault may happen there.
    """

    size: int
    seed: int
    policy: Policy = Policy()
    timeout: float = 60.0
    on_point: Callable[[Process, str], None] = lambda process, kind: None
    trace: list[str] | None = None
    now: float = 0.0
    steps: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.processes: list[Process] = []
        self.processes += [Process(self, rank) for rank in range(self.size)]
        self.current: Process | None = None
        self.channels: dict[str, Any] = {}
        self.cuts: set[tuple[int, int]] = set()
        self._events: list[tuple[float, int, int, Callable[[], Any], str]] = []
        self._order = 0
        self._last: dict[Any, float] = {}
        self._finished = threading.Lock()
        self._finished.acquire()
        self._moved = 0.0

    # ---- time

    def monotonic(self) -> float:
        """See `Clock`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """See `Clock`. It is the running rank that sleeps."""
        until = self.now + seconds
        self.wait(lambda: self.now >= until, seconds)

    def note(self, text: str) -> None:
        """Write a step down, if somebody wants to read it."""
        if self.trace is not None:
            self.trace.append(f"{self.now:12.6f}  {text}")

    # ---- events

    def delay(self) -> float:
        """Seconds that something takes."""
        return self.random.choice(self.policy.latency) * self.random.random()

    def at(self, line: Any, owner: int, action: Callable[[], Any], text: str, seconds: float | None = None) -> float:
        """Have something happen at rank `owner` after a while, and after what was put on the same `line` before it.

        Returns:
            When.
        """
        when = max(self._last.get(line, 0.0), self.now + (self.delay() if seconds is None else seconds))
        if line is not None:
            self._last[line] = when
        self._order += 1
        heapq.heappush(self._events, (when, self._order, owner, action, text))
        return when

    def latest(self, line: Any, when: float) -> None:
        """Have what is put on a `line` from now on come after `when`."""
        self._last[line] = max(self._last.get(line, 0.0), when)

    def _next(self) -> Process | None:
        """The process that goes on next, after the events before it; `None` if all have ended."""
        while True:
            self._wake()
            if all(process.state != "runs" for process in self.processes):
                return None
            is_late = self.now - self._moved > 20 * self.timeout + 2 * HOST_TIMEOUT
            if not self._events or is_late or self.steps > _MAX_STEPS:
                self._give_up()
                continue
            when, _, owner, action, text = heapq.heappop(self._events)
            process = self.processes[owner]
            if process.state == "runs" and process.stopped_until > when:
                self._order += 1
                heapq.heappush(self._events, (process.stopped_until, self._order, owner, action, text))
                continue
            self.now = max(self.now, when)
            self.steps += 1
            if text:
                self.note(f"rank {owner}: {text}")
            found = action()
            if isinstance(found, Process):
                return found

    def _give_up(self) -> None:
        """Nothing can happen any more: the worst that a seed can find."""
        if "hang" not in self.problems:
            self.problems.append("hang")
        self._moved, self.steps = self.now, 0
        for process in self.processes:
            if process.state == "runs":
                self.doom(process)

    def _wake(self) -> None:
        for process in self.processes:
            if process.ready is not None and process.state == "runs" and (process.is_doomed or process.ready()):
                process.ready = None
                self.at(None, process.rank, lambda process=process: process, "goes on")

    # ---- ranks

    def wait(self, ready: Callable[[], bool], timeout: float) -> None:
        """Return once `ready()`, or after `timeout` seconds. Called by the running rank."""
        process = self.current
        assert process is not None
        self.point(process, "step")
        process.epoch += 1
        epoch, over = process.epoch, []

        def expire() -> None:
            if process.epoch == epoch:
                over.append(True)

        process.ready = lambda: bool(over) or ready()
        if not process.ready():
            self.at(None, process.rank, expire, "", timeout)
        self.hand_on(process)
        process.epoch += 1

    def hand_on(self, process: Process) -> None:
        """Let others run until it is this rank's turn again."""
        other = self._next()
        assert other is not None
        if other is not process:
            process.random_state = torch.get_rng_state()  # each process would have a generator of its own
            self.current = other
            other.lock.release()
            process.lock.acquire()
            torch.set_rng_state(process.random_state)
        self._moved = self.now
        if process.is_doomed:
            raise Killed

    def point(self, process: Process, kind: str) -> None:
        """A point of a kind at which a fault may happen to the running rank."""
        if process.is_doomed:
            raise Killed
        process.counts[kind] += 1
        self.on_point(process, kind)
        if process.stopped_until > self.now:
            process.ready = lambda: True
            self.hand_on(process)
        if process.is_doomed:
            raise Killed

    def doom(self, process: Process) -> None:
        """Kill a rank: its thread is unwound as soon as it runs, and says nothing to anybody."""
        process.is_doomed = True
        process.stopped_until = 0.0

    def run(self, fn: Callable[..., Any], communicator: Callable[..., Any]) -> None:
        """Run ``fn(comm, process)`` on every rank, until all have ended."""
        threads = [
            threading.Thread(target=self._rank, args=(process, fn, communicator), name=f"simulated rank {process.rank}")
            for process in self.processes
        ]
        for process, thread in zip(self.processes, threads):
            self._tick(process)
            process.ready = lambda: True
            thread.start()
        first = self._next()
        assert first is not None
        state = torch.get_rng_state()
        self.current = first
        first.lock.release()
        self._finished.acquire()
        for thread in threads:
            thread.join()
        torch.set_rng_state(state)

    def _tick(self, process: Process) -> None:
        """The thread that listens looks twice a second, as `Watch` has it."""

        def look() -> None:
            if process.state == "runs":
                if not process.news.failure.happened:
                    process.news.look()
                self._tick(process)

        if self.size > 1:
            self.at(None, process.rank, look, "", LOOK_SECONDS * (1 + self.random.random() / 100))

    def _rank(self, process: Process, fn: Callable[..., Any], communicator: Callable[..., Any]) -> None:
        process.lock.acquire()
        torch.set_rng_state(process.random_state)
        comm = communicator(self, process)
        try:
            if process.is_doomed:
                raise Killed
            process.result = fn(Ranks(comm), process)
            self._end(process, "ended")
        except Killed:
            self._end(process, "killed")
        except BaseException as error:
            process.error = error
            if self.trace is not None:
                process.stack = traceback.format_exc()
            self.note(f"rank {process.rank}: raises {reason_of(error)[:300]}")
            error.with_traceback(None)
            if not isinstance(error, (PeerFailure, SystemExit)):  # as `ending` has it for a process
                comm.announce(reason_of(error))
            self._end(process, "ended")
        del comm
        following = self._next()
        self.current = following
        (self._finished if following is None else following.lock).release()

    def _end(self, process: Process, state: str) -> None:
        """End a process. What it has told arrives before the end of its connections."""
        if state == "ended" and self.size > 1:
            process.news.tell_end()
        process.state = state
        self.note(f"rank {process.rank}: {state}")
        for other in self.processes:
            if other is not process:
                self.hang_up(process.rank, other.rank)

    # ---- connections

    def is_cut(self, one: int, other: int) -> bool:
        """Whether nothing travels between two ranks any more."""
        return (one, other) in self.cuts

    def hang_up(self, rank: int, other: int, error: Exception | None = None) -> None:
        """Have `other` see that its connections with `rank` are closed."""
        error = EOFError() if error is None else error
        data = self._last.get(("data", rank, other), 0.0)
        seconds = max(0.0, data - self.now) + self.delay()
        self.at(("data", rank, other), other, lambda: self._see_closed(rank, other), f"loses rank {rank}", seconds)
        self.at(("news", rank, other), other, lambda: self._lose(rank, other, error), f"loses the news of rank {rank}")

    def _see_closed(self, rank: int, other: int) -> None:
        process = self.processes[other]
        process.gone.add(rank)
        for comm in process.comms.values():
            comm.lost.add(rank)

    def _lose(self, rank: int, other: int, error: Exception) -> None:
        process = self.processes[other]
        if process.state == "runs" and rank in process.listeners:
            del process.listeners[rank]
            process.news.lose(rank, error)

    def cut(self, one: int, other: int) -> None:
        """Close the connections between two ranks from outside: both see it, and what was under way is gone."""
        self.cuts |= {(one, other), (other, one)}
        for rank, peer in ((one, other), (other, one)):
            self.hang_up(rank, peer, ConnectionResetError(104, "Connection reset by peer"))

    def unplug(self, one: int, other: int) -> None:
        """Have nothing arrive between two ranks any more. Only TCP notices, after a while."""
        self.cuts |= {(one, other), (other, one)}
        error = TimeoutError(110, "Connection timed out")
        for rank, peer in ((one, other), (other, one)):
            seconds = (0.8 + 0.15 * self.random.random()) * HOST_TIMEOUT
            self.at(None, peer, lambda rank=rank, peer=peer: self._lose(rank, peer, error), "TCP gives up", seconds)
