"""The order of rounds: complete, free of deadlock, bounded, and its own adjoint with the peers swapped."""

import random
from collections import Counter

import pytest

from shardpass.core.exchange import Schedule
from shardpass.core.exchange.schedule import Round

BLOCK_ROWS = (None, 1, 3)


def random_counts(size, seed, kind):
    draw = random.Random(seed)
    high = {"dense": 9, "sparse": 9, "empty": 0}[kind]
    keep = 0.3 if kind == "sparse" else 1.0
    return [[0 if p == q or draw.random() > keep else draw.randint(0, high) for q in range(size)] for p in range(size)]


def simulate(schedule, prefetch=1, synchronous=True):
    """The most receive buffers that a rank holds at once, found by running all ranks step by step.

    A rank has at most `prefetch` rounds under way, at least one, and uses the rows of one more. With `synchronous`,
    sends complete only when the matching receive is posted, which is the harshest transport that is legal.
    """
    size, total, most = schedule.size, len(schedule.rounds), 0
    posted, done = [0] * size, [0] * size
    while min(done) < total:
        progressed = False
        for rank in range(size):
            while posted[rank] < min(total, done[rank] + max(1, prefetch)):
                posted[rank] += 1
                progressed = True
            in_use = min(1, done[rank], prefetch)
            most = max(most, posted[rank] - done[rank] + in_use)
            if done[rank] < total and completes(schedule, rank, done[rank], posted, synchronous):
                done[rank] += 1
                progressed = True
        assert progressed, f"deadlock: ranks are stuck in rounds {done} of {total}"
    return most


def completes(schedule, rank, index, posted, synchronous):
    """Whether `rank` can end round `index` if each rank has posted its first ``posted[rank]`` rounds."""
    mine = schedule.transfer(rank, index)
    receives = mine.recv_stop == mine.recv_start or posted[mine.source] > index
    sends = not synchronous or mine.send_stop == mine.send_start or posted[mine.to] > index
    return receives and sends


@pytest.mark.parametrize("block_rows", BLOCK_ROWS)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("kind", ["dense", "sparse", "empty"])
def test_ring(size, block_rows, kind):
    for seed in range(4):
        counts = random_counts(size, seed, kind)
        schedule = Schedule.ring(counts, block_rows)
        sent, received = Counter(), Counter()
        for rank in range(size):
            assert [move.round for move in schedule.transfers(rank)] == list(range(len(schedule.rounds)))
            for move in schedule.transfers(rank):
                assert move.source != rank and move.to != rank
                received.update((move.source, rank, row, move.round) for row in range(move.recv_start, move.recv_stop))
                sent.update((rank, move.to, row, move.round) for row in range(move.send_start, move.send_stop))
                assert block_rows is None or move.recv_stop - move.recv_start <= block_rows
        needed = [(q, p, row) for p in range(size) for q in range(size) for row in range(counts[p][q])]
        assert sent == received and set(sent.values()) <= {1}
        assert sorted(move[:3] for move in sent) == sorted(needed)
        rounds_of_rows = sorted((*move[:2], move[3], move[2]) for move in sent)  # by round: rows come in order
        assert [(q, p, row) for q, p, _, row in rounds_of_rows] == sorted(needed)
        for prefetch in (0, 1, 3):
            for synchronous in (True, False):
                most = simulate(schedule, prefetch, synchronous)
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


def test_the_simulation_finds_a_deadlock(monkeypatch):
    """Every rank waits for a partner that is a round behind: a circle."""
    monkeypatch.setitem(globals(), "completes", lambda schedule, rank, index, posted, _: posted[1 - rank] > index + 1)
    with pytest.raises(AssertionError, match=r"deadlock: ranks are stuck in rounds \[0, 0\] of 3"):
        simulate(Schedule.ring([[0, 3], [3, 0]], 1), prefetch=0)


def test_synchronous_sends_are_awaited():
    """Rank 1 gets nothing and so never waits to receive; only its synchronous send ties it to rank 0."""
    schedule = Schedule.ring([[0, 2], [0, 0]], 1)
    posted = [0, 1]
    assert not completes(schedule, 1, 0, posted, synchronous=True)
    assert completes(schedule, 1, 0, posted, synchronous=False)
    assert not completes(schedule, 0, 0, [1, 0], synchronous=False)
