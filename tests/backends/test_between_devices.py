"""Tensors between devices, matched by their order alone. Gloo stands in for NCCL, and CPU memory for a device's."""

from collections import Counter

import pytest
import torch

from shardpass.backends.identity import HEADER_BYTES
from shardpass.backends.torch_distributed import TorchCommunicator
from shardpass.errors import DivergenceError
from shardpass.testing import run

from . import contract

pytestmark = pytest.mark.processes


class Counting(TorchCommunicator):
    """Counts what is sent over the host, by bytes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent = Counter()

    def _raw_send(self, flat, to, key):
        self.sent[flat.numel()] += 1
        return super()._raw_send(flat, to, key)


def the_contract(comm):
    device = Counting.from_group(direct="gloo")
    assert device.is_direct
    device.sent.clear()
    return len(contract.run_all(device)), set(device.sent)


def in_another_order(comm):
    """Rank 0 sends x and then y, and rank 1 expects y and then x: each would land in the other's buffer."""
    device = TorchCommunicator.from_group(direct="gloo")
    rows = torch.ones(50), torch.full((50,), 2.0)
    peer, order = 1 - comm.rank, (0, 1) if comm.rank == 0 else (1, 0)
    with pytest.raises(DivergenceError, match=r"message [12] of this pair"):
        ways = [(rows[i], None) if comm.rank == 0 else (None, rows[i]) for i in order]
        for handle in [device.exchange(a, peer, b, peer, tag) for (a, b), tag in zip(ways, order)]:
            handle.wait()
        device.barrier()


@pytest.mark.long
def test_contract():
    for count, sizes in run(the_contract, 3, "processes"):
        assert count > 12 and sizes <= {HEADER_BYTES}


def around_a_collective(comm):
    """A message before a collective on one rank and behind it on the other, which the collective's rows would meet."""
    device = TorchCommunicator.from_group(direct="gloo")
    x, y = torch.full((50,), 7.0), torch.zeros(50)
    with pytest.raises(DivergenceError, match=r"message [12] of this pair"):
        if comm.rank == 0:
            handle = device.exchange(x, 1, None, 1, 3)
            device.all_gather(y)
        else:
            device.all_gather(y)
            handle = device.exchange(None, 0, y, 0, 3)
        handle.wait()
        device.barrier()


def on_two_places(comm):
    """One rank broadcasts a tensor on the CPU, and the other one on the device: only headers can tell."""
    device = TorchCommunicator.from_group(direct="gloo")
    device.device = torch.device("meta" if comm.rank else "cpu")  # so that the tensor is not on this rank's device
    with pytest.raises(DivergenceError, match="root 1, on the device"):
        device.broadcast(torch.ones(3), 1)


def what_differs(comm):
    for case in (in_another_order, around_a_collective, on_two_places):
        case(comm)
        comm.barrier(case.__name__)


def test_what_differs_is_told():
    """An order, the place of a collective in it, and a device: in one start of the processes."""
    run(what_differs, 2, "processes")
