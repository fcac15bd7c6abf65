"""Ranks that are threads run one at a time until they run at once, and each has generators of its own till then."""

import logging
import random
import threading
import time

import numpy as np
import pytest
import torch

from shardpass.backends import turn
from shardpass.connection import spawn
from shardpass.core.ranks import seed
from shardpass.errors import CommunicationError
from shardpass.testing import run


def draw():
    """A number of each generator, slowly."""
    found = []
    for _ in range(4):
        found += [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
        time.sleep(0.001)
    return found


def set_seeds():
    torch.manual_seed(3)
    np.random.seed(4)  # noqa: NPY002
    random.seed(5)


def seeded(comm=None):
    """What two models with their own seeds, a wait for the others between them, and one without a seed draw."""
    found = []
    for _ in range(2):
        set_seeds()
        found.append(draw())
    if comm is not None:
        comm.barrier()
    return [*found, draw()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_draws_what_one_process_draws(ranks):
    assert run(seeded, ranks) == [seeded()] * ranks


def test_without_a_seed_every_rank_goes_on_from_the_program():
    set_seeds()
    found = run(lambda comm: draw(), 3)
    set_seeds()
    assert found == [draw()] * 3


def test_ranks_that_exchange_messages_keep_their_numbers():
    def body(comm):
        torch.manual_seed(comm.rank)
        found = [torch.rand(())]
        for step in range(5):
            there, here = (comm.rank + 1) % comm.size, torch.zeros(1)
            comm.exchange(torch.rand(1), there, here, (comm.rank - 1) % comm.size, step).wait()
            found.append(here[0])
        return torch.stack(found).tolist()

    def of_rank(rank):
        torch.manual_seed(rank)
        own = torch.rand(6).tolist()
        torch.manual_seed((rank - 1) % 3)
        return own[:1] + torch.rand(6).tolist()[1:]

    assert run(body, 3) == [of_rank(rank) for rank in range(3)]


def test_they_run_at_once_when_all_have_agreed_to():
    """None draws from the shared generators while another is still building, and none holds the others up after."""
    together = threading.Barrier(3)

    def body(comm):
        set_seeds()
        if comm.rank == 2:
            draw()
        first = draw()
        comm.run_at_once()
        together.wait(60)
        comm.run_at_once()  # they do already
        return first

    *first, last = run(body, 3)
    set_seeds()
    assert [*first, last] == [(alone := draw()), alone, draw()]


def test_a_block_that_draws_nothing_runs_at_once():
    together = threading.Barrier(2)

    def body(comm):
        torch.manual_seed(comm.rank)
        first = torch.rand(2)
        with comm.out_of_turn():
            together.wait(60)
            comm.barrier()
        second = torch.rand(2)
        torch.manual_seed(comm.rank)
        return torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2), torch.rand(2)]))

    assert run(body, 2) == [True, True]


def test_a_seed_of_all_ranks_lets_them_take_turns_again():
    def body(comm):
        comm.run_at_once()
        found = []
        for run_ in range(2):
            seed(run_, comm)
            found.append([torch.rand(()).item() for _ in range(3) if time.sleep(0.002) is None])
        return found

    expected = [torch.Generator().manual_seed(run_) for run_ in range(2)]
    assert run(body, 3) == [[[torch.rand((), generator=g).item() for _ in range(3)] for g in expected]] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_in_its_turn_ends_all(failing):
    def body(comm):
        if comm.rank == failing:
            raise KeyError("boo")
        draw()
        comm.barrier()
        draw()

    start = time.monotonic()
    with pytest.raises(KeyError, match="boo"):
        run(body, 3)
    assert time.monotonic() - start < 9  # the grace that a stuck rank gets is 10
    assert not [thread for thread in threading.enumerate() if "shardpass rank" in thread.name]


def test_a_rank_that_ends_early_gives_its_turn_away():
    assert run(lambda comm: comm.rank == 0 or bool(draw()), 3) == [True] * 3


def test_a_failure_elsewhere_ends_the_wait_for_a_turn():
    def body(comm):
        if comm.rank == 0:
            comm.inner._world.fail("the program failed")
            time.sleep(1)  # and keeps its turn
        comm.barrier()

    start = time.monotonic()
    with pytest.raises(CommunicationError, match="the program failed"):
        run(body, 3)
    assert time.monotonic() - start < 9


def test_ranks_that_wait_for_each_other_by_other_means_are_told(monkeypatch, caplog):
    """A lock, barrier or queue of the user's is not known here."""
    monkeypatch.setattr(turn, "_PATIENCE", 0.1)
    together = threading.Barrier(2)

    def body(comm):
        try:
            together.wait(3)
        except threading.BrokenBarrierError:
            comm.barrier()

    expected = (
        "waits for its turn, which shardpass rank . has: ranks that are threads run one at a time .*comm.out_of_turn"
    )
    with caplog.at_level(logging.WARNING, "shardpass"), pytest.raises(CommunicationError, match=expected):
        spawn(body, 2, timeout=1.0)
    assert "waits for its turn" in caplog.text
