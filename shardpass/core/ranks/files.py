"""Files that are given or to be written: regular ones. Pipes and devices can block, never end, or not be replaced."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


@contextmanager
def tells_of_full_disk(path: str | os.PathLike[str], num_bytes: int) -> Iterator[None]:
    """A block that writes a file of `num_bytes`. If the disk is full, the error names the file and this size."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(f"{path} cannot be written: it needs {num_bytes} bytes ({error.strerror})") from error


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocate(file: IO[bytes], num_bytes: int) -> None:
    """Give `file` its size on the disk: on a disk that is full, writing into a mapped file would end the process."""
    if hasattr(os, "posix_fallocate"):
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    else:
        file.truncate(num_bytes)
