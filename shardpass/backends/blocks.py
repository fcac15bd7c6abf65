"""Short blocks of bytes from every rank to every other one, over connections of their own.

[Note: blocks beside gloo] Every collective begins with such a block, so a small step is made of them. In gloo a thread
receives for the thread that waits, so each message wakes two, and where ranks share processors that thread spins for as
long as another one holds its lock: to gather 1 KB of 4 ranks on 2 cores took 5 ms of processor time, and .15 like this.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from time import monotonic

LONGEST = 1 << 15
"""Bytes that a connection takes on its way though nobody reads them."""
_LEAST_SECONDS = 0.001
_AT_ONCE = 1 << 16  # bytes


class Blocks:
    """The connections of one rank, over which one thread at a time swaps blocks. Its calls are collective.

    Args:
        connections: with every other rank, of which both ends have proved what they are.
        rank: of this end.
    """

    def __init__(self, connections: dict[int, socket.socket], rank: int) -> None:
        self._rank, self._size = rank, len(connections) + 1
        after = [(rank + step) % self._size for step in range(1, self._size)]  # so that no rank is flooded
        self._connections = {peer: connections[peer] for peer in after}
        self._arrived = {peer: bytearray() for peer in after}  # what is left if an exception ends a wait goes on here
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def gather(self, block: bytes, timeout: float) -> list[bytes]:
        """The blocks of all ranks, which are of one length, in rank order; raises as `swap`."""
        return self.swap([block] * self._size, [len(block)] * self._size, timeout)

    def swap(self, blocks: Sequence[bytes], sizes: Sequence[int], timeout: float) -> list[bytes]:
        """What every rank has for this one, in rank order.

        Args:
            blocks: what this rank has for each rank, at most `LONGEST` bytes. A longer one could wait for a rank that
                waits for this one.
            sizes: the bytes that come from each rank.

        Raises:
            TimeoutError: it has taken longer than `timeout` seconds.
            OSError: a connection is closed.
        """
        deadline = monotonic() + timeout
        for peer, connection in self._connections.items():
            connection.settimeout(max(deadline - monotonic(), _LEAST_SECONDS))
            connection.sendall(blocks[peer])
        found = {peer: self._take(peer, sizes[peer], deadline) for peer in reversed(self._connections)}
        return [found.get(rank, blocks[rank]) for rank in range(self._size)]

    def _take(self, peer: int, count: int, deadline: float) -> bytes:
        connection, arrived = self._connections[peer], self._arrived[peer]
        while len(arrived) < count:
            connection.settimeout(max(deadline - monotonic(), _LEAST_SECONDS))
            new = connection.recv(_AT_ONCE)
            if not new:
                raise ConnectionResetError(f"rank {peer} has closed its connection")
            arrived += new
        block = bytes(arrived[:count])
        del arrived[:count]
        return block

    def close(self) -> None:
        """Close the connections. Whoever waits on them, here or at another rank, gets an error. Any thread may call."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
