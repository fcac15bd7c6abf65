"""`spawn` over operating-system processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.failure import add_note, first_failure, reason_of
from shardpass.backends.hosts import CHEAP_TENSORS
from shardpass.errors import CommunicationError, PeerFailure, RemoteTracebackError, shorten

_GRACE = 8.0  # seconds that the other ranks get to end by themselves after the first failure
_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 120.0  # processes of one machine start at their own pace
_NAME = "shardpass rank"  # of the processes, before the rank
_IMPORTED = b"imported"


@dataclass(frozen=True)
class _Answer:
    """What became of a rank: the result of its function, or an exception with its traceback as text."""

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""


@dataclass
class _Child:
    """The process of one rank as its parent sees it."""

    rank: int
    process: SpawnProcess
    pipe: Connection
    has_imported: bool = False
    answer: _Answer | None = None

    def give(self, work: bytes) -> None:
        """Wait until the process has imported the script, and send it its work. Nothing if the process has died."""
        with contextlib.suppress(EOFError, OSError):
            self.has_imported = self.pipe.recv_bytes() == _IMPORTED
            self.pipe.send_bytes(work)

    def receive(self) -> _Answer:
        """Receive the answer, which is on its way unless the process has died."""
        try:
            self.answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5.0)
            self.answer = _Answer(error=CommunicationError(first_failure(self.rank, self._cause_of_death())))
        return self.answer

    def _cause_of_death(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(-code).name}{hint}"
        if self.has_imported:
            return f"its process ended with exit code {code} before its function returned"
        return (
            "every process imports your script before it calls the function, and this one ended there: put the call "
            'of spawn, and all else that the ranks should not do, under `if __name__ == "__main__":`'
        )


def spawn_processes(
    fn: Callable[..., Any], ranks: int, args: tuple[Any, ...], device: str, timeout: float | None
) -> list[Any]:
    """See `spawn`."""
    try:
        work = pickle.dumps((fn, args, device, timeout))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"spawn(backend='processes') sends the function and its arguments to other processes, but they cannot be "
            f"pickled ({error}): define the function at module level, or use backend='threads'"
        ) from error
    listener = socket.create_server((_LOOPBACK, 0))  # by itself, the store would listen on every interface
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    context = multiprocessing.get_context("spawn")
    children: list[_Child] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(theirs, rank, ranks, store.port), name=f"{_NAME} {rank}", daemon=False
            )
            with _cheap_tensors():
                _start(process)
            theirs.close()
            children.append(_Child(rank, process, ours))
        for child in children:  # not as an argument of the process: `start` would wait for one that has died to read it
            child.give(work)
        answers = _answers(children)
    finally:
        _end(children)
    return [answer.result for answer in answers]


def _start(process: SpawnProcess) -> None:
    try:
        process.start()
    except RuntimeError:  # this process is still importing its script, which has no main guard
        if multiprocessing.current_process().name.startswith(_NAME):
            sys.exit(1)  # whoever has started it says so
        raise


@contextlib.contextmanager
def _cheap_tensors() -> Iterator[None]:
    """Processes that are started here have `CHEAP_TENSORS`, but for what this one's environment decides."""
    added = {name: value for name, value in CHEAP_TENSORS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _answers(children: list[_Child]) -> list[_Answer]:
    """The answers in rank order. Raises the first failure, once the other ranks have ended or had time to."""
    missing = {child.pipe: child for child in children}
    failed: list[tuple[int, BaseException, str]] = []  # in order of arrival
    deadline: float | None = None
    while missing:
        left = None if deadline is None else max(0.0, deadline - monotonic())
        ready = wait(list(missing), timeout=left)
        if not ready:
            break
        for pipe in ready:
            child = missing.pop(pipe)  # type: ignore[arg-type, call-overload]
            answer = child.receive()
            if answer.error is not None:
                failed.append((child.rank, answer.error, answer.traceback))
        if failed and deadline is None:
            deadline = monotonic() + _GRACE
    if failed:
        rank, error, text = min(failed, key=lambda item: isinstance(item[1], PeerFailure))  # a cause, not an effect
        if not text:  # the process has died, and the others have written their last calls
            for note in (note for _, other, _ in failed for note in getattr(other, "__notes__", ())):
                add_note(error, note)
                break
            raise error
        add_note(error, f"(raised on rank {rank})")
        raise error from RemoteTracebackError(text)
    return [child.answer for child in children if child.answer is not None]


def _end(children: list[_Child]) -> None:
    """End all processes. None of them is left when this returns."""
    have_finished = all(child.answer is not None for child in children)
    for child in children:
        if have_finished:
            child.process.join(_GRACE)
        if child.process.is_alive():
            child.process.terminate()
    for child in children:
        child.process.join(2.0)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        child.pipe.close()


def _main(pipe: Connection, rank: int, ranks: int, port: int) -> None:
    """The main program of one rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    comm: BaseCommunicator | None = None
    try:
        pipe.send_bytes(_IMPORTED)
        fn, args, device, timeout = _unpacked(pipe.recv_bytes())
        comm = _connect(rank, ranks, port, device, timeout)
        packed = pickle.dumps(_Answer(fn(comm, *args)))
    except BaseException as error:
        if comm is not None and not isinstance(error, PeerFailure):
            with contextlib.suppress(Exception):
                comm.announce(reason_of(error))
        packed = _pack_error(error if comm is None else comm.with_note(error))
    with contextlib.suppress(OSError):
        pipe.send_bytes(packed)
    if comm is not None:
        comm.close()


def _unpacked(work: bytes) -> Any:
    """The function and what it is given, in the process of a rank.

    Raises:
        ValueError: this process cannot import the function.
    """
    try:
        return pickle.loads(work)
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"spawn(backend='processes') has every process import the function, and it is not there ({error}). If you "
            f"defined it in a notebook or an interactive session, write it to a file and import it from there, or use "
            f"backend='threads'"
        ) from None


def _connect(rank: int, ranks: int, port: int, device: str, timeout: float | None) -> BaseCommunicator:
    from shardpass.backends.torch_distributed import TorchCommunicator  # torch may be built without it

    if device == "cuda":
        device = f"cuda:{rank % max(1, torch.cuda.device_count())}"
    limit = timedelta(seconds=_CONNECT_SECONDS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    comm = TorchCommunicator.from_group(device=device, connect_timeout=_CONNECT_SECONDS, owns_default=True)
    comm.timeout = comm.timeout if timeout is None else timeout
    return comm


def _pack_error(error: BaseException) -> bytes:
    shorten(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        packed = pickle.dumps(_Answer(error=error, traceback=text))
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps(_Answer(error=CommunicationError(reason_of(error)), traceback=text))
    return packed


def _end_with_parent() -> None:
    """End this process when its parent ends, also when the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
