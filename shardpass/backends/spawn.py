"""Start ranks from one running program: as threads, at once or in turn, or as processes of this machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from shardpass.backends.communicator import Communicator
from shardpass.backends.failure import reason_of
from shardpass.backends.threads import ThreadCommunicator, ThreadWorld
from shardpass.errors import CommunicationError, PeerFailure

T = TypeVar("T")
_GRACE = 10.0  # seconds that the other ranks get to end after the first failure


def spawn(
    fn: Callable[..., T],
    ranks: int,
    backend: Literal["threads", "in_turn", "processes"] = "threads",
    *,
    args: tuple[Any, ...] = (),
    device: torch.device | str = "cpu",
    timeout: float | None = None,
) -> list[T]:
    """What ``fn(comm, *args)`` returned on each rank, in rank order.

    Args:
        fn: the program of one rank. For processes it must be importable: defined at module level of a file whose
            script part stands under ``if __name__ == "__main__":``. Its result must be picklable.
        ranks: how many.
        backend: ``"threads"`` of this process; ``"in_turn"``, threads of which one computes at a time, until it waits
            for another (with `offload`, what waits takes less memory); or ``"processes"`` (gloo over the loopback
            interface).
        args: further arguments, the same on every rank.
        device: of the tensors; ``"cuda"`` gives rank r the device r modulo the number of devices (processes only).
        timeout: seconds a wait for another rank may take; 30 minutes by default.

    Raises:
        BaseException: what the first failing rank raised; all other ranks have been ended by then.
        CommunicationError: when a rank's process died without an exception.
    """
    if backend in ("threads", "in_turn"):
        return _spawn_threads(fn, ThreadWorld(ranks, device, in_turn=backend == "in_turn"), args, timeout)
    if backend == "processes":
        from shardpass.backends.processes import spawn_processes

        return spawn_processes(fn, ranks, args, str(device), timeout)
    raise ValueError(f"spawn: the backend is {backend!r}, but known are 'threads', 'in_turn' and 'processes'")


class _Run:
    """The ranks' results and the first failure, filled by their threads."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world = world
        self.results: list[Any] = [None] * world.size
        self.first: tuple[int, BaseException] | None = None
        self.lock = threading.Lock()

    def rank(self, fn: Callable[..., Any], comm: ThreadCommunicator, args: tuple[Any, ...]) -> None:
        """One rank's thread."""
        try:
            with self.world.turn.held():
                self.results[comm.rank] = fn(comm, *args)
        except BaseException as error:
            follows = isinstance(error, PeerFailure)  # its cause is another rank's exception, which is on its way
            with self.lock:
                if self.first is None or (isinstance(self.first[1], PeerFailure) and not follows):
                    self.first = (comm.rank, error)
            if not follows:
                self.world.fail(comm.rank, reason_of(error))
        finally:
            comm.end()


def _spawn_threads(fn: Callable[..., T], world: ThreadWorld, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    run = _Run(world)
    threads: list[threading.Thread] = []
    for comm in world.communicators():
        comm.timeout = comm.timeout if timeout is None else timeout
        target, name = run.rank, f"shardpass rank {comm.rank}"
        threads.append(threading.Thread(target=target, args=(fn, comm, args), name=name, daemon=True))
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and run.first is None:
                thread.join(0.1)
    except BaseException as error:  # KeyboardInterrupt, above all
        world.fail(0, f"the program that started the ranks: {reason_of(error)}")
        _join_shortly(threads)
        raise
    _join_shortly(threads)
    if run.first is not None:
        rank, cause = run.first
        note_rank(cause, rank)
        raise cause
    return run.results


def _join_shortly(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.is_alive():
            thread.join(_GRACE)


def note_rank(error: BaseException, rank: int) -> None:
    """Add to ``error`` on which rank it was raised."""
    if hasattr(error, "add_note"):  # Python 3.11
        with contextlib.suppress(Exception):
            error.add_note(f"(raised on rank {rank})")


def end_local(comm: Communicator) -> None:
    """Close ``comm``, whatever state it is in."""
    with contextlib.suppress(CommunicationError):
        comm.close()
