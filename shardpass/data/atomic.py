"""A store appears under its name only when it is complete."""

from __future__ import annotations

from pathlib import Path

from shardpass.core.ranks import flush
from shardpass.data.keys import GRAPH_FILE, NAMES_FILE
from shardpass.data.manifest import MANIFEST_NAME
from shardpass.errors import StoreError


def check_target(path: Path, overwrite: bool) -> None:
    """Return when a store may be written at `path`, whose parent has been made.

    Raises:
        StoreError: when something is there already, or the parent cannot be made. Only a store is ever replaced, and
            only with `overwrite`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {path.parent} cannot be made ({error.strerror})") from error
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_dir():
        raise StoreError(f"{path} exists and is not a directory; choose another path")
    entries = sorted(entry.name for entry in path.iterdir())
    ours = MANIFEST_NAME, NAMES_FILE, GRAPH_FILE
    foreign = [name for name in entries if name not in ours and not name.startswith("part-")]
    if foreign:
        raise StoreError(f"{path} holds other files ({foreign[0]}) and will not be replaced; choose another path")
    if entries and not overwrite:
        raise StoreError(
            f"{path} already holds a store; pass overwrite=True to replace it, or choose another path. "
            f"Partition once, before training: not in the script that trains"
        )


def publish(complete: Path, path: Path, overwrite: bool) -> None:
    """Give the directory `complete` the name `path`.

    A store that is there already is moved aside first, next to `complete`, where the caller deletes it. For an instant
    there is no store at `path`, but never a mixture of both. Readers that have the old one open keep what they have
    mapped. What they would read later is refused.
    """
    for entry in complete.iterdir():
        flush(entry)
    flush(complete)
    check_target(path, overwrite)
    replaced = complete.with_name(f"{complete.name}-replaced")
    try:
        if path.exists():
            path.rename(replaced)
        complete.rename(path)
    finally:
        if not path.exists() and replaced.exists():
            replaced.rename(path)
    flush(path.parent)
