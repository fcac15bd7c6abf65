"""The same initialisation on every rank, different draws afterwards."""

import threading
import time

import pytest
import torch

from shardpass.core.ranks import decorrelate, derive_seed, get_random_state, replayed, seed, set_random_state
from shardpass.errors import RefusedError
from shardpass.testing import run


class Process:
    """Rank `rank` of two as a process of its own would be: nobody else draws."""

    size = 2

    def __init__(self, rank):
        self.rank = rank

    def all_gather_object(self, obj, label=""):
        return [obj, obj]

    def barrier(self, label=""):
        pass

    def take_turns(self):
        pass

    def random_lock(self):
        from contextlib import nullcontext

        return nullcontext()


def draws(rank):
    comm = Process(rank)
    seed(7, comm)
    first = torch.rand(3)
    decorrelate(comm)
    return first, torch.rand(3)


def test_ranks_that_are_processes_start_alike_and_then_differ_reproducibly():
    one, other, again = draws(0), draws(1), draws(1)
    assert torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])
    assert torch.equal(other[1], again[1])


def test_the_block_builds_the_same_on_threads_too():
    torch.manual_seed(3)
    expected = torch.rand(2), torch.rand(2)

    def body(comm):
        with seed(3, comm):
            first = torch.rand(2)
            time.sleep(0.01)
            second = torch.rand(2)
        decorrelate(comm)
        return first, second, torch.rand(4)

    results = run(body, 3)
    for first, second, _ in results:
        assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
    assert len({tuple(later.tolist()) for _, _, later in results}) == 3


def test_one_rank_draws_what_plain_torch_draws():
    torch.manual_seed(5)
    expected = torch.rand(2), torch.rand(2)

    def body(comm):
        seed(5, comm)
        first = torch.rand(2)
        decorrelate(comm)
        return first, torch.rand(2)

    (found,) = run(body, 1)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("of_rank", "text"),
    [
        (lambda rank: rank, "every rank must pass the same seed, found 0 on rank 0 and 1 on rank 1"),
        (lambda rank: -1, r"seed must be an integer in \[0, 2\*\*63\), found -1"),
        (lambda rank: 1.5, "seed must be an integer .* found 1.5"),
        (lambda rank: True, "seed must be an integer .* found True"),
    ],
)
@pytest.mark.ranks(2)
def test_wrong_seeds_are_told_on_every_rank(comm, of_rank, text):
    with pytest.raises(ValueError, match=text):
        seed(of_rank(comm.rank), comm)


def test_states_are_restored():
    states = get_random_state()
    expected = torch.rand(3)
    set_random_state(states)
    assert torch.equal(torch.rand(3), expected)


def test_derived_seeds_differ():
    seeds = {derive_seed(base, rank) for base in range(20) for rank in range(20)}
    assert len(seeds) == 400 and all(0 <= value < 2**63 for value in seeds)


def noise():
    x = torch.zeros(3, 2, dtype=torch.float64)
    drawn = [torch.rand_like(x), torch.randn(3, 2), torch.randint(9, (4,)), torch.randperm(5), torch.bernoulli(x + 0.5)]
    return [*drawn, x.clone().exponential_(), torch.nn.functional.gumbel_softmax(x), torch.normal(x, 1.0)]


@pytest.mark.ranks(2)
def test_replayed_numbers_are_the_same_whatever_other_threads_draw(comm):
    """Ranks that are threads share torch's generator; a message that draws is run again in backward."""
    torch.rand(comm.rank + 1)
    with replayed(comm, 5):
        first = noise()
    with replayed(comm, 5):
        for _ in range(3):
            torch.rand(2, generator=torch.Generator())  # drawn from another generator: leaves ours alone
        elsewhere = threading.Thread(target=lambda: torch.rand(100))
        elsewhere.start()
        elsewhere.join()
        second = noise()
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.ranks(2)
def test_what_cannot_be_replayed_is_refused(comm):
    with pytest.raises(RefusedError, match=r"native_dropout.*Run the ranks as processes"), replayed(comm, 5):
        torch.native_dropout(torch.ones(3), 0.5, True)
