"""A directory that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from shardpass.data.manifest import MANIFEST_NAME
from shardpass.errors import StoreError


def check_target(path: Path, overwrite: bool) -> None:
    """Return when a store may be written at `path`.

    Raises:
        StoreError: when something is there that may not be replaced; only stores ever are, and only with `overwrite`.
    """
    if not path.parent.is_dir():
        raise StoreError(f"cannot write {path}: there is no directory {path.parent}")
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_dir():
        raise StoreError(f"{path} exists and is not a directory; choose another path")
    entries = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in entries if name != MANIFEST_NAME and not name.startswith("part-")]
    if foreign:
        raise StoreError(f"{path} holds other files ({foreign[0]}) and will not be replaced; choose another path")
    if entries and not overwrite:
        raise StoreError(
            f"{path} already holds a store; pass overwrite=True (--overwrite) to replace it, or choose another path. "
            f"Partition once, in one process, before training: not in a script that every rank runs"
        )


@contextlib.contextmanager
def new_directory(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling directory to write into; it takes the name `path` when the block ends without an error.

    A store that is replaced is moved aside first: for an instant there is none, never a mixture of both. Readers that
    have the old one open keep it.

    Raises:
        StoreError: as `check_target`, before and after the block.
    """
    check_target(path, overwrite)
    unique = uuid.uuid4().hex[:12]
    partial, replaced = (path.with_name(f".{path.name}.{word}-{unique}") for word in ("partial", "replaced"))
    partial.mkdir()
    try:
        yield partial
        for entry in partial.iterdir():
            _sync(entry)
        _sync(partial)
        check_target(path, overwrite)
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not path.exists() and replaced.exists():
            replaced.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """A temporary sibling directory of `path`, deleted with all that is in it when the block ends."""
    scratch = path.with_name(f".{path.name}.scratch-{uuid.uuid4().hex[:12]}")
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
