"""Short messages between every two ranks, over connections of their own.

[Note: short messages beside gloo] Every collective and every message begins with a header, so a small step is made of
short messages. In gloo a thread receives for the thread that waits, so each message wakes two, and where ranks share
processors that thread spins for as long as another one holds its lock: to gather 1 KB of 4 ranks on 2 cores took 5 ms
of processor time, and takes .15 here. Long messages are gloo's: it moves them while the rank computes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from time import monotonic

from shardpass.backends.identity import MessageKey

_BLOCK = MessageKey(255, 0, 0, 0)
_FRAME = struct.Struct("<IBQQHI")  # bytes that follow, and the key
_AT_ONCE = 1 << 18  # bytes
_PATIENCE = 0.05  # seconds for which a rank waits for one connection alone: then fewer messages wake it


class ShortMessages:
    """The connections of one rank with all others. One thread at a time may use them.

    A message is taken in by whichever call reads its connection, and kept until it is asked for. Whoever waits for long
    reads all connections, so that no two ranks wait for each other to read.

    Args:
        connections: by the rank at the other end; both ends have proved what they are.
        rank: of this end.
    """

    def __init__(self, connections: dict[int, socket.socket], rank: int) -> None:
        self._rank, self._size, self._connections = rank, len(connections) + 1, connections
        self._selector = selectors.DefaultSelector()
        self._arrived = {peer: bytearray() for peer in connections}
        self._inbox: defaultdict[tuple[int, MessageKey], deque[bytes]] = defaultdict(deque)
        for peer, connection in connections.items():
            connection.settimeout(_PATIENCE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def send(self, message: bytes, to: int, key: MessageKey, timeout: float) -> None:
        """Send a message; its receiver takes what was sent with an equal `key`, in the order of sending.

        Raises:
            TimeoutError: the receiver has read nothing for `timeout` seconds.
            OSError: the connection is closed.
        """
        left, deadline = memoryview(_FRAME.pack(len(message), *key) + message), monotonic() + timeout
        try:
            while left:
                try:
                    left = left[self._connections[to].send(left) :]
                except TimeoutError:
                    self._drain(deadline)
        except BaseException:
            self._end(to)  # half of a message may be on its way, and nothing may follow it
            raise

    def take(self, source: int, key: MessageKey, timeout: float) -> bytes:
        """The next message of `source` with this `key`; raises as `send`."""
        place, deadline = (source, key), monotonic() + timeout
        waiting = self._inbox[place]
        while not waiting:
            if source not in self._arrived:
                raise ConnectionResetError(f"rank {source} has closed its connection")
            if not self._read(source):
                self._drain(deadline)
        message = waiting.popleft()
        if not waiting:
            del self._inbox[place]
        return message

    def swap(self, blocks: Sequence[bytes], timeout: float) -> list[bytes]:
        """Collective: what every rank has for this one, in rank order; `blocks` are for each rank. Raises as `send`."""
        for step in range(1, self._size):  # the nearest ones first, so that no rank is flooded
            to = (self._rank + step) % self._size
            self.send(blocks[to], to, _BLOCK, timeout)
        return [blocks[p] if p == self._rank else self.take(p, _BLOCK, timeout) for p in range(self._size)]

    def _drain(self, deadline: float) -> None:
        """Take in what has arrived, from whichever rank."""
        if monotonic() >= deadline:
            raise TimeoutError
        for key, _ in self._selector.select(0):
            self._read(key.data)

    def _read(self, peer: int) -> bool:
        """Take in what has arrived from a rank, and whether there was anything."""
        arrived = self._arrived[peer]
        try:
            new = self._connections[peer].recv(_AT_ONCE)
        except TimeoutError:
            return False
        except OSError:
            new = b""
        if not new:  # it has ended, which concerns whoever waits for it
            self._selector.unregister(self._connections[peer])
            del self._arrived[peer]
            return True
        arrived += new
        first = 0
        while len(arrived) - first >= _FRAME.size:
            count, *key = _FRAME.unpack_from(arrived, first)
            stop = first + _FRAME.size + count
            if len(arrived) < stop:
                break
            self._inbox[peer, MessageKey(*key)].append(bytes(memoryview(arrived)[first + _FRAME.size : stop]))
            first = stop
        del arrived[:first]
        return True

    def end(self) -> None:
        """Make whoever waits on the connections fail, here and at other ranks. Any thread may call this."""
        for peer in self._connections:
            self._end(peer)

    def _end(self, peer: int) -> None:
        with contextlib.suppress(OSError):
            self._connections[peer].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections."""
        self.end()
        self._selector.close()
        for connection in self._connections.values():
            connection.close()
