"""Files that are given or to be written: regular ones. Pipes and devices can block, never end, or not be replaced."""

from __future__ import annotations

import tempfile
from pathlib import Path


def refuse_irregular(path: Path, what: str = "read") -> None:
    """Return when there is nothing at `path`, or a regular file, or a link to one.

    Raises:
        OSError: for anything else, which will not be `what` ("read", or "replaced").
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
    if (path.exists() or path.is_symlink()) and not path.is_file():
        raise OSError(f"{path} is no regular file, and will not be {what}: give another name")


def prepare_target(path: Path) -> None:
    """Make the folder of a file that will be written, and return when the file can be.

    Raises:
        OSError: the folder cannot be made or written, or at `path` is something that will not be replaced.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error} ({path.parent})") from error
    refuse_irregular(path, "replaced")
