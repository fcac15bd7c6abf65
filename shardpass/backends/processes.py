"""`spawn` over operating-system processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch

from shardpass.backends.failure import reason_of
from shardpass.backends.spawn import note_rank
from shardpass.errors import CommunicationError, PeerFailure

_GRACE = 8.0  # seconds that the other ranks get to end by themselves after the first failure
_CONNECT_SECONDS = 120.0  # processes of one machine start at their own pace


class RemoteTracebackError(Exception):
    """The traceback of the rank's process, shown as the cause of its exception."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def spawn_processes(
    fn: Callable[..., Any], ranks: int, args: tuple[Any, ...], device: str, timeout: float | None
) -> list[Any]:
    """See `spawn`."""
    import torch.distributed as dist

    try:
        work = pickle.dumps((fn, args, device, timeout))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"spawn(backend='processes') sends the function and its arguments to other processes, but they cannot be "
            f"pickled ({error}): define the function at module level, or use backend='threads'"
        ) from error
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    children = _Children()
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_child, args=(theirs, rank, ranks, store.port, work), daemon=False)
            process.start()
            theirs.close()
            children.add(process, ours)
        return children.results()
    finally:
        children.end()


class _Children:
    """The processes of the ranks, and what has come back from them."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._answers: dict[int, tuple[str, Any]] = {}
        self._arrived: list[int] = []

    def add(self, process: Any, pipe: Connection) -> None:
        """One more rank."""
        self._processes.append(process)
        self._pipes.append(pipe)

    def results(self) -> list[Any]:
        """The results in rank order, or raise the first failure."""
        deadline: float | None = None
        while len(self._answers) < len(self._processes):
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in self._answers]
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                break
            for pipe in wait(open_pipes, timeout=left):
                self._take(self._pipes.index(pipe))  # type: ignore[arg-type]
            if deadline is None and any(kind != "result" for kind, _ in self._answers.values()):
                deadline = monotonic() + _GRACE
        self._raise_first()
        return [self._answers[rank][1] for rank in range(len(self._processes))]

    def _take(self, rank: int) -> None:
        try:
            kind, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5.0)
            kind, value = "died", _cause_of_death(rank, self._processes[rank].exitcode)
        self._answers[rank] = (kind, value)
        self._arrived.append(rank)

    def _raise_first(self) -> None:
        failed = [rank for rank in self._arrived if self._answers[rank][0] != "result"]
        if not failed:
            return
        rank = min(failed, key=lambda r: (self._severity(r), self._arrived.index(r)))
        kind, value = self._answers[rank]
        if kind == "died":
            raise CommunicationError(value)
        error, text = value
        note_rank(error, rank)
        raise error from RemoteTracebackError(text)

    def _severity(self, rank: int) -> int:
        """0 for a cause, 1 for what follows from another rank's failure."""
        kind, value = self._answers[rank]
        return int(kind == "error" and isinstance(value[0], PeerFailure))

    def end(self) -> None:
        """No process is left when this returns."""
        finished = len(self._answers) == len(self._processes)
        for process in self._processes:
            if finished:
                process.join(_GRACE)
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()


def _cause_of_death(rank: int, code: int | None) -> str:
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
        return f"rank {rank} failed first: its process {how}{hint}"
    return f"rank {rank} failed first: its process ended with exit code {code} before its function returned"


def _child(pipe: Connection, rank: int, ranks: int, port: int, work: bytes) -> None:
    """The main program of one rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    finished = threading.Event()
    threading.Thread(target=_end_with_parent, args=(os.getppid(), finished), daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    comm: Any = None
    try:
        fn, args, device, timeout = pickle.loads(work)
        comm = _connect(rank, ranks, port, device, timeout)
        answer = ("result", fn(comm, *args))
        packed = pickle.dumps(answer)
    except BaseException as error:
        if comm is not None and not isinstance(error, PeerFailure):
            with contextlib.suppress(Exception):
                comm.announce(reason_of(error))
        packed = _pack_error(error)
    finished.set()
    with contextlib.suppress(OSError):
        pipe.send_bytes(packed)
    if comm is not None:
        comm.close()


def _connect(rank: int, ranks: int, port: int, device: str, timeout: float | None) -> Any:
    import torch.distributed as dist

    from shardpass.backends.torch_distributed import TorchCommunicator

    if device == "cuda":
        device = f"cuda:{rank % max(1, torch.cuda.device_count())}"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS))
    limit = timedelta(seconds=_CONNECT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    comm = TorchCommunicator.from_group(device=device, connect_timeout=_CONNECT_SECONDS, owns_default=True)
    comm.timeout = comm.timeout if timeout is None else timeout
    return comm


def _pack_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        packed = pickle.dumps(("error", (error, text)))
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps(("error", (CommunicationError(reason_of(error)), text)))
    return packed


def _end_with_parent(parent: int, finished: threading.Event) -> None:
    """No orphans, also when the parent is killed."""
    while not finished.wait(1.0):
        if os.getppid() != parent:
            os._exit(1)
