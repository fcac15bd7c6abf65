"""`main`: the entry point of the `shardpass` command. It imports typer and rich only when called."""

from __future__ import annotations

import os
import sys

from shardpass.errors import MissingDependencyError, require


def main() -> None:
    """Run the command line. If typer or rich is missing, print one sentence with the pip command and exit with 1."""
    try:
        for module in ("typer", "rich"):
            require(module, "cli", "the shardpass command")
    except MissingDependencyError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it when it makes its first tensor
    from shardpass.cli.app import app

    app(prog_name="shardpass")
