"""What all commands share: where text goes, and how an error that the user can mend is told in one sentence."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from time import monotonic
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shardpass.errors import (
    CommunicationError,
    InternalError,
    MissingDependencyError,
    ShardpassError,
    advice,
    tell_launcher,
)

EXPECTED = (ShardpassError, MissingDependencyError, ValueError, TypeError, NotImplementedError, OSError)
"""What the library raises for something that the user can mend. Of anything else the sentence tells the place."""

_ARGUMENT = re.compile(r"\b(overwrite|method|mode|parts)=(?:True|\.\.\.|'(\w+)')")


def output() -> Console:
    """The console for results; made when needed, since tests and notebooks replace ``sys.stdout``."""
    if sys.stdout.isatty() and _launcher_has_terminal():
        return Console(highlight=False)
    # redirected output has no width, and 80 columns would cut tables off
    return Console(highlight=False, width=120, force_terminal=False, soft_wrap=True)


def _launcher_has_terminal() -> bool:
    """False if the standard output is a pseudo-terminal of mpirun, whose own output goes to a file or a pipe."""
    if not any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")):
        return True
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    return False


class Steps(Progress):
    """Tells how far a long command is: in bars on a terminal, and in lines elsewhere.

    A line is printed when a step begins (if nothing of it is done yet), then `every` few seconds, with the time left.
    """

    def __init__(self, console: Console, every: float = 10.0) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=console.quiet or not console.is_terminal)
        self.every, self.step, self.of_step = every, "", TaskID(0)
        self.first, self.began, self.told = 0, 0.0, 0.0

    def tell(self, step: str, done: int = 0, total: int | None = None, text: str = "") -> None:
        """`done` of `total` units of `step` are done; `text` is told with that."""
        now, is_new = monotonic(), step != self.step
        far = step if total is None else f"{step}: {done} of {total}{text}"
        if is_new:
            self.step, self.first, self.began, self.told = step, done, now, now
            for task in self.tasks:  # the last step may have had no number
                self.update(task.id, completed=1, total=1)
            self.of_step = self.add_task(step, total=total)
        self.update(self.of_step, description=far, completed=done, total=total)
        if not self.disable:
            return
        if is_new and not done:
            self.console.print(f"{step} ...", markup=False)
        elif total is not None and self.first < done < total and now - self.told >= self.every:
            self.told = now
            left = (now - self.began) / (done - self.first) * (total - done)
            self.console.print(f"{far}, about {left:.0f} s left", markup=False)


def fail(message: str) -> NoReturn:
    """Print one sentence to the standard error and exit with code 1."""
    tell_launcher(message)
    print(f"Error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def sentence(error: BaseException) -> str:
    """The text of an error, with the options of the command line in place of the arguments of the library.

    The kind of the error comes first where the text does not tell it. If nobody has foreseen the error, the place where
    it was raised comes last.
    """
    text = _ARGUMENT.sub(lambda found: f"--{found[1]} {found[2] or ''}".rstrip(), str(error).strip())
    text = text or type(error).__name__
    notes = getattr(error, "__notes__", ()) if isinstance(error, CommunicationError) else ()
    told = advice(error)
    text = ". ".join([text, *notes]) + (f" ({told})" if told else "")
    text = text if isinstance(error, ShardpassError | ValueError) else f"{type(error).__name__}: {text}"
    if isinstance(error, EXPECTED) and not isinstance(error, InternalError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f"at {frames[-1].filename}:{frames[-1].lineno}; " if frames else ""
    return f"{text} ({where}SHARDPASS_DEBUG=1 shows the traceback)"
