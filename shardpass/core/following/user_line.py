"""The line of the user's own code that is running, and what has called it."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from functools import cache
from importlib.util import find_spec
from inspect import currentframe
from pathlib import Path
from typing import Any, NamedTuple

from shardpass.core.ranks import torch_private

_LIBRARIES = ("torch", "torch_geometric", "dgl", "shardpass", "numpy")
_FOLLOWING = ("shardpass.core.following.", "shardpass.core.ranks.random", *torch_private.CALLS_MODES)
"""What sees operations, and what torch calls it by."""


class UserLine(NamedTuple):
    """A line of code, which is read from its file only where somebody is told of it. Number 0: in a library."""

    file: str
    number: int

    def __str__(self) -> str:
        if not self.number:
            return "in a library"
        return f"{self.file}:{self.number}: {linecache.getline(self.file, self.number).strip()}"


def user_line(error: BaseException | None = None) -> UserLine:
    """``file:line: code`` of the innermost frame that is in no library, now or where `error` was raised."""
    stack = (
        traceback.walk_stack(currentframe()) if error is None else reversed([*traceback.walk_tb(error.__traceback__)])
    )
    for frame, number in stack:
        file = frame.f_code.co_filename
        if not file.startswith(_folders()) and not file.endswith((".pyx", ".pxi")):
            return UserLine(file, number)
    return UserLine("", 0)


@cache
def _folders() -> tuple[str, ...]:
    found = [str(Path(spec.origin).parent) for name in _LIBRARIES if (spec := find_spec(name)) and spec.origin]
    return *found, sysconfig.get_path("stdlib"), "<"


def is_asked_by(*packages: str) -> bool:
    """Whether the innermost code that does not belong to following is that of `packages`."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    return next(name for name in names if not name.startswith(_FOLLOWING)).startswith(packages)


def given_to(module: str, name: str) -> Any:
    """What a function of `module` among the callers has been given as `name`; `None` if none is among them."""
    frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_globals.get("__name__") == module)
    return next((frame.f_locals[name] for frame in frames if name in frame.f_locals), None)


def is_called_by(package: str) -> bool:
    """Whether code of `package` is among the callers."""
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame, _ in traceback.walk_stack(None))
