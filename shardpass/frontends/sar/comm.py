"""Ranks, parameters and gradients under SAR's names."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardpass import backends
from shardpass.backends import Launch
from shardpass.core.ranks import Ranks
from shardpass.core.training import sync_gradients, sync_parameters
from shardpass.frontends.sar._state import STATE, communicator
from shardpass.frontends.sar.address import (
    SOCKET_VARIABLE,
    address_of,
    dump_ip_address,
    get_ip_address,
    get_socket,
    nfs_ip_init,
)
from shardpass.frontends.sar.config import agree_on_changes
from shardpass.frontends.sar.ordered import make_ready

__all__ = [
    "all_reduce",
    "all_to_all",
    "all_to_all_gloo_support",
    "all_to_all_rounds",
    "backend",
    "comm_device",
    "dump_ip_address",
    "exchange_single_tensor",
    "exchange_tensors",
    "gather_grads",
    "get_ip_address",
    "get_socket",
    "initialize_comms",
    "is_initialized",
    "master_ip",
    "master_port",
    "nfs_ip_init",
    "rank",
    "sync_params",
    "world_size",
]

BACKENDS = ("gloo", "mpi", "nccl", "ccl")


def initialize_comms(
    _rank: int,
    _world_size: int,
    master_ip_address: str,
    backend: str,
    _comm_device: torch.device | str | None = None,
    master_port_number: int = 12345,
) -> None:
    """Join the other ranks. Collective; a second call with the same rank and size does nothing.

    With ``"mpi"``, the ranks are those of mpirun, through mpi4py. With any other backend, a ``torch.distributed``
    process group is used if there is one, and made at the given address if not. Messages of graphs then travel over
    gloo, also with ``"ccl"`` and ``"nccl"``; those of GPUs are staged over the CPU. The environment variable
    ``SAR_SOCKET_NAME`` names the network interface to use.

    Args:
        _rank: the rank of this process.
        _world_size: how many ranks there are.
        master_ip_address, master_port_number: where rank 0 listens. Unused with ``"mpi"``.
        backend: ``"gloo"``, ``"mpi"``, ``"nccl"`` or ``"ccl"``.
        _comm_device: what `comm_device` answers. By default the current GPU with ``"nccl"``, else the CPU.

    Raises:
        ValueError: the backend is unknown, or rank or size differ from those of the launcher or of an earlier call.
        CommunicationError: some ranks do not join within ``SHARDPASS_CONNECT_TIMEOUT`` (60) seconds. It names them.
    """
    _check(_rank, _world_size, backend)
    if STATE.comm is not None:
        _check_same(_rank, _world_size, STATE.comm.rank, STATE.comm.size, "initialize_comms was called before")
        return
    _use_interface()
    device = _device(backend) if _comm_device is None else torch.device(_comm_device)
    comm = _connected(_rank, _world_size, master_ip_address, master_port_number, backend)
    STATE.comm, STATE.comm_device, STATE.backend = comm, device, backend
    STATE.master_ip, STATE.master_port = master_ip_address, master_port_number
    comm.barrier("initialize_comms")
    while STATE.on_connected:
        STATE.on_connected.pop()()
    logging.getLogger("shardpass.sar").info(
        "rank %d of %d has joined over %s", _rank, _world_size, type(comm.inner).__name__
    )


def _connected(rank: int, world_size: int, ip: str, port: int, backend: str) -> Ranks:
    if backend == "mpi":
        comm = Ranks(backends.connect("mpi", ranks=world_size))
    else:
        launch = Launch("torchrun", world_size, rank, ip, port, "world_size")
        comm = Ranks(backends.connect("torch_distributed", device=_device(backend), launch=launch))
    _check_same(rank, world_size, comm.rank, comm.size, "the launcher or the process group says")
    comm.move_to(torch.device("cpu"))  # until a graph says on which device its tensors are
    return comm


def _check(rank: Any, world_size: Any, backend: Any) -> None:
    if not isinstance(rank, int) or not isinstance(world_size, int) or not 0 <= rank < world_size:
        raise ValueError(
            f"initialize_comms: rank {rank!r} of {world_size!r}; expected integers, 0 <= rank < world_size"
        )
    if backend not in BACKENDS:
        raise ValueError(f"initialize_comms: the backend is {backend!r}; expected one of {', '.join(BACKENDS)}")


def _check_same(rank: int, size: int, known_rank: int, known_size: int, who: str) -> None:
    if (rank, size) != (known_rank, known_size):
        raise ValueError(
            f"initialize_comms: this process is to be rank {rank} of {size}, but {who}: rank {known_rank} of "
            f"{known_size}. Pass those"
        )


def _use_interface() -> None:
    name = os.environ.get(SOCKET_VARIABLE)
    if name:
        address_of(name)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ[variable] = name


def _device(backend: str) -> torch.device:
    if backend == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
    """Sum the gradients of the parameters over ranks, in place. Collective; once per step, after backward.

    A parameter that has a gradient on some rank gets one on every rank.

    Raises:
        ShardpassError: on every rank, if a gradient was summed before, backward added to a summed one, or a parameter
            changed since backward.
    """
    sync_gradients(model, communicator())


def all_reduce(red_tensor: Tensor, op: Any = "sum", move_to_comm_device: bool = False) -> None:
    """Reduce `red_tensor` over ranks, in place. Collective. No gradient flows through it.

    Args:
        red_tensor: on any device; the same shape and dtype on every rank.
        op: SUM, MAX, MIN or PRODUCT of ``torch.distributed.ReduceOp``, or its name.
        move_to_comm_device: ignored; tensors are moved where they must be.
    """
    name = str(op).split(".")[-1].lower()
    name = {"product": "prod"}.get(name, name)
    if name not in ("sum", "max", "min", "prod"):
        raise ValueError(f"all_reduce: the operation is {op!r}; expected SUM, MAX, MIN or PRODUCT")
    comm = communicator()
    with torch.no_grad():
        reduced = comm.all_reduce(red_tensor.detach().contiguous().to(comm.device), name, "all_reduce")  # type: ignore[arg-type]
        red_tensor.copy_(reduced)


def exchange_tensors(tensors: Sequence[Tensor], recv_sizes: Sequence[int] | None = None) -> list[Tensor]:
    """Send ``tensors[r]`` to each rank r, and return what came from each rank, in rank order. Collective.

    Args:
        tensors: one for each rank; only first dimensions may differ.
        recv_sizes: how many rows come from each rank, if you know. It is checked.

    Raises:
        ValueError: there is not one tensor for each rank, or another number of rows came.
    """
    return _exchanged(tensors, [None] * len(tensors) if recv_sizes is None else recv_sizes, "exchange_tensors")


def all_to_all(
    recv_tensors: Sequence[Tensor], send_tensors: Sequence[Tensor], move_to_comm_device: bool = False
) -> None:
    """Send ``send_tensors[r]`` to each rank r, and fill ``recv_tensors[r]`` with what came from it. Collective.

    Args:
        recv_tensors, send_tensors: one for each rank; only first dimensions may differ.
        move_to_comm_device: ignored; tensors are moved where they must be.

    Raises:
        ValueError: there is not one tensor for each rank, or one that came does not fit.
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


def _exchanged(tensors: Sequence[Tensor], rows: Sequence[int | None], who: str) -> list[Tensor]:
    comm = communicator()
    if not len(tensors) == len(rows) == comm.size:
        raise ValueError(
            f"{who}: expected one tensor for each of {comm.size} ranks, found {len(tensors)} ({len(rows)})"
        )
    agree_on_changes(comm)
    with torch.no_grad():
        found = comm.all_to_all([tensor.detach().contiguous().to(comm.device) for tensor in tensors], who)
    came = [tensor.size(0) for tensor in found]
    if any(wanted not in (None, count) for wanted, count in zip(rows, came)):
        raise ValueError(f"{who} on rank {comm.rank}: expected {list(rows)} rows from the ranks, found {came}")
    return [tensor.to(sent.device) for tensor, sent in zip(found, tensors)]
