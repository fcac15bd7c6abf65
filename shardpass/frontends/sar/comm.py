"""Ranks, parameters and gradients under SAR's names, and how ranks learn the address of rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor, nn

from shardpass import backends
from shardpass.backends import TIMEOUT_VARIABLE
from shardpass.core.ranks import Ranks
from shardpass.core.training import sync_gradients, sync_parameters
from shardpass.errors import CommunicationError
from shardpass.frontends.sar._state import STATE, communicator
from shardpass.frontends.sar.common_tuples import SocketInfo
from shardpass.frontends.sar.config import agree_on_changes
from shardpass.frontends.sar.ordered import make_ready

BACKENDS = ("gloo", "mpi", "nccl", "ccl")
SOCKET_VARIABLE = "SAR_SOCKET_NAME"
_POLL_SECONDS = 0.1


# ---- joining


def initialize_comms(
    _rank: int, _world_size: int, master_ip_address: str, backend: str,
    _comm_device: torch.device | str | None = None, master_port_number: int = 12345,
) -> None:  # fmt: skip
    """Join the other ranks. Collective; a second call with the same rank and size does nothing.

    With ``"mpi"``, the ranks are those of mpirun, through mpi4py. With any other backend, a ``torch.distributed``
    process group is used if there is one, and made at the given address if not. Messages of graphs then travel over
    gloo, also with ``"ccl"`` and ``"nccl"``; those of GPUs are staged over the CPU. The environment variable
    ``SAR_SOCKET_NAME`` names the network interface to use.

    Args:
        _rank, _world_size: the rank of this process, and how many there are.
        master_ip_address, master_port_number: where rank 0 listens. Unused with ``"mpi"``.
        backend: ``"gloo"``, ``"mpi"``, ``"nccl"`` or ``"ccl"``.
        _comm_device: what `comm_device` answers. By default the current GPU with ``"nccl"``, else the CPU.

    Raises:
        ValueError: the backend is unknown, or rank or size differ from those of the launcher or of an earlier call.
        CommunicationError: some ranks do not join within ``SHARDPASS_CONNECT_TIMEOUT`` (60) seconds. It names them.
    """
    if not isinstance(_rank, int) or not isinstance(_world_size, int) or not 0 <= _rank < _world_size:
        raise ValueError(
            f"initialize_comms: rank {_rank!r} of {_world_size!r}; expected integers, 0 <= rank < world_size"
        )
    if backend not in BACKENDS:
        raise ValueError(f"initialize_comms: the backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if STATE.comm is not None:
        return _check_same(_rank, _world_size, STATE.comm, "initialize_comms was called before")
    if os.environ.get(SOCKET_VARIABLE):
        variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        os.environ |= dict.fromkeys(variables, get_socket().name)
    on_gpu = backend == "nccl" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    told_device = device if _comm_device is None else torch.device(_comm_device)
    if backend == "mpi":
        comm = Ranks(backends.connect("mpi", ranks=_world_size))
    else:
        launch = backends.Launch("torchrun", _world_size, _rank, master_ip_address, master_port_number, "world_size")
        comm = Ranks(backends.connect("torch_distributed", device=device, launch=launch))
    _check_same(_rank, _world_size, comm, "the launcher or the process group says")
    comm.move_to(torch.device("cpu"))  # until a graph says on which device its tensors are
    STATE.comm, STATE.comm_device, STATE.backend = comm, told_device, backend
    STATE.master_ip, STATE.master_port = master_ip_address, master_port_number
    comm.barrier("initialize_comms")
    while STATE.on_connected:
        STATE.on_connected.pop()()
    logging.getLogger("shardpass.sar").info(
        "rank %d of %d has joined over %s", _rank, _world_size, type(comm.inner).__name__
    )


def _check_same(rank: int, size: int, known: Ranks, who: str) -> None:
    if (rank, size) != (known.rank, known.size):
        raise ValueError(
            f"initialize_comms: this process is to be rank {rank} of {size}, but {who}: rank {known.rank} of "
            f"{known.size}. Pass those"
        )


def is_initialized() -> bool:
    """Whether `initialize_comms` was called."""
    return STATE.comm is not None


def rank() -> int:
    """The rank of this process."""
    return communicator().rank


def world_size() -> int:
    """How many ranks there are."""
    return communicator().size


def comm_device() -> torch.device:
    """The communication device that `initialize_comms` was given. Graphs do not use it."""
    communicator()
    return STATE.comm_device


def master_ip() -> str:
    """The address that `initialize_comms` was given."""
    communicator()
    return STATE.master_ip


def master_port() -> int:
    """The port that `initialize_comms` was given."""
    communicator()
    return STATE.master_port


def backend() -> str:
    """The backend that `initialize_comms` was given."""
    communicator()
    return STATE.backend


# ---- the address of rank 0


def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """The IP address of rank 0, which rank 0 writes to `ip_file` and the others read there. Returns once it is known.

    `ip_file` may be on any file system that all ranks see. A rank takes an address only if rank 0 of a run that is just
    starting answers there, so a file that an earlier run has left is not used. Rank 0 removes the file when all ranks
    have joined (`initialize_comms`).

    Raises:
        CommunicationError: no rank 0 of a starting run was found within ``SHARDPASS_CONNECT_TIMEOUT`` (60) seconds.
    """
    if _rank == 0:
        return _publish(Path(ip_file))
    return _find(Path(ip_file), _rank, float(os.environ.get(TIMEOUT_VARIABLE, "60")))


def get_socket() -> SocketInfo:
    """The network interface in ``SAR_SOCKET_NAME``, and its IPv4 address. A `ValueError` if it has none.

    Without that the name is empty, and the system chooses the interface that reaches other hosts.
    """
    name = os.environ.get(SOCKET_VARIABLE, "")
    if name:
        found = backends.addresses_of(name)
        if not found:
            known = ", ".join(other for _, other in socket.if_nameindex())
            raise ValueError(
                f"{SOCKET_VARIABLE}={name!r} is no network interface of {socket.gethostname()} with an IPv4 address, "
                f"which has: {known}"
            )
        return SocketInfo(name, found[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which interface would be used
        return SocketInfo(name, str(probe.getsockname()[0]))
    return SocketInfo(name, "127.0.0.1")


def get_ip_address(ip_file: str) -> str:
    """The address in a file that `nfs_ip_init` or `dump_ip_address` wrote."""
    return Path(ip_file).read_text(encoding="utf-8").split()[0]


def dump_ip_address(ip_file: str) -> str:
    """Write this host's address to a file, and return it. `nfs_ip_init` also sees to it that all ranks find it."""
    ip = get_socket().ip_addr
    Path(ip_file).write_text(f"{ip}\n", encoding="utf-8")
    return ip


def _publish(path: Path) -> str:
    """Write this host's address, and have a process answer on a port of it until all ranks have come."""
    ip, token = get_socket().ip_addr, secrets.token_hex(16)
    with socket.create_server((ip, 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("answering.py")), str(listener.fileno())]
        answering = subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], text=True)
    pipe = answering.stdin
    assert pipe is not None
    pipe.write(f"{token}\n")
    pipe.flush()
    temporary = path.with_name(f"{path.name}.{token}")
    temporary.write_text(f"{ip}\n{port} {token}\n", encoding="utf-8")
    os.replace(temporary, path)

    def end() -> None:
        pipe.close()
        answering.wait()
        if any(found == token for _, _, found in _read(path)):
            path.unlink(missing_ok=True)

    STATE.on_connected.append(end)
    return ip


def _find(path: Path, rank: int, limit: float) -> str:
    deadline, stale = monotonic() + limit, ""
    while monotonic() < deadline:
        for stale, port, token in _read(path):
            with contextlib.suppress(OSError), socket.create_connection((stale, port), timeout=2.0) as peer:
                if peer.recv(len(token)) == token.encode():
                    return stale
        sleep(_POLL_SECONDS)
    if stale:
        found = f"names {stale}, where no starting rank 0 answers: it was left by an earlier run"
    else:
        found = "was written by something else" if path.exists() else "does not exist"
    raise CommunicationError(
        f"rank {rank} waited {limit:.0f} s for rank 0 to write its address, but {path} {found}. Was rank 0 started "
        f"with this file, and do all ranks see it? {TIMEOUT_VARIABLE} gives slow starters more seconds"
    )


def _read(path: Path) -> Iterator[tuple[str, int, str]]:
    """The address, port and token in the file, if `nfs_ip_init` wrote it."""
    with contextlib.suppress(OSError, ValueError):
        ip, port, token = path.read_text(encoding="utf-8").split()
        yield ip, int(port), token


# ---- parameters, gradients and tensors


def sync_params(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, and make the model ready for sharded graphs. Collective.

    Modules of ``dgl.nn`` that need more than message passing are adapted, or refused by name. From then on, backward of
    the model visits every call of its forward on every rank, whatever part of its outputs the rank's loss uses.

    Raises:
        ValueError: ranks passed different models (on every rank).
        RefusedError: the model holds a layer that cannot be exact on a sharded graph.
    """
    make_ready(model)
    sync_parameters(model, communicator())


def gather_grads(model: nn.Module) -> None:
    """Sum the gradients of the parameters over ranks, in place; see `shardpass.sync_gradients`. Collective."""
    sync_gradients(model, communicator())


def all_reduce(red_tensor: Tensor, op: Any = "sum", move_to_comm_device: bool = False) -> None:
    """Reduce `red_tensor` over ranks, in place. Collective. No gradient flows through it.

    It has the same shape and dtype on every rank, and may be on any device: `move_to_comm_device` is ignored. `op` is
    SUM, MAX, MIN or PRODUCT of ``torch.distributed.ReduceOp``, or its name.
    """
    name = str(op).split(".")[-1].lower().replace("product", "prod")
    if name not in ("sum", "max", "min", "prod"):
        raise ValueError(f"all_reduce: the operation is {op!r}; expected SUM, MAX, MIN or PRODUCT")
    comm = communicator()
    with torch.no_grad():
        reduced = comm.all_reduce(red_tensor.detach().contiguous().to(comm.device), name, "all_reduce")  # type: ignore[arg-type]
        red_tensor.copy_(reduced)


def exchange_tensors(tensors: Sequence[Tensor], recv_sizes: Sequence[int] | None = None) -> list[Tensor]:
    """Send ``tensors[r]`` to each rank r, and return what came from each rank, in rank order. Collective.

    Only first dimensions may differ. A `ValueError` if there is not one tensor for each rank, or if other numbers of
    rows come than `recv_sizes` says.
    """
    return _exchanged(tensors, recv_sizes, "exchange_tensors")


def all_to_all(
    recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor], move_to_comm_device: bool = False
) -> None:
    """Send ``send_tensors[r]`` to each rank r, and fill ``recv_tensors[r]`` with what came from it. Collective.

    Only first dimensions may differ. Tensors are moved where they must be, so `move_to_comm_device` is ignored. A
    `ValueError` if there is not one tensor for each rank, or if one that came does not fit.
    """
    found = _exchanged(send_tensors, [tensor.size(0) for tensor in recv_tensors], "all_to_all")
    with torch.no_grad():
        for into, came in zip(recv_tensors, found):
            into.copy_(came)


def all_to_all_rounds(recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor]) -> None:
    """See `all_to_all`."""
    all_to_all(recv_tensors, send_tensors)


def all_to_all_gloo_support(recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor]) -> None:
    """See `all_to_all`."""
    all_to_all(recv_tensors, send_tensors)


def exchange_single_tensor(recv_idx: int, send_idx: int, recv_tensor: Tensor, send_tensor: Tensor) -> None:
    """Send `send_tensor` to rank `send_idx`, and fill `recv_tensor` with what comes from rank `recv_idx`. Collective.

    Every rank calls it, and a rank that sends to another one is received from there.
    """
    size = communicator().size
    sent = [send_tensor if other == send_idx else send_tensor[:0] for other in range(size)]
    rows = [recv_tensor.size(0) if other == recv_idx else 0 for other in range(size)]
    with torch.no_grad():
        recv_tensor.copy_(_exchanged(sent, rows, "exchange_single_tensor")[recv_idx])


def _exchanged(tensors: Sequence[Tensor], rows: Sequence[int] | None, who: str) -> list[Tensor]:
    comm = communicator()
    if any(len(given) != comm.size for given in (tensors, tensors if rows is None else rows)):
        raise ValueError(f"{who}: expected one tensor for each of {comm.size} ranks, found {len(tensors)}")
    agree_on_changes(comm)
    with torch.no_grad():
        found = comm.all_to_all([tensor.detach().contiguous().to(comm.device) for tensor in tensors], who)
    came = [tensor.size(0) for tensor in found]
    if rows is not None and came != list(rows):
        raise ValueError(f"{who} on rank {comm.rank}: expected {list(rows)} rows from the ranks, found {came}")
    return [tensor.to(sent.device) for tensor, sent in zip(found, tensors)]
