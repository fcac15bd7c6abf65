"""What `connect` makes of its environment."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from shardpass import connection
from shardpass.backends import LocalCommunicator, connect, detect, hosts
from shardpass.backends.environment import first_host
from shardpass.errors import CommunicationError

from .launchers import free_port, rank_variables

connect_module = importlib.import_module("shardpass.backends.connect")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                 "MV2_COMM_WORLD_SIZE", "SLURM_PROCID"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def test_a_single_process_is_local():
    assert isinstance(connect(), LocalCommunicator)
    assert isinstance(connect("local", ranks=1), LocalCommunicator)


def test_unknown_backends():
    with pytest.raises(ValueError, match="known are auto, local, torch_distributed, mpi"):
        connect("smoke signals")
    with pytest.raises(ValueError, match=r"threads are started with shardpass.spawn"):
        connect("threads")


def test_the_seconds_after_which_a_host_is_lost_are_positive(monkeypatch):
    monkeypatch.setenv("SHARDPASS_HOST_TIMEOUT", "0")
    with pytest.raises(ValueError, match=r"host_timeout is 0\.0, but it must be a positive number"):
        connect()


def test_the_size_is_checked(monkeypatch):
    with pytest.raises(ValueError, match=r"ranks=4, but 1 process was started.*mpirun -n 4"):
        connect(ranks=4)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(CommunicationError, match=r"OMPI_COMM_WORLD_SIZE=4.*has 1 rank: .*train separately"):
        connect("local")


def test_mpi_of_another_launcher(monkeypatch):
    pytest.importorskip("mpi4py")
    code = "from shardpass.backends.connect import connect; connect()"
    env = os.environ | {"PMI_SIZE": "3", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=480)
    assert "the launcher started 3 processes (PMI_SIZE=3)" in ended.stderr


def test_incomplete_variables(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="not MASTER_ADDR and MASTER_PORT"):
        connect()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_does_not_come(monkeypatch, rank):
    port = free_port()
    for name, value in (rank_variables(rank, 2, port) | {"SHARDPASS_CONNECT_TIMEOUT": "1.5"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match=f"127.0.0.1:{port}") as caught:
        connect()
    if rank == 0:
        assert "these did not come: 1" in str(caught.value)


def test_slurm():
    step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "9", "SLURM_JOB_ID": "123",
            "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu[03-05,9],login"}  # fmt: skip
    launch = detect(step)
    assert (launch.kind, launch.size, launch.rank, launch.host) == ("srun", 4, 2, "gpu03")
    assert 20000 <= launch.port < 40000
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).size == 1, "a batch script is one process"
    assert detect({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEPID": "0"}).size == 4
    assert [first_host(nodes) for nodes in ("a", "a,b", "n[7]", "n[07-9]x", "")] == ["a", "a", "n7", "n07x", ""]


def test_the_order_of_detection():
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert detect(torchrun | {"OMPI_COMM_WORLD_SIZE": "3"}).kind == "torchrun"
    assert detect({"OMPI_COMM_WORLD_SIZE": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}).kind == "mpi"
    assert detect({}).kind == "none"


@pytest.mark.parametrize(
    ("before", "cores", "others", "here", "variable", "after"),
    [
        (8, range(8), [range(8)] * 3, (0, 1, 2, 3), None, 2),
        (8, range(8), [range(8)] * 3, (0, 1), None, 4),  # the others are on another host, maybe of the same name
        (8, range(8), [range(8)] * 3, (0,), None, 8),
        (2, range(2), [range(2)] * 3, (0, 1, 2, 3), None, 1),  # more ranks than cores
        (4, range(4), [range(4, 8)], (0, 1), None, 4),  # the launcher has bound each rank to cores of its own
        (1, range(8), [range(8)], (0, 1), None, 1),  # the user asked for one
        (8, range(8), [range(8)], (0, 1), "8", 8),
    ],
)
def test_ranks_on_one_host_divide_its_cores(monkeypatch, before, cores, others, here, variable, after):
    def gather(mine, label):
        masks = [hex(sum(1 << core for core in cores)) for cores in others]
        return [mine, *([mine[0] if rank in here else "another", mask] for rank, mask in enumerate(masks, 1))]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    found = [before]
    monkeypatch.setattr(torch, "get_num_threads", lambda: found[-1])
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(connect_module, "usable_cores", lambda: set(cores))
    connect_module._share_cores(SimpleNamespace(rank=0, all_gather_object=gather))
    assert found[-1] == after


@pytest.mark.processes
@pytest.mark.parametrize("variable", [None, pytest.param("2", marks=pytest.mark.long)])
def test_processes_divide_the_cores_when_they_connect(variable):
    code = (
        "import shardpass, torch; before = torch.get_num_threads(); comm = shardpass.connect(); "
        "print(before, torch.get_num_threads(), len(comm.local_ranks)); comm.close()"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": variable} if variable else {}
    command, port = [sys.executable, "-c", code], free_port()
    envs = [env | rank_variables(rank, 2, port) for rank in range(2)]
    children = [subprocess.Popen(command, env=one, stdout=subprocess.PIPE, text=True) for one in envs]
    for child in children:
        before, after, ranks = map(int, child.communicate(timeout=480)[0].split())
        cores = len(connect_module.usable_cores())
        assert ranks == 2 and after == (2 if variable else min(before, max(1, cores // 2)))


def test_a_single_process_keeps_its_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("changed"))
    connect().close()


@pytest.mark.parametrize(
    ("mode", "asks", "told"), [("madvise", "", True), ("madvise", "1", False), ("always", "", False)]
)
def test_a_run_without_huge_pages_is_logged(mode, asks, told, monkeypatch, caplog):
    monkeypatch.setattr(hosts, "huge_pages", lambda: mode)
    for name, value in hosts.CHEAP_TENSORS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", asks)
    caplog.set_level("INFO", "shardpass")
    connection.connect("local")
    assert ("`export THP_MEM_ALLOC_ENABLE=1` before" in caplog.text) == told
