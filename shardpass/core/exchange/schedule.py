"""The order of rounds as plain data: who sends which rows to whom, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One step: every rank p receives from ``(p - distance) % size`` the rows ``[start, stop)`` of what it needs there.

    A pair that needs fewer rows moves those that are left, and sends no message if there are none.
    """

    distance: int
    start: int
    stop: int


@dataclass(frozen=True)
class Transfer:
    """One rank's share of one round. Row ranges index the rows that the pair needs; an empty one moves nothing."""

    round: int
    source: int
    recv_start: int
    recv_stop: int
    to: int
    send_start: int
    send_stop: int


@dataclass(frozen=True)
class Schedule:
    """The rounds of one halo exchange, the same on every rank.

    Args:
        counts: ``counts[p][q]`` rows that rank p needs from rank q; the diagonal is zero.
        rounds: in order. Backward walks the same rounds with the peers swapped.
    """

    counts: tuple[tuple[int, ...], ...]
    rounds: tuple[Round, ...]

    @classmethod
    def ring(cls, counts: Sequence[Sequence[int]], block_rows: int | None = None) -> Schedule:
        """The rounds by ring distance. A block of more than `block_rows` rows comes in pieces of that size."""
        size = len(counts)
        rounds = []
        for distance in range(1, size):
            largest = max(counts[p][(p - distance) % size] for p in range(size))
            step = min(largest, block_rows or largest)
            rounds += [Round(distance, start, min(start + step, largest)) for start in range(0, largest, step or 1)]
        return cls(tuple(tuple(int(c) for c in row) for row in counts), tuple(rounds))

    @property
    def size(self) -> int:
        return len(self.counts)

    def transfer(self, rank: int, index: int) -> Transfer:
        """What `rank` does in round `index`."""
        step = self.rounds[index]
        source, to = (rank - step.distance) % self.size, (rank + step.distance) % self.size
        recv, send = self.counts[rank][source], self.counts[to][rank]
        return Transfer(
            round=index,
            source=source,
            recv_start=min(step.start, recv),
            recv_stop=min(step.stop, recv),
            to=to,
            send_start=min(step.start, send),
            send_stop=min(step.stop, send),
        )

    def transfers(self, rank: int) -> list[Transfer]:
        """What `rank` does, round by round."""
        return [self.transfer(rank, index) for index in range(len(self.rounds))]
