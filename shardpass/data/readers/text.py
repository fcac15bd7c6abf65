"""Numbers in text files (`.csv`, `.txt`, compressed or not), read a block of lines at a time."""

from __future__ import annotations

import gzip
import io
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from shardpass.data.readers.column_names import in_order
from shardpass.data.streaming.budget import Report

_BLOCK_BYTES = 4 << 20
TEXT = (".csv", ".txt")


def is_text(path: Path) -> bool:
    """Whether a file is read as text, by its name."""
    return path.name.removesuffix(".gz").endswith(TEXT)


def delimiter_of(path: Path) -> str | None:
    """Commas in `.csv`, blanks in `.txt`."""
    return "," if path.name.removesuffix(".gz").endswith(".csv") else None


def header_and_columns(path: Path) -> tuple[int, int]:
    """How many lines to skip, and how many columns the file has (0 when it holds no numbers)."""
    delimiter = delimiter_of(path)
    with _told(path), open(path, "rb") as raw, _as_text(path, raw) as file:
        header = False
        for number, line in enumerate(file):
            words = [word.strip() for word in line.partition("#")[0].strip().split(delimiter)]
            if not any(words):
                continue
            if number == 0 and not any(_is_number(word) for word in words):
                header = True
                continue
            return int(header), len(words)
    return 0, 0


def edge_columns(path: Path) -> tuple[int, int]:
    """As `header_and_columns`, of an edge list.

    Raises:
        ValueError: other columns than source, destination and perhaps a weight, or names in another order.
    """
    skip, columns = header_and_columns(path)
    if columns not in (0, 2, 3):
        raise ValueError(f"{path} has {columns} columns; expected source, destination and perhaps a weight")
    if skip:
        with open(path, "rb") as raw, _as_text(path, raw) as file:
            names = file.readline().split(delimiter_of(path))
        if not in_order(names):
            raise ValueError(
                f"{path} has the columns {', '.join(name.strip() for name in names)}; expected source, destination and "
                f"perhaps a weight, in this order"
            )
    return skip, columns


def table_blocks(path: Path, kind: Any, skip: int, report: Report) -> Iterator[np.ndarray]:
    """The rows of a text file in blocks: [n, columns] of a plain dtype, [n] of one with a name per column.

    Args:
        kind: NumPy's dtype. Whole numbers are not read through floats, so they are exact.
        skip: lines to leave out at the beginning.
        report: told the bytes read as the stage "read".

    Raises:
        ValueError: naming the first line that is not as expected.
    """
    dtype, size, done = np.dtype(kind), path.stat().st_size, skip
    plain = dtype.names is None
    columns = None
    with open(path, "rb") as raw, _as_text(path, raw) as file:
        for _ in range(skip):
            file.readline()
        while lines := _lines(file, path):
            report("read", min(raw.tell(), size), size)
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*input contained no data.*")
                    table = np.loadtxt(lines, dtype, delimiter=delimiter_of(path), ndmin=2 if plain else 1)
                if table.size and plain:
                    columns = columns or table.shape[1]
                    if table.shape[1] != columns:
                        raise ValueError("the number of columns changes between blocks")
            except ValueError as error:
                raise ValueError(_first_wrong(path, lines, done, dtype, columns, error)) from error
            done += len(lines)
            if table.size:
                yield table


def _lines(file: IO[str], path: Path) -> list[str]:
    with _told(path):
        return file.readlines(_BLOCK_BYTES)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """A block in which a torn or foreign file is an error that names it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error


def _first_wrong(path: Path, lines: list[str], done: int, dtype: np.dtype[Any], columns: int | None, error: Any) -> str:
    """A sentence about the first line that cannot be read."""
    kinds = [dtype[name] for name in dtype.names or ()]
    for number, line in enumerate(lines, done + 1):
        words = line.partition("#")[0].strip().split(delimiter_of(path))
        if words in ([], [""]):
            continue
        columns = columns or len(kinds) or len(words)
        if len(words) != columns:
            return f"{path}, line {number}: {len(words)} columns; expected {columns}, as in the lines before"
        for word, kind in zip(words, kinds or [dtype] * columns):
            if not _fits(word, kind):
                wanted = "an integer" if kind.kind == "i" else "a number"
                return f"{path}, line {number}: found {word.strip()!r}; expected {wanted}"
    return f"{path} cannot be read, in the lines from {done + 1} on: {error}"


def _fits(word: str, kind: np.dtype[Any]) -> bool:
    if not word.strip():
        return False
    try:
        np.loadtxt([word], kind, delimiter=",")
    except ValueError:
        return False
    return True


def _as_text(path: Path, raw: IO[bytes]) -> IO[str]:
    opened: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    return io.TextIOWrapper(opened, encoding="utf-8")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
