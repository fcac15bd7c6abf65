"""Numbers in text files (`.csv`, `.txt`, compressed or not), read with `numpy.loadtxt` a block of rows at a time."""

from __future__ import annotations

import gzip
import io
import itertools
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from shardpass.core.ranks import refuse_irregular
from shardpass.data.column_names import in_order, refuse_doubtful, refuse_index, refuse_separator
from shardpass.data.file_rows import FileRows, RowWriter
from shardpass.data.raw import EdgeArrays
from shardpass.data.reading import reading
from shardpass.data.streaming import Budget
from shardpass.data.team import Team

_BLOCK_ROWS = 1 << 18


def is_text(path: Path) -> bool:
    """Whether a file is read as text, by its name."""
    return path.name.removesuffix(".gz").endswith((".csv", ".txt"))


def text_edges(path: Path, budget: Budget) -> tuple[EdgeArrays, FileRows | None]:
    """Both ends of the edges in a text file, and their weights if there is a third column.

    Collective. Each rank reads its share of the lines; a compressed file is read by rank 0.
    """
    names, columns = _header(path)
    if columns not in (0, 2, 3):
        hint = " (commas separate those of a .csv, spaces those of a .txt)"
        found = f"{columns} columns" if columns > 1 else f"one column{hint}"
        raise ValueError(f"{path} has {found}; expected source, destination and perhaps a weight")
    if not in_order(names):
        raise ValueError(
            f"{path} has the columns {', '.join(names)}; expected source, destination and perhaps a weight, "
            "in this order"
        )
    refuse_index(path, names)
    kind = np.dtype([("src", np.int64), ("dst", np.int64), ("weight", np.float32)][: columns or 2])
    writers = {name: RowWriter(budget.file(), kind[name], name=path) for name in kind.names or ()}

    def copy() -> None:
        for table in _tables(path, kind, len(names) > 0, budget, _own_bytes(path, budget.team)):
            for name, writer in writers.items():
                writer.append(table[name])

    budget.team.together(str(path), copy)
    rows = {name: budget.team.join(writer) for name, writer in writers.items()}
    return EdgeArrays(rows["src"], rows["dst"]), rows.get("weight")


def text_rows(path: Path, budget: Budget) -> FileRows:
    """The numbers of a text file, [num_rows] or [num_rows, columns]: int64 if all are whole, else float32."""
    names, columns = _header(path)
    row_shape = () if columns <= 1 else (columns,)
    for kind in (np.int64, np.float32):
        writer = RowWriter(budget.file(), kind, row_shape, path)
        try:
            for table in _tables(path, kind, len(names) > 0, budget):
                writer.append(table.reshape(-1, *row_shape))
            break
        except ValueError:
            if kind is np.float32:
                raise
    return writer.rows()


def text_features(path: Path, keep: Collection[str]) -> list[str]:
    """The names of the columns in the header line, if there is one. Refused as those of `parquet_features`."""
    names, columns = _header(path)
    names = [name.strip(" \"'\ufeff") for name in names]
    refuse_doubtful(path, names, (), keep)
    return names if len(names) == columns > 1 else []


def _header(path: Path) -> tuple[list[str], int]:
    """The names in the header line, if there is one, and the number of columns (0 if the file holds no numbers)."""
    names: list[str] = []
    with _opened(path) as (_, file):
        for number, line in enumerate(file):
            if number == 0 and _delimiter(path) == ",":
                refuse_separator(path, line)
            words = [word.strip() for word in line.partition("#")[0].strip().split(_delimiter(path))]
            if number == 0 and any(words) and not any(map(_is_number, words)):
                names = words
            elif any(words):
                return names, len(words)
    return names, 0


def _own_bytes(path: Path, team: Team) -> range | None:
    """The bytes of this rank's share of the lines; `None` for all."""
    if team.size == 1:
        return None
    if path.suffix == ".gz":  # which must be read from its beginning
        return range(0) if team.rank else None
    share = team.share(path.stat().st_size)
    with open(path, "rb") as raw:
        return range(_next_line(raw, share.start), _next_line(raw, share.stop))


def _next_line(raw: IO[bytes], place: int) -> int:
    """The place of the first line that begins at a place in a file or after it."""
    if place:
        raw.seek(place - 1)
        raw.readline()
        return raw.tell()
    return 0


def _tables(
    path: Path, kind: Any, has_header: bool, budget: Budget, within: range | None = None
) -> Iterator[np.ndarray]:
    """The rows of a text file in blocks: [n, columns], or [n] of a dtype with a name for each column."""
    ndmin: Any = 1 if np.dtype(kind).names else 2
    done, size = 0, path.stat().st_size
    with _opened(path, within) as (raw, file):
        if has_header and not (within and within.start):
            file.readline()
        lines = (line for line in file if line.partition("#")[0].strip())  # NumPy would warn of others
        count = _BLOCK_ROWS
        while count == _BLOCK_ROWS:
            first = [*itertools.islice(lines, 1)]
            if not first:
                break
            try:
                with _errors_of_numpy_1():
                    block = itertools.chain(first, lines)
                    table = np.loadtxt(block, kind, delimiter=_delimiter(path), max_rows=_BLOCK_ROWS, ndmin=ndmin)
            except ValueError as error:
                done += 0 if within is None else _count_rows(path, has_header, range(within.start))
                hint = "; for ids of any kind see shardpass.data.stream_tables (--names)" if ndmin == 1 else ""
                raise ValueError(
                    f"{path} cannot be read as numbers, in the rows from {done} on: {error}{hint}"
                ) from error
            budget.report("read", min(raw.tell(), size), size)
            count = len(table)
            done += count
            if count:
                yield table


@contextmanager
def _errors_of_numpy_1() -> Iterator[None]:
    """A block in which NumPy 1 raises an error where it would warn and read 2.5 as 2. It is not for several threads."""
    if not np.__version__.startswith("1."):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=DeprecationWarning)
        yield


def _delimiter(path: Path) -> str | None:
    """Commas in `.csv`, blanks in `.txt`."""
    return "," if path.name.removesuffix(".gz").endswith(".csv") else None


def _count_rows(path: Path, has_header: bool, within: range) -> int:
    """The rows in the first bytes of a file."""
    with _opened(path, within) as (_, file):
        return max(0, sum(bool(line.partition("#")[0].strip()) for line in file) - has_header)


class _Bytes(io.RawIOBase):
    """Some bytes of a file."""

    def __init__(self, file: IO[bytes], within: range) -> None:
        file.seek(within.start)
        self._file: Any = file
        self._left = len(within)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(memoryview(buffer)[: self._left])
        self._left -= count
        return count


@contextmanager
def _opened(path: Path, within: range | None = None) -> Iterator[tuple[IO[bytes], IO[str]]]:
    """The file as it is, which tells how much has been read, and its text, or the text `within` some bytes of it."""
    with reading(path, "text"):
        refuse_irregular(path)
        with open(path, "rb") as raw:
            content: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            if within is not None:
                content = io.BufferedReader(_Bytes(content, within))
            yield raw, io.TextIOWrapper(content, encoding="utf-8")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
