"""What libraries raise about files that are not as they should be, as one kind of error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """A block in which a library reads the file `path`, which should be `kind`, such as "a Parquet file".

    Raises:
        ValueError: for any error of the library, since none of them documents all that a damaged file leads to.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):  # one of ours
            raise
        raise ValueError(f"{path} cannot be read as {kind}: {error or type(error).__name__}") from error
