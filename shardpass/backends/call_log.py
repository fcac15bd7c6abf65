"""The last calls of a rank, which go to a file, its *black box*, when a run ends badly. `shardpass doctor` reads it.

The file holds lines of JSON: what the rank is and why the run ended, and then its calls, the oldest first. It is
written when the failure becomes known on the rank, by whatever thread learns of it. Nothing is written before that.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time

from shardpass.backends.identity import Header

FORMAT = 1
HEAD = "black box of shardpass"  # the name of the format, in the first line
FOLDER_VARIABLE = "SHARDPASS_BLACK_BOX"
_KEPT_CALLS = 1000
_WRITE_SECONDS = 2.0  # a file system that has gone must not keep a rank from ending


@dataclass(slots=True)
class LoggedCall:
    """A message or a collective of this rank: an entry of its black box, which `cli.black_box` explains.

    The times are those of `time.time`, or 0.
    """

    path: str
    side: str
    header: Header
    peer: int
    count: int
    num_bytes: int
    began: float = field(default_factory=time)
    waited: float = 0.0
    ended: float = 0.0

    def __str__(self) -> str:
        ways = {"send": " to rank ", "recv": " from rank "}
        return self.header.describe() + (f"{ways[self.side]}{self.peer}" if self.side else "")

    def wait(self) -> None:
        """Note that the rank waits for it."""
        self.waited = time()

    def end(self) -> None:
        """Note that it is complete."""
        self.ended = time()

    def to_json(self) -> str:
        """It as a line of a black box."""
        header = self.header
        return json.dumps(
            {
                "path": self.path, "side": self.side, "kind": header.kind, "label": header.label,
                "call": header.describe(), "number": header.number, "count": self.count, "peer": self.peer,
                "bytes": self.num_bytes, "began": self.began, "waited": self.waited, "ended": self.ended,
            }
        )  # fmt: skip


class CallLog:
    """The last calls of a rank, on all communicators of its job. Any thread may use it.

    Attributes:
        job: a name that the ranks share, and no other job has. Nothing is written as long as it is empty.
        folder: where the black box goes. `None` means the folder that the environment variable SHARDPASS_BLACK_BOX
            names, or else the one for temporary files. If it is empty, nothing is written.
    """

    def __init__(self, rank: int, size: int, job: str = "") -> None:
        self.job = job
        self.folder: str | None = None
        self._rank, self._size = rank, size
        self._calls: deque[LoggedCall] = deque(maxlen=_KEPT_CALLS)
        self._why = self._words = ""
        self._writing = threading.Lock()

    def begin(self, path: str, side: str, header: Header, peer: int, count: int, num_bytes: int) -> LoggedCall:
        """Add a call, which begins now."""
        call = LoggedCall(path, side, header, peer, count, num_bytes)
        self._calls.append(call)
        return call

    def write(self, why: str) -> str:
        """Write the black box of this failure, unless it has been written. Returns words that say where it is.

        They are empty if nothing is to be written, or if writing takes longer than two seconds.
        """
        with self._writing:
            if self.job and self._size > 1 and why != self._why:
                self._why, self._words = why, ""
                writer = threading.Thread(target=self._write, args=(why,), name="shardpass black box", daemon=True)
                with suppress(RuntimeError):  # the interpreter ends
                    writer.start()
                    writer.join(_WRITE_SECONDS)
            return self._words

    def _write(self, why: str) -> None:
        folder = os.environ.get(FOLDER_VARIABLE, tempfile.gettempdir()) if self.folder is None else self.folder
        if not folder:
            return
        path = Path(folder, f"shardpass-{self.job}-rank{self._rank}.jsonl").absolute()
        try:
            _replace(path, self._text(why))
        except OSError as error:
            self._words = f"the last calls of rank {self._rank} could not be written to {path}: {error.strerror}"
            return
        every = path.with_name(f"shardpass-{self.job}-rank*.jsonl")
        self._words = (
            f"the last calls of rank {self._rank} are in {path}; `shardpass doctor {every}` tells who was missing where"
        )

    def _text(self, why: str) -> str:
        calls: list[LoggedCall] = []
        for _ in range(10):
            with suppress(RuntimeError):  # another thread has added a call
                calls = list(self._calls)
                break
        first = {
            HEAD: FORMAT, "job": self.job, "rank": self._rank, "size": self._size,
            "host": socket.gethostname(), "process": os.getpid(), "at": time(), "why": why,
        }  # fmt: skip
        return "\n".join([json.dumps(first), *(call.to_json() for call in calls), ""])


def _replace(path: Path, text: str) -> None:
    """Give the file ``path`` this text. What another user has put in its place is not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
