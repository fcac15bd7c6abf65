"""`connect`: the communicator of this process, whatever started it."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.communicator import Communicator
from shardpass.backends.ending import end_all_on_exception, launcher
from shardpass.backends.environment import Launch, detect, local_rank
from shardpass.backends.hosts import (
    address_towards,
    chosen_interface,
    interface_of,
    is_loopback,
    machine,
    network_space,
    usable_cores,
)
from shardpass.backends.local import LocalCommunicator
from shardpass.backends.mpi import MpiCommunicator
from shardpass.backends.primitives import DEFAULT_TIMEOUT
from shardpass.backends.watch import DEFAULT_HOST_TIMEOUT, WatchedCommunicator
from shardpass.errors import CommunicationError, MissingDependencyError, require

TIMEOUT_VARIABLE = "SHARDPASS_CONNECT_TIMEOUT"
HOST_VARIABLE = "SHARDPASS_HOST_TIMEOUT"
_BACKENDS = ("auto", "local", "torch_distributed", "mpi")
_HINTS = {
    "threads": "; ranks as threads are started with shardpass.spawn(fn, ranks)",
    "mpi4py": "; take mpi",
    "gloo": "; torch_distributed takes gloo, and NCCL too if each rank has a GPU",
    "nccl": "; torch_distributed takes NCCL if each rank has a GPU",
}


def connect(
    backend: str = "auto",
    *,
    ranks: int | None = None,
    device: torch.device | str = "cpu",
    group: Any = None,
    timeout: float = DEFAULT_TIMEOUT,
    connect_timeout: float | None = None,
    host_timeout: float | None = None,
    black_box: str | os.PathLike[str] | None = None,
    launch: Launch | None = None,
) -> Communicator:
    """The communicator of this process. Collective over the processes of the run. See `shardpass.connect`.

    Args:
        launch: how this process was started; by default, what its environment says.

    Raises:
        CommunicationError: the other ranks cannot be reached, or are more or fewer than the launcher started.
        ValueError: an unknown backend, or ``ranks`` differs from the number of ranks.
    """
    launch, device, group = launch or detect(), _device(device), _group_of(group)
    limit = float(os.environ.get(TIMEOUT_VARIABLE, "60")) if connect_timeout is None else connect_timeout
    lost = float(os.environ.get(HOST_VARIABLE, DEFAULT_HOST_TIMEOUT)) if host_timeout is None else host_timeout
    if lost <= 0:
        raise ValueError(f"connect: host_timeout is {lost}, but it must be a positive number of seconds")
    chosen = _choose(backend, launch, group)
    if chosen == "mpi":
        comm: BaseCommunicator = MpiCommunicator.from_mpi(group, device, timeout, limit, lost)
    elif chosen == "torch_distributed":
        comm = _connect_torch(launch, group, device, timeout, limit, lost)
    else:
        comm = LocalCommunicator(device)
    _check_size(comm, launch, group, ranks)
    if black_box is not None:
        comm.calls.folder = os.fspath(black_box)
    if comm.size > 1:
        end_all_on_exception(comm)
        _share_cores(comm)
    if isinstance(comm, WatchedCommunicator) and comm.watch is not None:
        comm.watch.guard(launcher())
    return comm


def _choose(backend: str, launch: Launch, group: Any) -> str:
    """The backend, with ``"auto"`` resolved."""
    if backend not in _BACKENDS:
        raise ValueError(
            f"connect: the backend is {backend!r}, but known are {', '.join(_BACKENDS)}{_HINTS.get(backend, '')}"
        )
    if backend != "auto":
        return backend
    if dist.is_available() and dist.is_initialized() and (group is None or isinstance(group, dist.ProcessGroup)):
        return "torch_distributed"
    if group is not None:
        return "mpi"
    if launch.size == 1:
        return "local"
    return _mpi_or_srun(launch) if launch.kind == "mpi" else "torch_distributed"


def _group_of(group: Any) -> Any:
    """The process group of a `DeviceMesh` of one dimension; anything else as it is."""
    if not isinstance(group, DeviceMesh):
        return group
    names = group.mesh_dim_names or ()
    if group.ndim != 1:
        choices = " or ".join(f"connect(mesh[{name!r}])" for name in names) or "one dimension of it, which has a name"
        raise ValueError(
            f"connect: the mesh has {group.ndim} dimensions ({', '.join(names) or 'without names'}), but the ranks "
            f"that share a graph lie along one: write {choices}"
        )
    if group.get_coordinate() is None:
        raise ValueError(
            f"connect: process {dist.get_rank()} is not in the mesh of the processes {group.mesh.tolist()}: let only "
            f"those call connect(mesh)"
        )
    return group.get_group()


def _mpi_or_srun(launch: Launch) -> str:
    """srun sets PMI variables too: without mpi4py, its step is still a step."""
    try:
        require("mpi4py", "mpi", f"a run of {launch.size} processes under an MPI launcher ({launch.source})")
    except MissingDependencyError:
        if "SLURM_PROCID" not in os.environ:
            raise
        return "torch_distributed"
    return "mpi"


def _device(device: torch.device | str) -> torch.device:
    wanted = torch.device(device)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"connect: the device is {device}, but torch {torch.__version__} finds no GPU here: install a build of "
            f"torch for CUDA and look whether nvidia-smi lists a GPU, or leave `device` away to run on the CPU"
        )
    if wanted.type != "cuda" or wanted.index is not None:
        return wanted
    number = local_rank()
    if number is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", number % max(1, torch.cuda.device_count()))


def _check_size(comm: BaseCommunicator, launch: Launch, group: Any, ranks: int | None) -> None:
    """Raise, and close the communicator, unless it has as many ranks as were started and are expected."""
    size = comm.size
    if group is None and launch.kind != "none" and size != launch.size:
        comm.close()
        raise CommunicationError(
            f"the launcher started {launch.size} processes ({launch.source}={launch.size}), but this communicator "
            f"({type(comm).__name__}) has {size} rank{'s' if size > 1 else ''}: the processes would train separately. "
            f"Check that mpi4py or torch.distributed belongs to this launcher, or pass the right backend"
        )
    if ranks is not None and size != ranks:
        comm.close()
        raise ValueError(
            f"connect: ranks={ranks}, but {size} process{'es were' if size > 1 else ' was'} started; start with "
            f"`mpirun -n {ranks}` or `torchrun --nproc-per-node {ranks}`"
        )


def _share_cores(comm: Communicator) -> None:
    """Divide the cores of this host among its ranks, unless OMP_NUM_THREADS says otherwise. Collective.

    Ranks that a launcher has bound to cores of their own (srun, mpirun) share with nobody.
    """
    mine = usable_cores()
    every = comm.all_gather_object([machine(), hex(sum(1 << core for core in mine))], "usable cores")
    if os.environ.get("OMP_NUM_THREADS"):
        return
    here, wanted = every[comm.rank]
    sharing = sum(1 for where, mask in every if where == here and int(mask, 16) & int(wanted, 16))
    if sharing > 1:
        torch.set_num_threads(min(torch.get_num_threads(), max(1, len(mine) // sharing)))


# ---- torch.distributed


def _connect_torch(
    launch: Launch, group: Any, device: torch.device, timeout: float, limit: float, lost: float
) -> BaseCommunicator:
    from shardpass.backends.torch_distributed import TorchCommunicator  # torch may be built without it

    owns = not dist.is_initialized()
    if owns:
        if launch.kind == "mpi" and "SLURM_PROCID" in os.environ:
            launch = detect({name: value for name, value in os.environ.items() if "PMI" not in name})
        _init_default_group(launch, device, timeout, limit)
    return TorchCommunicator.from_group(group, device, timeout, limit, owns_default=owns, host_timeout=lost)


def _init_default_group(launch: Launch, device: torch.device, timeout: float, limit: float) -> None:
    if not launch.host:
        raise CommunicationError(
            "connect(backend='torch_distributed') needs a process group (torch.distributed.init_process_group) or the "
            "variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets"
        )
    met = _meet(launch, limit)
    _choose_interface(met, launch)
    store = dist.PrefixStore("shardpass default group", met)
    name = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    from shardpass.backends.torch_distributed import cannot_connect, set_timeout

    try:
        dist.init_process_group(
            name, store=store, rank=launch.rank, world_size=launch.size, timeout=timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise cannot_connect(error, launch.rank, launch.size) from error
    set_timeout(max(limit, timeout))


def _choose_interface(store: dist.Store, launch: Launch) -> None:
    """Tell gloo which interface reaches other hosts, unless GLOO_SOCKET_IFNAME does.

    By itself it takes the one of the host's name, which is often an address of the loopback interface. Rank 0 of
    several hosts may know itself by such a name too, so it looks where the others are.
    """
    if chosen_interface():
        return
    address, here = address_towards(launch.host), network_space()
    store.set(f"host {launch.rank}", json.dumps([here, address]))
    for rank in range(launch.size):
        there, other = json.loads(store.get(f"host {rank}"))
        if there != here:
            way = address_towards(other) if other and not is_loopback(other) else address
            if way and not is_loopback(way) and (interface := interface_of(way)):
                os.environ["GLOO_SOCKET_IFNAME"] = interface
            return


def _meet(launch: Launch, limit: float) -> dist.Store:
    """The store at rank 0's address, once every rank has reached it."""
    address, start = f"{launch.host}:{launch.port}", monotonic()
    at_agent = (launch.host, str(launch.port)) == (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    by_agent = at_agent and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        tcp = dist.TCPStore(
            launch.host, launch.port, None, launch.rank == 0 and not by_agent, timedelta(seconds=limit),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {launch.rank} of {launch.size} could not reach rank 0 at {address} within {limit:.0f} s "
            f"({str(error).splitlines()[0]}). Check the address (MASTER_ADDR, MASTER_PORT) and the firewall; "
            f"{TIMEOUT_VARIABLE} gives slow starters more seconds"
        ) from error
    store = dist.PrefixStore(f"shardpass attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
    missing = _wait_for_all(store, launch, start + limit)
    if missing:
        shown = ", ".join(str(rank) for rank in missing[:8])
        raise CommunicationError(
            f"rank {launch.rank} waited {monotonic() - start:.0f} s at {address}, but of {launch.size} ranks these did "
            f"not come: {shown}. Were they started with this address? {TIMEOUT_VARIABLE} gives slow starters more "
            f"seconds"
        )
    return store


def _wait_for_all(store: dist.Store, launch: Launch, deadline: float) -> list[int]:
    """The ranks that have not come until ``deadline``."""
    missing = list(range(launch.size))
    try:
        store.set(f"hello {launch.rank}", "hello")
        while missing and monotonic() <= deadline:
            missing = [rank for rank in missing if not store.check([f"hello {rank}"])]
            sleep(0.02 * bool(missing))
    except RuntimeError:  # rank 0 keeps the store: it has waited long enough, or has ended
        return [rank for rank in missing if rank != 0] or [0]
    return missing
