"""Ranks of a torch.distributed process group, with gloo."""

import time

import pytest
import torch
import torch.distributed as dist

from shardpass.backends import connect
from shardpass.backends.torch_distributed import TorchCommunicator
from shardpass.errors import CommunicationError
from shardpass.testing import run

from . import contract
from .launchers import launch

pytestmark = pytest.mark.processes


def on_a_group_of_the_user(comm):
    """A communicator over some of the ranks, through a group made by hand; the group stays usable."""
    halves = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = halves[comm.rank % 2]
    part = TorchCommunicator.from_group(mine)
    assert (part.rank, part.size) == (comm.rank // 2, (2, 1)[comm.rank % 2])
    contract.assert_all_reduce(part)
    contract.assert_exchange(part)
    duplicate = part.duplicate("again")
    assert duplicate.all_reduce(torch.ones(1)) == part.size
    whole = connect()  # the default group exists: it is taken
    assert isinstance(whole, TorchCommunicator) and whole.size == comm.size
    contract.assert_all_to_all(whole)
    whole.close()
    part.close()
    total = torch.ones(1)
    dist.all_reduce(total, group=mine)
    assert total == part.size
    return total.item()


def after_a_rank_gave_up(comm):
    """It has waited too long for a sum, and goes on: what it sends then is no part of the sum."""
    twin, numbers = comm.duplicate("late").inner, torch.ones(512)
    twin.timeout = 0.5 if comm.rank == 0 else 20.0
    for call in range(2):
        if comm.rank and not call:
            time.sleep(2)
        with pytest.raises(CommunicationError):
            twin.all_reduce(numbers)


def everything(comm):
    names = contract.run_all(comm)
    if comm.size > 1:
        after_a_rank_gave_up(comm)
    return len(names), on_a_group_of_the_user(comm) if comm.size == 3 else None


@pytest.mark.long  # under torchrun by default
@pytest.mark.parametrize("ranks", [1, 3])
def test_contract(ranks):
    results = run(everything, ranks, "processes")
    assert [count > 12 for count, _ in results] == [True] * ranks
    assert ranks == 1 or [total for _, total in results] == [2.0, 1.0, 2.0]


@pytest.mark.long
def test_contract_under_torchrun():
    ended = launch("torchrun", 3, "contract")
    assert ended.code == 0, ended.text
    for rank in range(3):
        assert f"rank {rank} of 3 with TorchCommunicator" in ended.text
        assert f"rank {rank} is done" in ended.text
