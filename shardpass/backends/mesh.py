"""A connection between every two ranks beside those that carry tensors: for short messages, and to see who is there.

[Note: strangers] A rank listens only until all others have come: on the loopback interface if all ranks are in one
network namespace, else on the interface that GLOO_SOCKET_IFNAME names, else on all. Both ends of a connection prove
that they know the secret of the job before anything else is read from them. A connection that does not is closed.

[Note: lost hosts] When a process dies, its kernel closes its connections at once, and the other ends know. When a host
is lost, nothing closes them. So each rank sends a short message to every other one, every few seconds, and a host is
lost if its kernel does not confirm them for a while (TCP_USER_TIMEOUT). A kernel also answers for a process that is
stopped or swapped out: such a rank is missed, but not lost.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from shardpass.backends.hosts import chosen_interface, network_space, own_addresses
from shardpass.errors import CommunicationError

_HELLO = struct.Struct("<8sII32s")  # who calls whom, and a random number
_MAGIC = b"SPMESH1\n"
_PROOF_BYTES = 32
_MAX_RECORD_BYTES = 1 << 24
_GREETING_SECONDS = 5.0  # that the other end of a new connection may take to prove what it is
_SEND_SECONDS = 3.0

Gather = Callable[[Any, str], list[Any]]


def beat_seconds(host_timeout: float) -> float:
    """How often a rank sends to the others, so that a lost host is found in time."""
    return min(5.0, host_timeout / 6)


class Peer:
    """The connection with one other rank. One thread receives, any may send.

    Args:
        connection: of which both ends have proved what they are.
        host_timeout: seconds after which a host that does not answer is lost.
    """

    def __init__(self, connection: socket.socket, host_timeout: float) -> None:
        self._socket = connection
        self._received = b""
        self._unsent = bytearray()
        self._sending = threading.Lock()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = int(1000 * 0.8 * host_timeout)  # it begins with the first message that is not confirmed
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, record: Sequence[Any]) -> None:
        """Send a record as a line of JSON. It does not block: what a slow peer cannot take goes with the next record.

        A peer that has gone is found out by whoever receives from it.
        """
        with self._sending, contextlib.suppress(OSError):
            self._unsent += json.dumps(record).encode() + b"\n"
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    def receive(self) -> list[list[Any]]:
        """The records that have arrived, once there is something to read.

        Raises:
            EOFError, ConnectionError: the peer's process has closed the connection, or has died.
            OSError: its host does not answer, or cannot be reached.
            ValueError: what came is no record.
        """
        try:
            new = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not new:
            raise EOFError
        *lines, self._received = (self._received + new).split(b"\n")
        if len(self._received) > _MAX_RECORD_BYTES:
            raise ValueError(f"a record of more than {_MAX_RECORD_BYTES} bytes")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end, once the peer has taken what is left, or has had some time to."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.settimeout(_SEND_SECONDS)
            self._socket.sendall(self._unsent)
        self.drop()

    def drop(self) -> None:
        """Close this end as it is."""
        self._socket.close()


def connect_mesh(gather: Gather, rank: int, size: int, limit: float) -> dict[int, socket.socket]:
    """Collective. The connections of this rank, by the rank at the other end, made within `limit` seconds.

    Args:
        gather: collective: the JSON-representable objects of all ranks, in rank order.

    Raises:
        CommunicationError: some ranks could not be reached.
    """
    facts = gather([network_space(), secrets.token_hex(32)], "networks")
    secret = bytes.fromhex(facts[0][1])
    is_local = len({space for space, _ in facts}) == 1
    addresses = ["127.0.0.1"] if is_local else own_addresses()
    with contextlib.closing(_Door(rank, size, secret, addresses, is_local)) as door:
        doors = gather([addresses, door.port], "addresses")
        deadline = monotonic() + limit
        found = {peer: _call(tuple(doors[peer]), secret, rank, peer, deadline) for peer in range(rank)}
        found |= door.wait(deadline)
        missing = [peer for peer in range(size) if peer != rank and found.get(peer) is None]
        every = gather(missing, "connections")
    pairs = sorted({(max(one, other), min(one, other)) for one, lost in enumerate(every) for other in lost})
    if pairs:
        words = "; ".join(
            f"rank {caller} did not reach rank {called} at port {doors[called][1]} of "
            f"{' or '.join(doors[called][0]) or 'an unknown address'}"
            for caller, called in pairs[:4]
        )
        for connection in found.values():
            if connection is not None:
                connection.close()
        raise CommunicationError(
            f"rank {rank}: ranks could not connect with each other within {limit:.0f} s: {words}. Check the firewall, "
            f"or set GLOO_SOCKET_IFNAME to the network interface that reaches the others"
        )
    return {peer: connection for peer, connection in found.items() if connection is not None}


class _Door:
    """Where this rank listens for the ranks after it, and the threads that greet who comes."""

    def __init__(self, rank: int, size: int, secret: bytes, addresses: list[str], is_local: bool) -> None:
        self._rank, self._secret, self._expected = rank, secret, size - 1 - rank
        self._found: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        where = addresses[0] if addresses and (is_local or chosen_interface()) else ""
        both = not where and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server((where, 0), family=family, backlog=max(128, size), dualstack_ipv6=both)
        self._listener.settimeout(0.2)
        self.port = int(self._listener.getsockname()[1])
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, name="shardpass door", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while self._is_open:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection,), name="shardpass greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_GREETING_SECONDS)
            caller = _answer(connection, self._secret, self._rank)
        except OSError:
            connection.close()
            return
        with self._changed:
            self._found[caller] = connection
            self._changed.notify_all()

    def wait(self, deadline: float) -> dict[int, socket.socket | None]:
        """The connections with those that have come, once all have or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._found) == self._expected, max(0.0, deadline - monotonic()))
            return dict(self._found)

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._listener.close()


def _call(door: tuple[list[str], int], secret: bytes, rank: int, peer: int, deadline: float) -> socket.socket | None:
    """A connection with ``peer``, at the first of the addresses of its ``door`` at which it proves to be the peer."""
    addresses, port = door
    while True:
        for address in addresses:
            seconds = min(_GREETING_SECONDS, deadline - monotonic())
            if seconds <= 0:
                return None
            with contextlib.suppress(OSError):
                connection = socket.create_connection((address, port), seconds)
                try:
                    _ask(connection, secret, rank, peer)
                except OSError:
                    connection.close()
                else:
                    return connection
        if monotonic() >= deadline:
            return None
        sleep(0.1)


def _ask(connection: socket.socket, secret: bytes, rank: int, peer: int) -> None:
    hello = _HELLO.pack(_MAGIC, rank, peer, secrets.token_bytes(32))
    connection.sendall(hello)
    number, proof = _exactly(connection, 32), _exactly(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _prove(secret, b"called", hello, number)):
        raise ConnectionError
    connection.sendall(_prove(secret, b"caller", hello, number))


def _answer(connection: socket.socket, secret: bytes, rank: int) -> int:
    """The rank that calls."""
    hello = _exactly(connection, _HELLO.size)
    magic, caller, called, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or called != rank or caller <= rank:
        raise ConnectionError
    number = secrets.token_bytes(32)
    connection.sendall(number + _prove(secret, b"called", hello, number))
    if not hmac.compare_digest(_exactly(connection, _PROOF_BYTES), _prove(secret, b"caller", hello, number)):
        raise ConnectionError
    return int(caller)


def _prove(secret: bytes, role: bytes, hello: bytes, number: bytes) -> bytes:
    return hmac.digest(secret, role + hello + number, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        new = connection.recv(count - len(found))
        if not new:
            raise ConnectionError
        found += new
    return found
