"""What ranks tell each other beside their calls: over connections of their own, and whatever else connects."""

import importlib
import io
import os
import socket
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest

from shardpass.backends import failure, mesh, spawn, watch
from shardpass.backends.mesh import connect_mesh
from shardpass.backends.news import News
from shardpass.backends.torch_distributed import TorchCommunicator
from shardpass.backends.watch import Watch
from shardpass.errors import CommunicationError

spawn_module = importlib.import_module("shardpass.backends.spawn")
LONG = "Größe \ud800 \N{SNOWMAN} " * 2_000
LIMIT = 60.0


@contextmanager
def watches(size):
    """A watch per rank, all in this process."""

    def connected(comm):
        comm.run_at_once()  # the watches wait for each other by themselves
        return Watch.connect(comm.all_gather_object, comm.rank, comm.size, LIMIT, 30.0)

    made = spawn(connected, size, "threads")
    try:
        yield made
    finally:
        for one in made:
            one.close()


def until(true):
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def texts(made):
    until(lambda: all(one.failure.happened for one in made))
    return [str(one.failure.error()) for one in made]


def test_a_failure_of_any_length_and_alphabet_reaches_every_rank():
    with watches(3) as made:
        made[1].fail(LONG)
        assert texts(made) == [LONG] * 3


def test_the_reason_in_a_failure_is_short():
    reason = failure.first_failure(1, failure.reason_of(ValueError(LONG)))
    assert len(reason) < 5000 and reason.startswith("rank 1 failed first: ValueError: Größe") and "characters" in reason


def test_a_rank_that_ends_in_peace_is_not_dead_and_the_others_still_hear_each_other():
    with watches(3) as made:
        made[1].close()
        until(lambda: 1 in made[0].ended and 1 in made[2].ended)
        time.sleep(0.2)  # its connections are closed by now
        assert not made[0].failure.happened and not made[2].failure.happened
        made[0].fail("rank 0 failed first: boo")
        assert texts([made[2]]) == ["rank 0 failed first: boo"]


def test_a_rank_whose_connection_closes_is_dead():
    with watches(3) as made:
        made[2]._closing.set()  # else it may tell that the first connection has gone before the second one has
        for peer in made[2]._peers.values():
            peer._socket.shutdown(socket.SHUT_RDWR)
        assert all("rank 2 died first: its process ended without a word" in text for text in texts(made[:2]))


def test_a_host_that_does_not_answer_is_lost():
    with watches(2) as made:
        made[0]._peers[1].receive = lambda: (_ for _ in ()).throw(TimeoutError(110, "Connection timed out"))
        assert "rank 1 was lost first: its host has not answered rank 0 within 30 s" in texts(made)[1]


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\2\0\0\0{}", b"\3\0\0\0\xff{}"])
def test_what_is_no_record_is_told(raw):
    with watches(2) as made:
        made[1]._peers[0]._socket.sendall(raw)
        assert "rank 1 failed first: what came from it at rank 0 cannot be read" in texts(made)[0]


def test_a_peer_that_reads_nothing_for_a_while_misses_nothing(monkeypatch):
    monkeypatch.setattr(mesh, "_SEND_SECONDS", LIMIT)
    here, there = (mesh.Peer(end, 30.0) for end in tcp_pair())
    for number in range(200):
        here.send(["waits", str(number), "x" * 50_000])  # far more than the two kernels hold
    assert here._unsent
    found = []
    closing_end = threading.Thread(target=here.close)
    closing_end.start()
    with pytest.raises(EOFError):
        while True:
            found += there.receive()
    closing_end.join()
    there.drop()
    assert [int(record[1]) for record in found] == list(range(200))


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def wait_until_peer_closes(connection):
    connection.settimeout(LIMIT)  # one that stays open ends in TimeoutError
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass


def test_strangers_are_turned_away():
    secret = b"secret"
    with closing(mesh._Door(0, 3, secret, ["127.0.0.1"], True)) as door:
        address = ("127.0.0.1", door.port)
        strangers = [socket.create_connection(address) for _ in range(40)]
        for number, stranger in enumerate(strangers):
            if number % 2:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
        deadline = time.monotonic() + LIMIT
        with pytest.raises(ConnectionError), socket.create_connection(address) as forger:
            mesh._ask(forger, b"another secret", 1, 0)
        for caller, called in ((0, 0), (1, 2)):  # nobody calls itself, and this is rank 0
            with pytest.raises(ConnectionError), socket.create_connection(address) as forger:
                mesh._ask(forger, secret, caller, called)
        friends = [mesh._call((["127.0.0.1"], door.port), secret, rank, 0, deadline) for rank in (1, 2)]
        found = door.wait(deadline)
        assert sorted(found) == [1, 2]
        for stranger in strangers:
            wait_until_peer_closes(stranger)
        for one in [*strangers, *friends, *found.values()]:
            one.close()
    with pytest.raises(OSError):
        socket.create_connection(address)


def test_ranks_that_cannot_reach_each_other_are_named(monkeypatch):
    def refuse(connection, secret, rank):
        raise ConnectionError

    monkeypatch.setattr(mesh, "_answer", refuse)
    with pytest.raises(CommunicationError, match=r"rank 1 did not reach rank 0 at port \d+ of 127.0.0.1.*firewall"):
        spawn(lambda comm: connect_mesh(comm.all_gather_object, comm.rank, 2, 0.5), 2)


def test_busy_threads_are_joined_together(monkeypatch):
    clock = [0.0]

    class Busy:
        def join(self, seconds):
            clock[0] += seconds

    monkeypatch.setattr(spawn_module, "monotonic", lambda: clock[0])
    spawn_module._join_shortly([Busy() for _ in range(5)])
    assert clock == [spawn_module._GRACE]


# ---- processes


def listening(process):
    """The addresses at which a process listens, in hexadecimal."""
    files = [f"/proc/{process}/fd/{name}" for name in os.listdir(f"/proc/{process}/fd")]
    sockets = {os.readlink(file) for file in files if os.path.islink(file)}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{process}/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.append(fields[1].split(":")[0])
    return found


def look_around(comm):
    threads = {thread.name for thread in threading.enumerate()}
    watch.memory_space = lambda: f"host {comm.rank % 2}"
    part = TorchCommunicator.from_group()
    local = part.local_ranks
    part.close()
    return listening(os.getpid()) + listening(os.getppid()), local, threads


@pytest.mark.long
@pytest.mark.processes
def test_spawned_processes_listen_on_the_loopback_interface_only():
    for rank, (addresses, local, threads) in enumerate(spawn(look_around, 3, "processes")):
        assert addresses and set(addresses) == {"0100007F"}
        assert local == ((0, 2), (1,), (0, 2))[rank], "ranks on hosts of their own"
        assert "shardpass watch" in threads and "shardpass door" not in threads


@pytest.mark.parametrize("is_there", [True, False])
def test_a_last_sentence_is_printed_after_the_stream_is_closed(is_there, monkeypatch, capfd):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if is_there else None)
    News({}, 0, 30.0).say("rank 1 ends: rank 0 failed first")
    monkeypatch.undo()
    assert capfd.readouterr().err == "shardpass: rank 1 ends: rank 0 failed first\n"
