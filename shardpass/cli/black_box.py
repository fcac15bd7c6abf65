"""`BlackBox`: the last calls that a rank has written when its run ended badly; see `backends.call_log`.

[Note: strangers] A black box may come from somebody else. So its size is bounded, every value is checked, and text that
will be shown holds nothing that moves a terminal's cursor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardpass.backends.call_log import FORMAT, HEAD
from shardpass.core.ranks import refuse_irregular

_MAX_BYTES = 1 << 23
_MAX_TEXT = 1000
_MAX_NUMBER = 1 << 62
_MAX_CALLS = 10_000
_MAX_RANKS = 1 << 16
T = TypeVar("T", int, float, str)


@dataclass(frozen=True)
class Call:
    """A message or a collective of one rank. The times are seconds since 1970, or 0 for what has not happened.

    Attributes:
        path: the communicator.
        side: ``"send"`` or ``"recv"``; empty for a collective.
        kind: the method, such as ``"all_reduce"``.
        label: what the engine calls it; it names the call and the round.
        call: all of this in words.
        number: the tag of a message.
        count: of the messages with this tag between the two ranks, or of the collectives.
        peer: the other rank; -1 for a collective.
        num_bytes: of this rank's payload.
        began, waited, ended: when it was posted, when the rank began to wait for it, and when it was complete.
    """

    path: str
    side: str
    kind: str
    label: str
    call: str
    number: int
    count: int
    peer: int
    num_bytes: int
    began: float
    waited: float
    ended: float

    @property
    def is_open(self) -> bool:
        """Whether the rank was waiting for it in the end."""
        return self.waited > 0 and self.ended == 0

    @property
    def last_time(self) -> float:
        """When something happened to it last."""
        return max(self.began, self.waited, self.ended)

    def words(self) -> str:
        """It in words, with the other rank and the bytes."""
        to = {"send": f" to rank {self.peer}", "recv": f" from rank {self.peer}"}.get(self.side, "")
        return f"{self.call}{to}, {self.num_bytes:,} bytes"


@dataclass(frozen=True)
class BlackBox:
    """What one rank has written.

    Attributes:
        job: the name that the ranks of a job share.
        rank, size: of this rank, and how many there are.
        host, process: where it ran.
        at: when it was written.
        why: the failure, as this rank knows it.
        calls: the oldest first.
    """

    job: str
    rank: int
    size: int
    host: str
    process: int
    at: float
    why: str
    calls: tuple[Call, ...]


def read_black_boxes(paths: Sequence[Path]) -> dict[int, BlackBox]:
    """The black boxes of one job, by rank.

    Raises:
        ValueError: a file is no black box, or the files are not those of different ranks of one job.
        OSError: a file cannot be read.
    """
    found: dict[int, BlackBox] = {}
    for path in paths:
        box = read_black_box(path)
        first = next(iter(found.values()), box)
        if (box.job, box.size) != (first.job, first.size):
            raise ValueError(
                f"{path} is of the job {box.job!r} with {box.size} ranks, but {paths[0]} is of the job {first.job!r} "
                f"with {first.size}: give the files of one job"
            )
        if box.rank in found:
            raise ValueError(f"{path} is of rank {box.rank}, and so is another of the files: give each once")
        found[box.rank] = box
    return dict(sorted(found.items()))


def read_black_box(path: Path) -> BlackBox:
    """The black box in a file.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    if not path.exists():
        raise ValueError(
            f"there is no file {path}: doctor takes the files that the errors of a failed run name, or nothing, to try "
            f"this machine"
        )
    refuse_irregular(path)
    with open(path, "rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    try:
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        lines = [json.loads(line) for line in raw.decode().splitlines()]
        return _box(lines)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is no black box of a rank: {error or type(error).__name__}") from None


def _box(lines: list[Any]) -> BlackBox:
    head = lines[0]
    if head[HEAD] != FORMAT:
        raise ValueError(f"its format is {str(head[HEAD])[:40]!r}, but this version of shardpass reads {FORMAT}")
    if len(lines) > _MAX_CALLS:
        raise ValueError(f"it has more than {_MAX_CALLS:,} lines")
    size = _number(head, "size", int, 1, _MAX_RANKS)
    return BlackBox(
        _text(head, "job"),
        _number(head, "rank", int, 0, size - 1),
        size,
        _text(head, "host"),
        _number(head, "process", int),
        _number(head, "at", float),
        _text(head, "why"),
        tuple(_call(line, size) for line in lines[1:]),
    )


def _call(line: Any, size: int) -> Call:
    path, side, kind, label, call = (_text(line, name) for name in ("path", "side", "kind", "label", "call"))
    peer = _number(line, "peer", int, -1, size - 1)
    began, waited, ended = (_number(line, name, float) for name in ("began", "waited", "ended"))
    number, count, num_bytes = (_number(line, name, int) for name in ("number", "count", "bytes"))
    if side not in ("", "send", "recv") or (side == "") != (peer == -1):
        raise ValueError(f"a call with the side {side!r} and the peer {peer}")
    return Call(path, side, kind, label, call, number, count, peer, num_bytes, began, waited, ended)


def _number(line: Any, name: str, kind: type[T], low: int = 0, high: int = _MAX_NUMBER) -> T:
    value = line[name]
    is_number = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if not is_number or not low <= value <= high:
        raise ValueError(f"{name} is {str(value)[:40]!r}, but it must be a number in [{low}, {high}]")
    return kind(value)


def _text(line: Any, name: str) -> str:
    value = line[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return "".join(letter if letter.isprintable() else " " for letter in value[:_MAX_TEXT])
