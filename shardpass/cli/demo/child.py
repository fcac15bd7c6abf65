"""Running a training program as a child and following the JSON lines it prints."""

from __future__ import annotations

import json
import subprocess
import tempfile
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardpass.errors import ShardpassError

Record = dict[str, Any]


def follow(command: list[str], env: dict[str, str], title: str, epochs: int, console: Console) -> list[Record]:
    """The records a child printed, in order; the last is its summary. Shows a progress bar meanwhile.

    Raises:
        ShardpassError: when the child fails; with the end of what it said.
    """
    columns = (
        TextColumn("  {task.description}"),
        MofNCompleteColumn(),
        BarColumn(30),
        TextColumn("{task.fields[text]}"),
    )
    records: list[Record] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=4) as bar,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        task = bar.add_task(title, total=epochs, text="starting")
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):
                    records.append(json.loads(line))
                    text = f"loss {records[-1]['loss']:.4f}"
                    bar.update(task, completed=records[-1].get("epoch", epochs), text=text)
        except BaseException:
            child.terminate()
            raise
        if child.wait() != 0 or not records or records[-1]["event"] != "summary":
            errors.seek(0)
            raise ShardpassError(f"{title} ended with exit code {child.returncode}: {errors.read()[-2000:].strip()}")
    return records


def losses(records: list[Record]) -> list[float]:
    """The loss of every epoch."""
    return [record["loss"] for record in records if record["event"] == "epoch"]


def seconds_per_epoch(records: list[Record]) -> float:
    """The median seconds of a training step (forward, backward, update)."""
    times = sorted(record["seconds"] for record in records if record["event"] == "epoch")
    return float(times[len(times) // 2])
