"""Shared by the tests of the command line: running it in this process and as a real program."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardpass.cli.app import app
from shardpass.cli.launch import find_program, launch_command, launcher_environment

MODULE = "shardpass.cli"


def cli(*arguments: Any) -> Result:
    """The outcome of `shardpass ARGUMENTS` in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def passed(*arguments: Any) -> str:
    """What a command printed that must succeed."""
    result = cli(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def refused(*arguments: Any) -> str:
    """The one line that a command printed which must end in an error told in words."""
    result = cli(*arguments)
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.output
    return lines[0]


def misused(*arguments: Any) -> str:
    """What typer said about options that it does not take, without boxes and line breaks."""
    result = cli(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


def launched(launcher: str, ranks: int, *arguments: Any, timeout: float = 480) -> subprocess.CompletedProcess[str]:
    """The outcome of a command under ``mpirun``, ``torchrun`` or ``none``."""
    command = launch_command(launcher, ranks, MODULE)
    assert command is not None
    words = [*command, *(str(argument) for argument in arguments)]
    return subprocess.run(
        words, env=launcher_environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def records(log: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines log."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def epochs(log: Path) -> list[dict[str, Any]]:
    """The epoch lines of a log."""
    return [record for record in records(log) if record["event"] == "epoch"]


needs_mpirun = pytest.mark.skipif(find_program("mpirun") is None, reason="there is no mpirun here")
PYTHON = sys.executable
