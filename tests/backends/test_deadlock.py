"""The proof that ranks wait for each other, from positions alone."""

from shardpass.backends.deadlock import COLLECTIVE, Position, Postings, describe_stuck, message_name, stuck_ranks


def receiving(me, peer, tag=0, count=1, **posted):
    return Position(f"recv of {me}", message_name("send", me, tag), count, peer, posted=posted)


def collective(number, **posted):
    return Position(f"collective {number}", COLLECTIVE, number, posted={COLLECTIVE: number, **posted})


def test_a_ring_of_receives_is_stuck_and_so_is_who_waits_for_it():
    positions = {0: receiving(0, 1), 1: receiving(1, 2), 2: receiving(2, 0), 3: receiving(3, 0)}
    assert stuck_ranks(positions) == [0, 1, 2, 3]
    assert "rank 1 waits in recv of 1; rank 2 waits in recv of 2" in describe_stuck(positions)


def test_a_message_that_has_been_posted_is_waited_for():
    positions = {0: receiving(0, 1), 1: receiving(1, 0, **{message_name("send", 0, 0): 1})}
    assert stuck_ranks(positions) == []
    positions[0] = receiving(0, 1, count=2)  # the second message with this tag
    assert stuck_ranks(positions) == [0, 1]


def test_a_rank_that_computes_is_waited_for():
    assert stuck_ranks({0: receiving(0, 1), 1: receiving(1, 2)}) == []
    assert stuck_ranks({0: collective(4), 1: collective(4)}) == []


def test_ranks_in_a_collective_and_in_an_exchange():
    assert stuck_ranks({0: collective(4), 1: receiving(1, 0, **{COLLECTIVE: 3})}) == [0, 1]
    # rank 1 has gone through collective 4; that rank 0 has left it as well is not known here yet
    assert stuck_ranks({0: collective(4), 1: receiving(1, 0, **{COLLECTIVE: 4})}) == []


def test_old_tags_are_forgotten():
    tally = Postings()
    assert [tally.add("send", 1, tag) for tag in (*range(100), 99)] == [1] * 100 + [2]
    assert len(tally.posted()) == 64 and tally.posted()[message_name("send", 1, 99)] == 2
