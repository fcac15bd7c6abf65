"""Run a training program as a child and follow the JSON lines it prints."""

from __future__ import annotations

import json
import subprocess
import tempfile
from typing import Any

from rich.console import Console

from shardpass.errors import ShardpassError

Record = dict[str, Any]


def follow(command: list[str], env: dict[str, str], title: str, epochs: int, console: Console) -> list[Record]:
    """The records a child printed, in order; the last is its summary. Shows the epoch meanwhile.

    Raises:
        ShardpassError: the child fails; with the end of what it said.
    """
    records: list[Record] = []
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
                    status.update(f"  {title}: epoch {len(records)} of {epochs}, loss {records[-1]['loss']:.4f}")
        except BaseException:
            child.terminate()
            raise
        if child.wait() != 0 or not records or records[-1]["event"] != "summary":
            errors.seek(0)
            raise ShardpassError(f"{title} ended with exit code {child.returncode}: {errors.read()[-2000:].strip()}")
    return records
