"""`main`: the entry point of the `shardpass` command. It imports typer and rich only when called."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from shardpass.errors import MissingDependencyError, require


def main() -> None:
    """Run the command line. What is typed wrongly, or misses a package, ends it with one sentence."""
    try:
        for module in ("typer", "rich"):
            require(module, "cli", "the shardpass command")
    except MissingDependencyError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    from typer.main import get_command

    from shardpass.backends import CHEAP_TENSORS, reuse_memory
    from shardpass.cli.app import app
    from shardpass.errors import tell_launcher

    for name, value in CHEAP_TENSORS.items():  # torch reads the first when it makes its first tensor
        os.environ.setdefault(name, value)
    reuse_memory()
    warnings.formatwarning = _warning
    try:
        code = get_command(app).main(prog_name="shardpass", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        sentence = _misuse(error)
        tell_launcher(sentence)
        print(sentence, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None) -> str:
    """A warning as the command tells it: what is of the user's data has no line of ours."""
    place = "" if issubclass(category, UserWarning) else f"{filename}:{lineno}: {category.__name__}: "
    return f"Warning: {place}{message}\n"


def _misuse(error: Any) -> str:
    """The sentence for words that the command does not take; the help, where nothing was typed."""
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "shardpass"
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.ctx.get_help())
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    end = "" if text.endswith("?") else "."
    return f"Error: {path}: {text[:1].lower()}{text[1:]}{end} `{path} --help` tells what it takes"
