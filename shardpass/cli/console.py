"""What all commands share: where text goes, and how an error that the user can mend is told in one sentence."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console

from shardpass.core.ranks import bytes_text as bytes_text
from shardpass.errors import InternalError, MissingDependencyError, ShardpassError

EXPECTED = (ShardpassError, MissingDependencyError, ValueError, TypeError, NotImplementedError, OSError)
"""What the library raises for something the user can mend; anything else is a defect and keeps its traceback."""

_OPTIONS = {"overwrite=True": "--overwrite", "method='fennel'": "--method fennel", "parts=...": "--parts"}
"""Arguments of the library that its errors advise, and the options that they are here."""


def output() -> Console:
    """The console for results; made when needed, since tests and notebooks replace ``sys.stdout``."""
    # Redirected output has no width; 80 columns would cut tables off.
    if sys.stdout.isatty() and launcher_has_terminal():
        return Console(highlight=False)
    return Console(highlight=False, width=120, force_terminal=False, soft_wrap=True)


def launcher_has_terminal() -> bool:
    """False where the standard output is a pseudo-terminal of mpirun whose own output goes to a file or a pipe."""
    if not any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")):
        return True
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    return False


def fail(message: str) -> NoReturn:
    """Print one sentence to the standard error and exit with code 1."""
    print(f"Error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def sentence(error: BaseException) -> str:
    """The words of an error, with its kind where the kind is no part of them."""
    text = str(error).strip() or type(error).__name__
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    return text if isinstance(error, ShardpassError | ValueError) else f"{type(error).__name__}: {text}"


@contextmanager
def told_in_words() -> Iterator[None]:
    """A block whose expected errors end the command with one sentence instead of a traceback."""
    try:
        yield
    except InternalError:
        raise
    except EXPECTED as error:
        fail(sentence(error))
