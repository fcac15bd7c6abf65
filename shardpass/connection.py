"""`connect`, `spawn`, `this_process`: a backend makes communicators, which become `Ranks` of the engine."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardpass import backends
from shardpass.backends import Communicator, lacks_cheap_tensors
from shardpass.core.ranks import (
    Ranks,
    plain_of,
    require_callable,
    require_count,
    require_device,
    require_path,
    torch_private,
)
from shardpass.errors import shorten_tracebacks

T = TypeVar("T")
_SLOW_TENSORS = "fresh tensors cost up to a third of an epoch's CPU time: `{}` before Python starts"
_MOST_RANKS = 4096  # of one machine: threads and processes beyond take its memory before anything else fails


def connect(
    backend: str | DeviceMesh = "auto",
    *,
    ranks: int | None = None,
    device: torch.device | str = "cpu",
    group: Any = None,
    timeout: float = backends.DEFAULT_TIMEOUT,
    connect_timeout: float | None = None,
    host_timeout: float | None = None,
    black_box: str | os.PathLike[str] | None = None,
) -> Ranks:
    """This process's end of the run it was started in. Collective over the processes of the run.

    ``"auto"`` takes, in this order: a torch.distributed process group that exists; torchrun's RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT; an MPI launcher; an srun step; a single process.

    With more than one rank, an exception that ends this process's script also ends the other ranks, with its words:
    `sys.excepthook` is extended for that (the one in place runs first). A rank that its launcher ends with SIGTERM says
    why, if nothing else handles this signal. An error of shardpass is shown with the lines of your own files alone.

    Ranks that share cores divide them, unless the environment variable ``OMP_NUM_THREADS`` is set: torch's computing
    threads (`torch.set_num_threads`) become at most the usable cores divided by the ranks on them, never more.

    Args:
        backend: ``"auto"``, ``"local"``, ``"torch_distributed"`` or ``"mpi"``. Threads are started with `spawn`. Or a
            `DeviceMesh` of one dimension, whose processes share the graph: ``connect(mesh["graph"])``.
        ranks: the number of ranks expected, checked.
        device: of the tensors; ``"cuda"`` takes the device of the local rank.
        group: a process group (torch_distributed) or an mpi4py communicator (mpi) to use instead of all processes.
        timeout: seconds a wait for another rank may take. A dead rank is found by other means, and at once.
        connect_timeout: seconds the other ranks may take to come; default: ``SHARDPASS_CONNECT_TIMEOUT``, or 60.
        host_timeout: seconds until a host that is silent is lost, with all ranks; default: ``SHARDPASS_HOST_TIMEOUT``,
            or 30. A process that is stopped or slow is waited for.
        black_box: the folder in which each rank writes its last calls if the run ends badly; none if it is empty;
            default: ``SHARDPASS_BLACK_BOX``, or the folder for temporary files. `shardpass doctor` reads them.

    Raises:
        CommunicationError: when the other ranks cannot be reached, or are more or fewer than the launcher started.
        ValueError: for an unknown backend, a mesh of several dimensions or without this process, or other ``ranks``.
    """
    shorten_tracebacks()
    require_device(device, "connect(device=)")
    seconds = _seconds("connect", timeout=timeout, connect_timeout=connect_timeout, host_timeout=host_timeout)
    if black_box is not None:
        require_path(black_box, "connect(black_box=)")
    backend, group = (backend, group) if isinstance(backend, str) else _group_as_first(backend, group)
    comm = backends.connect(backend, ranks=ranks, device=device, group=group, black_box=black_box, **seconds)
    if comm.rank == 0 and (export := lacks_cheap_tensors(os.environ)):
        logging.getLogger("shardpass").info(_SLOW_TENSORS.format(export))
    return Ranks(comm)


def _group_as_first(given: Any, group: Any) -> tuple[str, Any]:
    """The backend and the group where `connect` was given a mesh as its first argument."""
    if not isinstance(given, DeviceMesh):
        raise TypeError(
            f"connect: the first argument is the name of a backend or a DeviceMesh, but got {type(given).__name__}; a "
            f"process group or an mpi4py communicator goes to `group=`"
        )
    if group is not None:
        raise ValueError("connect: got a mesh and `group=`, but a mesh names its ranks itself: leave `group` away")
    return "torch_distributed", given


def this_process() -> Ranks:
    """The ranks of a run of this process alone, for graphs and models that were given none: one for each thread."""
    return _of_thread(threading.get_ident())


@cache
def _of_thread(thread: int) -> Ranks:
    return Ranks(backends.connect("local"))


def spawn(
    fn: Callable[..., T],
    ranks: int,
    backend: Literal["threads", "processes"] = "threads",
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
        backend: ``"threads"`` of this process, or ``"processes"`` (gloo over the loopback interface).
        args: further arguments, the same on every rank.
        device: of the tensors; ``"cuda"`` gives rank r the device r modulo the number of devices (processes only).
        timeout: seconds a wait for another rank may take; 30 minutes by default.

    Raises:
        BaseException: what the first failing rank raised; all other ranks have been ended by then.
        CommunicationError: when a rank's process died without an exception.
    """
    shorten_tracebacks()
    ranks = require_count(ranks, "ranks", "spawn(fn, ranks)", 1, _MOST_RANKS)
    require_callable(fn, "fn", "spawn(fn, ranks)")
    _seconds("spawn", timeout=timeout)
    require_device(device, "spawn(device=)")
    if not isinstance(args, tuple | list):
        raise TypeError(f"spawn(fn, ranks, args=): `args` must be a tuple, but got {type(args).__name__}")
    return backends.spawn(partial(_with_ranks, fn), ranks, backend, args=args, device=device, timeout=timeout)


def _seconds(call: str, **given: Any) -> dict[str, Any]:
    """What is given, where each is a number of seconds or `None`."""
    for name, value in given.items():
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{call}({name}=): a number of seconds is expected, but got {type(value).__name__}")
    return given


def _with_ranks(fn: Callable[..., T], comm: Communicator, *args: Any) -> T:
    return torch_private.tree_map(plain_of, fn(Ranks(comm), *args))  # type: ignore[no-any-return]
