"""Ranks as threads of which one computes at a time."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import shardpass as sp
from shardpass.backends.spawn import spawn
from shardpass.errors import DivergenceError
from shardpass.testing.run import run

from . import contract


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_contract(ranks):
    run(contract.run_all, ranks, "in_turn")


def most_at_once(backend):
    """How many ranks were between two calls at the same time, and how often a rank was there after another."""
    inside, most, order = set(), [0], []

    def program(comm):
        for _ in range(5):
            inside.add(comm.rank)
            order.append(comm.rank)
            time.sleep(0.002)
            most[0] = max(most[0], len(inside))
            inside.discard(comm.rank)
            comm.all_reduce(torch.ones(1))

    spawn(program, 3, backend)
    return most[0], order


def test_one_rank_computes_at_a_time():
    most, order = most_at_once("in_turn")
    assert most == 1
    assert sorted(order) == sorted([0, 1, 2] * 5)
    assert most_at_once("threads")[0] > 1  # else nothing was tested


def test_a_rank_that_fails_gives_its_turn():
    def program(comm):
        if comm.rank == 1:
            raise ValueError("no")
        comm.barrier()

    with pytest.raises(ValueError, match="no"):
        run(program, 3, "in_turn")


def test_ranks_that_wait_for_each_other_are_told():
    def program(comm):
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.all_reduce(torch.ones(1))

    with pytest.raises(DivergenceError):
        run(program, 2, "in_turn")


def test_other_threads_of_a_rank_hold_no_turn():
    def program(comm):
        twin, found = comm.duplicate("beside"), []
        thread = threading.Thread(target=lambda: found.append(float(twin.all_reduce(torch.ones(1)))))
        thread.start()
        comm.barrier()
        thread.join()
        return found

    assert run(program, 3, "in_turn") == [[3.0]] * 3


def test_sync_during_backward():
    def program(comm):
        model = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.ones_(model.weight)
        with sp.sync_during_backward(model, comm, bucket_bytes=1):
            model(torch.full((1, 3), comm.rank + 1.0, dtype=torch.float64)).sum().backward()
        return model.weight.grad

    assert all(torch.equal(grad, torch.full((2, 3), 6.0).double()) for grad in run(program, 3, "in_turn"))
