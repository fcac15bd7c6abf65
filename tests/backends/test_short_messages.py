"""Short messages over connections of their own: in any order, beside each other, and what ends them."""

import socket
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from shardpass.backends.identity import MessageKey
from shardpass.backends.short_messages import ShortMessages


def connected(size):
    """The ends of `size` ranks."""
    ends = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as door:
        for rank in range(size):
            for peer in range(rank):
                ends[rank][peer] = socket.create_connection(door.getsockname())
                ends[peer][rank] = door.accept()[0]
    return [ShortMessages(mine, rank) for rank, mine in enumerate(ends)]


@pytest.fixture
def make():
    made = []

    def build(size):
        made.extend(connected(size))
        return made[-size:]

    yield build
    for one in made:
        one.close()


def test_messages_are_matched_by_their_keys_and_come_in_the_order_of_sending(make):
    first, second = make(2)
    keys = [MessageKey(0, tag, 5) for tag in range(3)]
    for key in keys:
        first.send(b"%d one" % key.tag, 1, key, 1.0)
        first.send(b"%d two" % key.tag, 1, key, 1.0)
    for key in reversed(keys):
        assert second.take(0, key, 1.0) == b"%d one" % key.tag
        assert second.take(0, key, 1.0) == b"%d two" % key.tag
    first.send(b"", 1, keys[0], 1.0)
    assert second.take(0, keys[0], 1.0) == b""


def test_ranks_swap_blocks_of_any_length(make):
    ranks = make(4)
    blocks = [[bytes([16 * rank + peer]) * (1000 * rank + peer) for peer in range(4)] for rank in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda rank: [ranks[rank].swap(blocks[rank], 5.0) for _ in range(20)], range(4))]
    assert found == [[[blocks[peer][rank] for peer in range(4)]] * 20 for rank in range(4)]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_send_more_than_connections_hold_do_not_wait_for_each_other(make, size):
    ranks, key, message = make(size), MessageKey(0, 7, 1), bytes(1 << 16)

    def run(rank):
        after, before = (rank + 1) % size, (rank - 1) % size
        for _ in range(400):  # 26 MB, while nobody takes any
            ranks[rank].send(message, after, key, 20.0)
        return sum(len(ranks[rank].take(before, key, 20.0)) for _ in range(400))

    with ThreadPoolExecutor(size) as threads:
        assert [*threads.map(run, range(size))] == [400 << 16] * size


def test_what_does_not_come_in_time_is_told(make):
    first, _ = make(2)
    start = monotonic()
    with pytest.raises(TimeoutError):
        first.take(1, MessageKey(0, 0, 1), 0.2)
    assert 0.1 < monotonic() - start < 5


def test_what_came_before_a_rank_ended_is_taken_and_what_did_not_is_lost(make):
    first, second, third = make(3)
    key = MessageKey(0, 0, 1)
    second.send(b"last", 0, key, 1.0)
    second.close()
    third.send(b"on", 0, key, 1.0)
    assert first.take(2, key, 1.0) == b"on"
    assert first.take(1, key, 1.0) == b"last"
    with pytest.raises(ConnectionResetError, match="rank 1 has closed"):
        first.take(1, key, 1.0)
    with pytest.raises(OSError):
        for _ in range(3):
            first.send(bytes(100), 1, key, 1.0)
    third.send(b"still", 0, key, 1.0)
    assert first.take(2, key, 1.0) == b"still"


def test_another_thread_can_end_a_wait(make):
    first, _ = make(2)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(first.take, 1, MessageKey(0, 0, 1), 60.0)
        first.end()
        with pytest.raises(ConnectionResetError):
            waits.result(10)


def test_a_message_that_was_sent_by_half_ends_its_connection(make):
    first, second = make(2)
    with pytest.raises(TimeoutError):
        while True:  # until nothing more fits
            first.send(bytes(1 << 20), 1, MessageKey(0, 0, 1), 0.1)
    with pytest.raises(ConnectionResetError):
        while True:
            second.take(0, MessageKey(0, 0, 1), 5.0)
