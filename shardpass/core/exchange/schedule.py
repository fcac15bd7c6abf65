"""The order of rounds as plain data: who sends which rows to whom, and when. It can be printed and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardpass.errors import InternalError


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

    def validate(self) -> None:
        """Check that each needed row travels exactly once and that every message sent is received in the same round.

        Raises:
            InternalError: with the first rank and round that are wrong.
        """
        moved = [[0] * self.size for _ in range(self.size)]
        for index in range(len(self.rounds)):
            plans = [self.transfer(rank, index) for rank in range(self.size)]
            for rank, mine in enumerate(plans):
                theirs = plans[mine.source]
                if theirs.to != rank or (theirs.send_start, theirs.send_stop) != (mine.recv_start, mine.recv_stop):
                    raise InternalError(f"round {index}: rank {rank} expects {mine}, rank {mine.source} does {theirs}")
                if mine.recv_stop > mine.recv_start and mine.recv_start != moved[rank][mine.source]:
                    raise InternalError(f"round {index}: rank {rank} gets rows of {mine.source} out of order: {mine}")
                moved[rank][mine.source] += mine.recv_stop - mine.recv_start
        for rank in range(self.size):
            for source in range(self.size):
                if source != rank and moved[rank][source] != self.counts[rank][source]:
                    raise InternalError(
                        f"rank {rank} needs {self.counts[rank][source]} rows of {source}, gets {moved[rank][source]}"
                    )

    def simulate(self, prefetch: int = 1, synchronous: bool = True) -> int:
        """The most receive buffers that a rank holds at once, found by running all ranks step by step.

        A rank has at most `prefetch` rounds under way, at least one, and uses the rows of one more. With `synchronous`,
        sends complete only when the matching receive is posted, which is the harshest transport that is legal.

        Raises:
            InternalError: the ranks block each other (deadlock), naming the round each is stuck in.
        """
        total, most = len(self.rounds), 0
        posted, done = [0] * self.size, [0] * self.size
        while min(done) < total:
            progressed = False
            for rank in range(self.size):
                while posted[rank] < min(total, done[rank] + max(1, prefetch)):
                    posted[rank] += 1
                    progressed = True
                in_use = min(1, done[rank], prefetch)
                most = max(most, posted[rank] - done[rank] + in_use)
                if done[rank] < total and self._complete(rank, done[rank], posted, synchronous):
                    done[rank] += 1
                    progressed = True
            if not progressed:
                raise InternalError(f"deadlock: ranks are stuck in rounds {done} of {total}")
        return most

    def _complete(self, rank: int, index: int, posted: list[int], synchronous: bool) -> bool:
        mine = self.transfer(rank, index)
        receives = mine.recv_stop == mine.recv_start or posted[mine.source] > index
        sends = not synchronous or mine.send_stop == mine.send_start or posted[mine.to] > index
        return receives and sends

    def __str__(self) -> str:
        lines = [f"{self.size} ranks, {len(self.rounds)} rounds"]
        for index, step in enumerate(self.rounds):
            moves = [
                f"{t.source}->{rank} {t.recv_stop - t.recv_start}"
                for rank in range(self.size)
                if (t := self.transfer(rank, index)).recv_stop > t.recv_start
            ]
            lines.append(f"round {index} (distance {step.distance}): " + (", ".join(moves) or "nothing"))
        return "\n".join(lines)
