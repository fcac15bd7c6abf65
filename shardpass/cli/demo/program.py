"""The two programs of a stage: running one and following what it prints, and the table that compares them."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from shardpass.cli.console import Steps
from shardpass.core.ranks import bytes_text
from shardpass.errors import ShardpassError

Record = dict[str, Any]


def follow(command: list[str], env: dict[str, str], title: str, epochs: int, console: Console) -> list[Record]:
    """The JSON lines that a training program printed, of which the last is its summary. Tells the epoch meanwhile.

    If the program fails, the error has the end of what it said.
    """
    records: list[Record] = []
    start = perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        Steps(console, 4.0) as steps,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        steps.tell(f"  {title}")
        try:
            for line in child.stdout:
                if line.startswith("{"):
                    records.append(json.loads(line))
                    if records[-1]["event"] == "epoch":
                        loss = f", loss {records[-1]['loss']:.4f}"
                        steps.tell(f"  {title}: epochs", len(records), epochs, loss)
        except BaseException:
            child.terminate()
            raise
        if child.wait() != 0 or not records or records[-1]["event"] != "summary":
            errors.seek(0)
            raise ShardpassError(f"{title} ended with exit code {child.returncode}: {errors.read()[-2000:].strip()}")
    console.print(f"  {title}: done in {perf_counter() - start:.0f} s")
    return records


class Program:
    """What one of the two programs of a stage printed.

    Attributes:
        seconds: the median of a training step (forward, backward, update).
        peaks: bytes of each process at its peak, above the loaded graph.
    """

    def __init__(self, records: list[Record]) -> None:
        epochs = [record for record in records if record["event"] == "epoch"]
        self.records, self.peaks = records, list[int](records[-1]["peak_bytes"])
        self.losses = [float(record["loss"]) for record in epochs]
        self.seconds = statistics.median_high(float(record["seconds"]) for record in epochs)


@dataclass(frozen=True)
class Stage:
    """The two programs of a stage."""

    plain: Program
    sharded: Program
    launcher: str

    @property
    def gap(self) -> float:
        """The largest difference of the losses of an epoch."""
        return max(abs(a - b) for a, b in zip(self.plain.losses, self.sharded.losses))

    def table(self, has_learnt: bool) -> Table:
        """The two programs side by side, memory first; with the accuracy if the model has learnt something."""
        table = Table("")
        for title in ("plain PyG, 1 process", f"shardpass, {len(self.sharded.peaks)} ranks ({self.launcher})"):
            table.add_column(title, justify="right")
        sides = (self.plain, self.sharded)
        table.add_row("peak memory, the largest process", *(bytes_text(max(side.peaks)) for side in sides))
        table.add_row("peak memory, all processes", *(bytes_text(sum(side.peaks)) for side in sides))
        table.add_row("loss, first epoch", *(f"{side.losses[0]:.6f}" for side in sides))
        table.add_row("loss, last epoch", *(f"{side.losses[-1]:.6f}" for side in sides))
        if has_learnt:
            table.add_row("test accuracy", *(f"{side.records[-1]['test']:.4f}" for side in sides))
        table.add_row("seconds per epoch (training)", *(f"{side.seconds:.2f}" for side in sides))
        return table
