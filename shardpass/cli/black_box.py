"""`BlackBox`: the last calls that a rank has written when its run ended badly; see `backends.call_log`.

[Note: strangers] A black box may come from somebody else. So its size is bounded, every value is checked, and text that
will be shown holds nothing that moves a terminal's cursor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from shardpass.backends.call_log import FORMAT, HEAD
from shardpass.core.ranks import refuse_irregular

_MAX_BYTES = 1 << 23
_MAX_TEXT = 1000
_MAX_NUMBER = 1 << 62
_MAX_CALLS = 10_000
_MAX_RANKS = 1 << 16
T = TypeVar("T")


@dataclass(frozen=True)
class CallRecord:
    """A message or a collective of one rank. The times are seconds since 1970, or 0 for what has not happened.

    Attributes:
        path: the communicator.
        side: ``"send"`` or ``"recv"``; empty for a collective.
        label: what the engine calls it; it names the call and the round.
        call: all of this in words.
        number: the tag of a message.
        count: of the messages with this tag between the two ranks, or of the collectives.
        peer: the other rank; -1 for a collective.
        bytes: of this rank's payload.
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
    bytes: int
    began: float
    waited: float
    ended: float

    def __post_init__(self) -> None:
        if self.side not in ("", "send", "recv") or (self.side == "") != (self.peer == -1):
            raise ValueError(f"a call with the side {self.side!r} and the peer {self.peer}")

    @property
    def is_open(self) -> bool:
        """Whether the rank was waiting for it in the end."""
        return self.waited > 0 and self.ended == 0

    @property
    def last_time(self) -> float:
        """When something happened to it last."""
        return max(self.began, self.waited, self.ended)

    def words(self) -> str:
        """It with the other rank and the bytes."""
        to = {"send": f" to rank {self.peer}", "recv": f" from rank {self.peer}"}.get(self.side, "")
        return f"{self.call}{to}, {self.bytes:,} bytes"


@dataclass(frozen=True)
class BlackBox:
    """What one rank has written at the time `at`: where it ran, `why` it failed as it knows, its calls in order."""

    job: str
    rank: int
    size: int
    host: str
    process: int
    at: float
    why: str
    calls: tuple[CallRecord, ...] = ()


def read_black_boxes(paths: Sequence[Path]) -> dict[int, BlackBox]:
    """The black boxes of the ranks of one job, by rank. Anything else is a `ValueError`."""
    found: dict[int, BlackBox] = {}
    for path in paths:
        box = _read(path)
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


def _read(path: Path) -> BlackBox:
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
        head, *calls = [json.loads(line) for line in raw.decode().splitlines()]
        if head[HEAD] != FORMAT:
            raise ValueError(f"its format is {str(head[HEAD])[:40]!r}, but this version of shardpass reads {FORMAT}")
        if len(calls) >= _MAX_CALLS:
            raise ValueError(f"it has more than {_MAX_CALLS:,} lines")
        size = _checked(head, "size", "int", 1, _MAX_RANKS)
        return replace(
            _made(BlackBox, head, rank=(0, size - 1)),
            calls=tuple(_made(CallRecord, line, peer=(-1, size - 1)) for line in calls),
        )
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is no black box of a rank: {error or type(error).__name__}") from None


def _made(kind: type[T], line: Any, **bounds: tuple[int, int]) -> T:
    """A `kind` of the values of a line, all of which are checked. Numbers are not negative, unless `bounds` say so."""
    names = {field.name: field.type for field in fields(kind) if field.name != "calls"}  # type: ignore[arg-type]
    return kind(**{name: _checked(line, name, of, *bounds.get(name, ())) for name, of in names.items()})


def _checked(line: Any, name: str, kind: Any, low: int = 0, high: int = _MAX_NUMBER) -> Any:
    value = line[name]
    if kind == "str":
        if not isinstance(value, str):
            raise ValueError(f"{name} is no text")
        return "".join(letter if letter.isprintable() else " " for letter in value[:_MAX_TEXT])
    is_number = type(value) is int or (kind == "float" and type(value) is float and math.isfinite(value))
    if not is_number or not low <= value <= high:
        raise ValueError(f"{name} is {str(value)[:40]!r}, but it must be a number in [{low}, {high}]")
    return value
