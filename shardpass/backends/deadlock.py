"""Where a blocked rank stands, and the proof that ranks wait for each other in a circle.

A message nobody will ever receive cannot be found by its header, since no header arrives. So a rank that has been
blocked for a while publishes its position: what it waits for, and how often it has posted each message. A rank that
waits for something its peer has not posted, while that peer is itself blocked, and so on around to the first, will
wait for ever: that is a divergence, found without a time-out. A rank that computes has no position and is waited for.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from shardpass.backends.identity import SAME_CALLS

_KEPT_TAGS = 64  # per peer and direction; more messages between one pair are never under way at once


@dataclass
class Position:
    """What a blocked rank waits for.

    Attributes:
        text: in words.
        kind: ``"collective"``, ``"send"`` or ``"recv"``.
        number: sequence number of the collective, or the tag.
        peer: of the message, -1 for collectives.
        count: this is the how-manieth message with that tag and peer.
        sent, received: how often each ``"peer tag"`` has been posted.
        epoch: grows with every blocking wait of this rank.
    """

    text: str
    kind: str
    number: int
    peer: int = -1
    count: int = 0
    epoch: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The position as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Position:
        """The position in ``text``."""
        return Position(**json.loads(text))


class Tally:
    """How often this rank has posted each message."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], OrderedDict[int, int]] = {}

    def add(self, kind: str, peer: int, tag: int) -> int:
        """Count one more ``"send"`` or ``"recv"``; the new count."""
        counts = self._counts.setdefault((kind, peer), OrderedDict())
        counts[tag] = counts.pop(tag, 0) + 1
        if len(counts) > _KEPT_TAGS:
            counts.popitem(last=False)
        return counts[tag]

    def fill(self, position: Position) -> Position:
        """``position`` with the counts of now."""
        for (kind, peer), counts in self._counts.items():
            kept = position.sent if kind == "send" else position.received
            kept.update({f"{peer} {tag}": count for tag, count in counts.items()})
        return position


def find_circle(me: int, positions: Mapping[int, Position]) -> list[int] | None:
    """The ranks from ``me`` on that wait for each other for ever, or None.

    Args:
        me: this rank; ``positions[me]`` is where it is.
        positions: of the ranks known to be blocked.
    """
    path: list[int] = []

    def visit(rank: int) -> list[int] | None:
        if rank in path:
            return [*path, rank]
        path.append(rank)
        for peer in _waits_for(rank, positions):
            found = visit(peer)
            if found:
                return found
        path.pop()
        return None

    return visit(me)


def _waits_for(rank: int, positions: Mapping[int, Position]) -> list[int]:
    """The blocked ranks that have not done what ``rank`` waits for, and cannot before they go on."""
    mine = positions[rank]
    lacking: Callable[[Position], bool]
    if mine.kind == "collective":
        candidates = [peer for peer in positions if peer != rank]
        lacking = lambda other: other.kind != "collective" or other.number < mine.number  # noqa: E731
    else:
        candidates = [mine.peer] if mine.peer in positions else []
        lacking = lambda other: _posted(other, rank, mine) < mine.count  # noqa: E731
    return [peer for peer in candidates if lacking(positions[peer])]


def _posted(other: Position, rank: int, mine: Position) -> int:
    counts = other.sent if mine.kind == "recv" else other.received
    return counts.get(f"{rank} {mine.number}", 0)


def describe_circle(circle: list[int], positions: Mapping[int, Position]) -> str:
    """The circle in words, the same on every rank that finds it from the same positions."""
    ranks = sorted(set(circle))
    places = "; ".join(f"rank {rank} waits in {positions[rank].text}" for rank in ranks)
    return f"the ranks wait for each other and none can go on: {places}. {SAME_CALLS}"
