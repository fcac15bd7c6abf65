"""Ranks as threads of one process."""

import threading
import time

import pytest
import torch

from shardpass.backends import RecordingCommunicator, spawn
from shardpass.backends.threads import ThreadWorld
from shardpass.core.ranks import seed
from shardpass.errors import CommunicationError, DivergenceError, PeerFailure
from shardpass.testing import run

from . import contract


# the others with the long tests: every contract waits 5 s for messages that never come
@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))])
def test_contract(ranks):
    run(contract.run_all, ranks)


def test_contract_while_recording():
    run(lambda comm: contract.assert_exchange(RecordingCommunicator(comm)), 3)


def test_results_in_rank_order():
    assert spawn(lambda comm, more: comm.rank + more, 3, args=(10,)) == [10, 11, 12]


def test_recording_writes_down_bytes_tags_and_labels():
    def program(comm):
        comm = RecordingCommunicator(comm)
        to, source = contract.ring(comm)
        comm.exchange(torch.ones(3), to, torch.zeros(3), source, 8, "round 1").wait()
        comm.exchange(None, to, None, source, 9, "round 2").wait()
        comm.duplicate("twin").all_reduce(torch.ones(2).double(), label="loss")
        return [(m.kind, m.peer, m.num_bytes, m.tag, m.label) for m in comm.messages]

    assert run(program, 2)[0] == [
        ("recv", 1, 12, 8, "round 1"),
        ("send", 1, 12, 8, "round 1"),
        ("duplicate", -1, 0, -1, "twin"),
        ("all_reduce", -1, 16, -1, "loss"),
    ]


def test_the_first_failure_ends_all_ranks_and_is_raised():
    seen = {}

    def program(comm):
        if comm.rank == 2:
            raise KeyError("boo")
        try:
            comm.exchange(None, 2, torch.zeros(1), 2, 1).wait()
        except PeerFailure as error:
            seen[comm.rank] = str(error)
            raise

    with pytest.raises(KeyError, match="boo") as caught:
        spawn(program, 3)
    assert seen == {0: "rank 2 failed first: KeyError: 'boo'", 1: "rank 2 failed first: KeyError: 'boo'"}
    assert any("program" in str(entry.path) or entry.name == "program" for entry in caught.traceback)
    assert not [thread for thread in threading.enumerate() if "shardpass" in thread.name]


def test_abort_ends_all_ranks():
    def program(comm):
        if comm.rank == 1:
            comm.abort("the loss is nan")
        comm.barrier()

    with pytest.raises(PeerFailure, match="rank 1 failed first: the loss is nan"):
        run(program, 3)


def test_a_rank_that_returns_early_is_named():
    def program(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(1), label="loss")

    with pytest.raises(CommunicationError, match=r"rank 1 ended first, after fewer calls.*rank 0 waits in .*'loss'"):
        run(program, 2)


@pytest.mark.ranks(3)
def test_a_slow_rank_is_waited_for(comm):
    if comm.rank == 1:
        time.sleep(2.5)  # a blocked rank looks why after 1 s, and then twice a second
    contract.assert_exchange(comm)


def test_waits_in_a_circle_are_found():
    def program(comm):
        to, source = contract.ring(comm)
        comm.exchange(None, to, torch.zeros(1), source, comm.rank, "everyone receives").wait()

    with pytest.raises(DivergenceError, match=r"none can go on.*rank 0 waits.*rank 1 waits.*rank 2 waits"):
        run(program, 3)


@pytest.mark.ranks(3)
def test_buffers_may_be_reused_after_the_wait(comm):
    to, source = contract.ring(comm)
    send, under_way = torch.zeros(1000), []
    for i in range(20):
        send.fill_(i)
        recv = torch.zeros(1000)
        comm.exchange(send, to, None, source, i).wait()
        under_way.append((comm.exchange(None, to, recv, source, i), recv))
    for i, (handle, recv) in enumerate(under_way):
        handle.wait()
        assert (recv == i).all()


def test_the_random_lock_is_one_for_all_ranks():
    inside = []

    def program(comm):
        for _ in range(20):
            with comm.random_lock():
                inside.append(1)
                assert len(inside) == 1
                time.sleep(0.001)
                inside.pop()

    run(program, 3)


def test_refusals():
    with pytest.raises(ValueError, match="2 ranks as threads of one process cannot use cuda"):
        ThreadWorld(2, "cuda")
    with pytest.raises(ValueError, match="at least 1"):
        spawn(contract.run_all, 0)
    with pytest.raises(ValueError, match="must be 'threads' or 'processes'"):
        spawn(contract.run_all, 2, "fork")


def test_a_collective_call_while_the_generator_is_held_is_told():
    def inside(comm):
        with seed(0, comm):
            comm.barrier("inside")

    with pytest.raises(CommunicationError, match=r"a `with shardpass.seed\(...\)` block must not communicate"):
        run(inside, 2)
    run(inside, 1)
