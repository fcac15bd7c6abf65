"""Tensors between devices, matched by their order alone. Gloo stands in for NCCL, and CPU memory for a device's."""

from collections import Counter

import pytest
import torch

from shardpass.backends.identity import HEADER_BYTES
from shardpass.backends.torch_distributed import TorchCommunicator
from shardpass.errors import DivergenceError
from shardpass.testing.run import run

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


def test_contract():
    for count, sizes in run(the_contract, 3, "processes"):
        assert count > 12 and sizes <= {HEADER_BYTES}


def test_an_order_that_differs_is_told():
    run(in_another_order, 2, "processes")
