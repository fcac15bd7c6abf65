"""Where a blocked rank is, and the proof that ranks wait for each other in a circle.

The header of a message cannot show that nobody will ever send that message. So a rank that has been blocked for a while
publishes its position: what it waits for, and how often it has posted each message. Suppose that a rank waits for
something that its peer has not posted, that this peer is blocked in the same way, and so on back to the first rank.
Then all of them will wait for ever, and so will the ranks that wait for them. That is a divergence, and it is found
without a time-out. A rank that computes has no position, so the others wait for it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from shardpass.backends.call_log import LoggedCall
from shardpass.backends.identity import SAME_CALLS

COLLECTIVE = "collective"
_KEPT_TAGS = 64  # per peer and direction; a pair of ranks never has more messages under way at once


@dataclass(frozen=True)
class Position:
    """What a blocked rank waits for: until its peer, or every other rank, has posted ``awaits`` ``count`` times.

    Attributes:
        awaits: `COLLECTIVE` or a `message_name`.
        count: for a collective, its sequence number.
        peer: the other rank of the message; -1 for a collective.
        epoch: the number of this wait on its rank.
        posted: how often the rank itself has posted each thing.
        is_queued: whether it also waits for every message between devices that this rank has started before.
    """

    text: str | LoggedCall  # the words of a call are put together only if somebody reads them
    awaits: str
    count: int
    peer: int = -1
    epoch: int = 0
    posted: dict[str, int] = field(default_factory=dict)
    is_queued: bool = False

    def to_json(self) -> str:
        return json.dumps({**asdict(replace(self, text="")), "text": str(self.text)})

    @staticmethod
    def from_json(text: str) -> Position:
        return Position(**json.loads(text))


def message_name(kind: str, peer: int, tag: int) -> str:
    """What a rank posts: a ``"send"`` to a peer, or a ``"recv"`` from it, with a tag."""
    return f"{kind} {peer} {tag}"


class Postings:
    """How often this rank has posted each message."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], OrderedDict[int, int]] = {}

    def add(self, kind: str, peer: int, tag: int) -> int:
        """Count one more ``"send"`` or ``"recv"``. Returns the new count."""
        counts = self._counts.setdefault((kind, peer), OrderedDict())
        counts[tag] = counts.pop(tag, 0) + 1
        if len(counts) > _KEPT_TAGS:
            counts.popitem(last=False)
        return counts[tag]

    def posted(self) -> dict[str, int]:
        """The counts of now, by `message_name`."""
        return {message_name(*end, tag): n for end, counts in self._counts.items() for tag, n in counts.items()}


def stuck_ranks(positions: Mapping[int, Position]) -> list[int]:
    """The ranks that will wait for each other for ever, in order, given the positions of those that are blocked."""
    stuck = set(positions)
    while True:
        free = {rank for rank in stuck if not stuck.intersection(_waits_for(rank, positions))}
        if not free:
            return sorted(stuck)
        stuck -= free


def _waits_for(rank: int, positions: Mapping[int, Position]) -> list[int]:
    """The blocked ranks that have not posted what ``rank`` waits for."""
    mine = positions[rank]
    others = [peer for peer in positions if peer != rank and mine.peer in (-1, peer)]
    return [peer for peer in others if positions[peer].posted.get(mine.awaits, 0) < mine.count]


def describe_stuck(positions: Mapping[int, Position]) -> str:
    """The stuck ranks in words. They are the same wherever the same positions are known."""
    places = "; ".join(f"rank {rank} waits in {positions[rank].text}" for rank in stuck_ranks(positions))
    return f"the ranks wait for each other and none can go on: {places}. {SAME_CALLS}"
