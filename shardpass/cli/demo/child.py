"""Run a training program as a child and follow the JSON lines it prints."""

from __future__ import annotations

import json
import subprocess
import tempfile
from time import perf_counter
from typing import Any

from rich.console import Console

from shardpass.cli.console import Steps
from shardpass.errors import ShardpassError

Record = dict[str, Any]


def follow(command: list[str], env: dict[str, str], title: str, epochs: int, console: Console) -> list[Record]:
    """The records a child printed, in order; the last is its summary. Tells the epoch meanwhile.

    Raises:
        ShardpassError: the child fails; with the end of what it said.
    """
    records: list[Record] = []
    steps, start = Steps(console, 4.0), perf_counter()
    steps.tell(f"  {title}")
    with (
        tempfile.TemporaryFile("w+") as errors,
        console.status(f"  {title}") as status,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):
                    records.append(json.loads(line))
                    if records[-1]["event"] == "epoch":
                        text = f", loss {records[-1]['loss']:.4f}"
                        status.update(f"  {title}: epoch {len(records)} of {epochs}{text}")
                        steps.tell(f"  {title}: epochs", len(records), epochs, text)
        except BaseException:
            child.terminate()
            raise
        if child.wait() != 0 or not records or records[-1]["event"] != "summary":
            errors.seek(0)
            raise ShardpassError(f"{title} ended with exit code {child.returncode}: {errors.read()[-2000:].strip()}")
    console.print(f"  {title}: done in {perf_counter() - start:.0f} s")
    return records
