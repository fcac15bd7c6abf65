"""Start ranks from one running program, as threads or as processes of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal, TypeVar

import torch

from shardpass.backends.failure import add_note, reason_of
from shardpass.backends.processes import spawn_processes
from shardpass.backends.threads import ThreadCommunicator, ThreadWorld
from shardpass.backends.turn import random_states
from shardpass.errors import PeerFailure

T = TypeVar("T")
_GRACE = 10.0  # seconds that the other ranks get to end after the first failure


def spawn(
    fn: Callable[..., T],
    ranks: int,
    backend: Literal["threads", "processes"] = "threads",
    *,
    args: tuple[Any, ...] = (),
    device: torch.device | str = "cpu",
    timeout: float | None = None,
) -> list[T]:
    """What ``fn(comm, *args)`` returned on each rank, in rank order. See `shardpass.spawn`.

    Raises:
        BaseException: what the first failing rank raised. All other ranks have ended by then.
        CommunicationError: a rank's process died without an exception.
    """
    if backend == "threads":
        return _spawn_threads(fn, ThreadWorld(ranks, device), args, timeout)
    if backend == "processes":
        return spawn_processes(fn, ranks, args, str(device), timeout)
    raise ValueError(f"spawn: the backend is {backend!r}, but it must be 'threads' or 'processes'")


class _ThreadRun:
    """The results of the ranks and their first failure, which their threads fill in."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world = world
        self.states = random_states()  # which every rank begins with
        self.results: list[Any] = [None] * world.size
        self.first: tuple[int, BaseException] | None = None
        self._lock = threading.Lock()

    def rank(self, fn: Callable[..., Any], comm: ThreadCommunicator, args: tuple[Any, ...]) -> None:
        """Run the program of one rank in this thread."""
        try:
            self.world.turn.take(self.states, comm.timeout)
            self.results[comm.rank] = fn(comm, *args)
        except BaseException as error:
            follows = isinstance(error, PeerFailure)  # its cause is another rank's exception, which is on its way
            with self._lock:
                if self.first is None or (isinstance(self.first[1], PeerFailure) and not follows):
                    self.first = (comm.rank, error)
            if not follows:
                comm.announce(reason_of(error))
            comm.with_note(error)
        finally:
            comm.end()


def _spawn_threads(fn: Callable[..., T], world: ThreadWorld, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    run = _ThreadRun(world)
    threads: list[threading.Thread] = []
    for comm in world.communicators():
        comm.timeout = comm.timeout if timeout is None else timeout
        name = f"shardpass rank {comm.rank}"
        threads.append(threading.Thread(target=run.rank, args=(fn, comm, args), name=name, daemon=True))
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and run.first is None:
                thread.join(0.1)
    except BaseException as error:  # KeyboardInterrupt, above all
        world.fail(f"the program that started the ranks failed first: {reason_of(error)}")
        _join_shortly(threads)
        raise
    _join_shortly(threads)
    if run.first is not None:
        rank, cause = run.first
        add_note(cause, f"(raised on rank {rank})")
        raise cause
    return run.results


def _join_shortly(threads: list[threading.Thread]) -> None:
    """Return when all have ended, or have had the time to. A thread that goes on computing cannot be ended."""
    deadline = monotonic() + _GRACE
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
