"""Run a training program as a child and follow the JSON lines it prints."""

from __future__ import annotations

import json
import subprocess
import tempfile
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.status import Status

from shardpass.errors import ShardpassError

Record = dict[str, Any]


class Progress:
    """Tells how far a child has come: on a terminal in place, elsewhere in a few lines, with the time left."""

    def __init__(self, title: str, epochs: int, console: Console, status: Status) -> None:
        self.title, self.epochs, self.console, self.status = title, epochs, console, status
        self.began, self.first = perf_counter(), 0.0
        if not console.is_terminal:
            console.print(f"  {title}: starting")

    def epoch(self, number: int, loss: float) -> None:
        """An epoch is done."""
        if number == 1:
            self.first = perf_counter()  # the first one, with what is made once, tells nothing about the others
        text = f"  {self.title}: epoch {number} of {self.epochs}, loss {loss:.4f}"
        if 1 < number < self.epochs:
            left = (perf_counter() - self.first) / (number - 1) * (self.epochs - number)
            text += f", about {left:.0f} s left"
        self.status.update(text)
        if not self.console.is_terminal and (number == 1 or number % max(1, self.epochs // 3) == 0):
            self.console.print(text)

    def finish(self) -> None:
        """The child has ended well."""
        self.console.print(f"  {self.title}: done in {perf_counter() - self.began:.0f} s")


def follow(command: list[str], env: dict[str, str], title: str, epochs: int, console: Console) -> list[Record]:
    """The records a child printed, in order; the last is its summary. Tells the epoch meanwhile.

    Raises:
        ShardpassError: the child fails; with the end of what it said.
    """
    records: list[Record] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        console.status(f"  {title}") as status,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        progress = Progress(title, epochs, console, status)
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):
                    records.append(json.loads(line))
                    if records[-1]["event"] == "epoch":
                        progress.epoch(len(records), records[-1]["loss"])
        except BaseException:
            child.terminate()
            raise
        if child.wait() != 0 or not records or records[-1]["event"] != "summary":
            errors.seek(0)
            raise ShardpassError(f"{title} ended with exit code {child.returncode}: {errors.read()[-2000:].strip()}")
        progress.finish()
    return records
