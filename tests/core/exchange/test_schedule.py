"""The order of rounds: complete, free of deadlock, bounded, and its own adjoint with the peers swapped."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shardpass.core.exchange.schedule import Round, Schedule
from shardpass.errors import InternalError

BLOCK_ROWS = (None, 1, 3)


def random_counts(size, seed, kind):
    draw = random.Random(seed)
    high = {"dense": 9, "sparse": 9, "empty": 0}[kind]
    keep = 0.3 if kind == "sparse" else 1.0
    return [[0 if p == q or draw.random() > keep else draw.randint(0, high) for q in range(size)] for p in range(size)]


@pytest.mark.parametrize("block_rows", BLOCK_ROWS)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("kind", ["dense", "sparse", "empty"])
def test_ring(size, block_rows, kind):
    for seed in range(4):
        counts = random_counts(size, seed, kind)
        schedule = Schedule.ring(counts, block_rows)
        schedule.validate()
        sent, received = Counter(), Counter()
        for rank in range(size):
            for move in schedule.transfers(rank):
                assert move.source != rank and move.to != rank
                received.update((move.source, rank, row) for row in range(move.recv_start, move.recv_stop))
                sent.update((rank, move.to, row) for row in range(move.send_start, move.send_stop))
                assert block_rows is None or move.recv_stop - move.recv_start <= block_rows
        needed = {(q, p, row): 1 for p in range(size) for q in range(size) for row in range(counts[p][q])}
        assert sent == received == Counter(needed)
        for prefetch in (0, 1, 3):
            for synchronous in (True, False):
                most = schedule.simulate(prefetch, synchronous)
                assert most == min(1 + prefetch, len(schedule.rounds))


def test_no_rounds_where_nothing_travels():
    assert Schedule.ring([[0]]).rounds == ()
    assert Schedule.ring([[0, 0], [0, 0]]).rounds == ()
    assert Schedule.ring([[0, 0, 0], [4, 0, 0], [0, 0, 0]]).rounds == (Round(1, 0, 4),)


def test_pieces():
    schedule = Schedule.ring([[0, 7], [2, 0]], 3)
    assert schedule.rounds == (Round(1, 0, 3), Round(1, 3, 6), Round(1, 6, 7))
    moves = schedule.transfers(1)
    assert [(m.recv_start, m.recv_stop) for m in moves] == [(0, 2), (2, 2), (2, 2)]
    assert [(m.send_start, m.send_stop) for m in moves] == [(0, 3), (3, 6), (6, 7)]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_with_the_peers_swapped_it_is_a_schedule_of_the_transposed_counts(size):
    counts = random_counts(size, 7, "dense")
    schedule = Schedule.ring(counts, 2)
    moved = [[0] * size for _ in range(size)]
    for index in range(len(schedule.rounds)):
        plans = [schedule.transfer(rank, index) for rank in range(size)]
        for rank, mine in enumerate(plans):  # backward: send what was received, receive what was sent
            theirs = plans[mine.to]
            assert theirs.source == rank
            assert (theirs.recv_start, theirs.recv_stop) == (mine.send_start, mine.send_stop)
            moved[rank][mine.to] += mine.send_stop - mine.send_start
    assert moved == [[counts[q][p] for q in range(size)] for p in range(size)]


COUNTS = ((0, 2, 1), (1, 0, 2), (2, 2, 0))


@pytest.mark.parametrize(
    "rounds, words",
    [
        ((Round(1, 0, 2),), "needs 2 rows of 1, gets 0"),
        ((Round(1, 0, 2), Round(2, 0, 1)), "needs 2 rows of"),
        ((Round(1, 0, 2), Round(2, 0, 2), Round(2, 0, 2)), "out of order"),
        ((Round(1, 1, 2), Round(1, 0, 1), Round(2, 0, 2)), "round 0: rank . gets rows of . out of order"),
        ((Round(1, 0, 2), Round(1, 0, 2), Round(2, 0, 2)), "round 1: rank . gets rows of . out of order"),
    ],
)
def test_validate_catches_rows_left_out_repeated_or_out_of_order(rounds, words):
    Schedule(COUNTS, (Round(1, 0, 2), Round(2, 0, 2))).validate()
    with pytest.raises(InternalError, match=words):
        Schedule(COUNTS, rounds).validate()


class Crossed(Schedule):
    """Rank 0 walks the rounds in reverse."""

    def transfer(self, rank, index):
        return super().transfer(rank, len(self.rounds) - 1 - index if rank == 0 else index)


def test_ranks_in_different_orders_are_caught():
    schedule = Crossed(COUNTS, (Round(1, 0, 2), Round(2, 0, 2)))
    with pytest.raises(InternalError, match="round 0: rank 0 expects Transfer"):
        schedule.validate()


class Stuck(Schedule):
    """Every rank waits for its own round with a partner that is a round behind: a circle."""

    def _complete(self, rank, index, posted, synchronous):
        return posted[(rank + 1) % self.size] > index + 1


def test_a_deadlock_is_named():
    rounds = tuple(Round(1, row, row + 1) for row in range(3))
    with pytest.raises(InternalError, match=r"deadlock: ranks are stuck in rounds \[0, 0\] of 3"):
        Stuck(((0, 3), (3, 0)), rounds).simulate(prefetch=0)


def test_synchronous_sends_are_awaited():
    """Rank 1 gets nothing and so never waits to receive; only its synchronous send ties it to rank 0."""
    schedule = Schedule.ring([[0, 2], [0, 0]], 1)
    posted = [0, 1]
    assert not schedule._complete(1, 0, posted, synchronous=True)
    assert schedule._complete(1, 0, posted, synchronous=False)
    assert not schedule._complete(0, 0, [1, 0], synchronous=False)


def test_it_can_be_read():
    assert str(Schedule.ring([[0, 7], [2, 0]], 4)).splitlines() == [
        "2 ranks, 2 rounds",
        "round 0 (distance 1): 1->0 4, 0->1 2",
        "round 1 (distance 1): 1->0 3",
    ]
    assert str(Schedule(((0, 0), (0, 0)), (Round(1, 0, 0),))).endswith("round 0 (distance 1): nothing")
