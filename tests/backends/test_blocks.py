"""Blocks between every two ranks: whole, of any length, and what ends their connections."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import pytest

from shardpass.backends.blocks import LONGEST, Blocks


def connected(size):
    """The ends of `size` ranks."""
    ends = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as door:
        for rank in range(size):
            for peer in range(rank):
                ends[rank][peer] = socket.create_connection(door.getsockname())
                ends[peer][rank] = door.accept()[0]
    return [Blocks(mine, rank) for rank, mine in enumerate(ends)]


@pytest.fixture
def make():
    made = []

    def build(size):
        made.extend(connected(size))
        return made[-size:]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_swap_blocks_of_any_length(make, size):
    ranks = make(size)
    lengths = [[0, 1, 3000, LONGEST][(rank + 2 * peer) % 4] for rank in range(size) for peer in range(size)]
    blocks = [[bytes([16 * rank + peer]) * lengths[size * rank + peer] for peer in range(size)] for rank in range(size)]
    given = [[blocks[peer][rank] for peer in range(size)] for rank in range(size)]

    def run(rank):
        return [ranks[rank].swap(blocks[rank], [*map(len, given[rank])], 5.0) for _ in range(20)]

    with ThreadPoolExecutor(size) as threads:
        assert [*threads.map(run, range(size))] == [[one] * 20 for one in given]


def test_a_connection_takes_the_longest_block_though_nobody_reads_it(make):
    first, second = make(2)
    start = monotonic()
    with pytest.raises(TimeoutError):  # in the wait for the other block, not in sending
        first.swap([b"", bytes(LONGEST)], [0, 1], 0.3)
    assert 0.2 < monotonic() - start < 5
    assert len(second._take(0, LONGEST, monotonic() + 1)) == LONGEST


def test_nothing_is_taken_for_a_later_block_once_a_rank_has_given_up(make):
    first, second = make(2)
    with pytest.raises(TimeoutError):
        first.swap([b"one", b"one"], [3, 3], 0.2)
    for _ in range(2):
        with pytest.raises(OSError, match="have ended"):
            first.swap([b"two", b"two"], [3, 3], 1.0)
    with pytest.raises(OSError):
        for _ in range(2):  # what was sent in time is there, and nothing after it
            second.swap([b"one", b"one"], [3, 3], 1.0)


def test_a_rank_that_has_ended_ends_the_calls_of_all(make):
    first, second, third = make(3)
    second.close()
    with ThreadPoolExecutor(2) as threads:
        for call in [threads.submit(rank.swap, [b"x"] * 3, [1] * 3, 60.0) for rank in (first, third)]:
            with pytest.raises(ConnectionError):
                call.result(10)


def test_another_thread_can_end_a_wait(make):
    first, _ = make(2)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(first.swap, [b"x"] * 2, [1] * 2, 60.0)
        sleep(0.2)
        first.end()
        with pytest.raises(OSError):
            waits.result(10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_child_leaves_the_connections_of_its_parent_alone(make):
    first, second = make(2)
    child = os.fork()
    if not child:
        first.close()
        os._exit(0)
    os.waitpid(child, 0)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.swap, [b"b", b"b"], [1, 1], 5.0)
        assert first.swap([b"a", b"a"], [1, 1], 5.0) == other.result(5) == [b"a", b"b"]
