"""The number of each name, found by DuckDB in bounded memory: what does not fit goes to temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardpass.core.ranks import allocate, tells_of_full_disk
from shardpass.data.file_rows import FileRows
from shardpass.data.names.column import IdColumn, column_of_names, write_names
from shardpass.data.names.names import Examples, Names
from shardpass.data.streaming import Budget
from shardpass.errors import require

_ROWS = 1 << 17
_THREADS = 4  # each of which wants memory of its own, and one thread reads the stream
_LEAST_MIB = 256  # DuckDB needs some blocks of memory, however little there is to do
_FIND = """
    SELECT stream.row, names.row AS number, CASE WHEN names.row IS NULL THEN stream.id END AS unknown
    FROM stream LEFT JOIN names ON stream.id = names.id
"""
_TWICE = """
    CREATE TEMP TABLE twice AS
    SELECT id, min(row) AS first, count(*) AS times FROM names GROUP BY id HAVING count(*) > 1
"""


@dataclass(frozen=True)
class Dictionary:
    """The names of all nodes, in a table of DuckDB. Made by `open_dictionary`. `kind` is "strings" or "integers"."""

    base: Any
    what: str
    kind: str
    budget: Budget

    def numbers(self, column: IdColumn) -> FileRows:
        """The number of the node in each row of a column, int64 [n], in a temporary file."""
        _check_kind(column, self.kind, self.what)
        path, unknown, done = self.budget.file(), Examples(), 0
        if column.count:
            with tells_of_full_disk(path, 8 * column.count), open(path, "wb") as file:
                allocate(file, 8 * column.count)
            found = np.memmap(path, np.int64, "r+", shape=(column.count,))
            with _stream(self.base, column), self.base.sql(_FIND).to_arrow_reader(_ROWS) as batches:
                for batch in batches:  # in any order
                    rows, numbers, names = batch.columns
                    rows = rows.to_numpy()
                    if numbers.null_count:
                        missing = np.flatnonzero(numbers.is_null().to_numpy(zero_copy_only=False))
                        unknown.add(rows[missing], names.take(missing))
                    found[rows] = numbers.fill_null(-1).to_numpy()
                    done += len(rows)
            found.flush()
        if done != column.count:
            raise ValueError(f"{column.what}: {done} rows were read; expected {column.count}: was the file changed?")
        _check_known(column, unknown, self.what)
        return FileRows.of_numbers(path, np.dtype(np.int64), (column.count,))


def _check_kind(column: IdColumn, kind: str, what: str) -> None:
    if not column.is_text and column.kind != kind:
        raise TypeError(f"{column.what} holds {column.kind}, {what} {kind}; expected ids of one type: convert one")


def _check_known(column: IdColumn, unknown: Examples, what: str) -> None:
    if unknown.count:
        raise ValueError(
            f"{column.what}: {unknown.count} of {column.count} rows name a node that {what} has no row for "
            f"({unknown}); add these nodes, or leave the rows out"
        )


def find_names(names: Names, column: IdColumn, what: str, budget: Budget) -> np.ndarray:
    """The number of the node in each row of a short column, int64 [n]. All names are read, and none are kept."""
    _check_kind(column, "integers" if names.ends is None else "strings", what)
    with _database(budget) as base:
        with _stream(base, column):
            base.execute("CREATE TABLE names AS SELECT * FROM stream").fetchall()
        found, query = np.full(column.count, -1), "SELECT names.row, stream.row FROM stream JOIN names USING (id)"
        with _stream(base, column_of_names(names, what, False)), base.sql(query).to_arrow_reader(_ROWS) as batches:
            for batch in batches:
                found[batch.column(0).to_numpy()] = batch.column(1).to_numpy()
    unknown, missing = Examples(), np.flatnonzero(found < 0)
    for first, ids in column:
        here = missing[(missing >= first) & (missing < first + len(ids))]
        unknown.add(here, ids.take(here - first))
    _check_known(column, unknown, what)
    return found


@contextmanager
def open_dictionary(names: Names, what: str, as_text: bool, budget: Budget) -> Iterator[Dictionary]:
    """A dictionary of these names, which is deleted at the end of the block.

    Args:
        what: where they are from, for error messages.
        as_text: whether what will be looked up was read from text, so that the integer 7 is found as ``7``.
    """
    kind = "integers" if names.ends is None else "strings"
    with _database(budget) as base:
        with _stream(base, column_of_names(names, what, as_text)):
            base.execute("CREATE TABLE names AS SELECT * FROM stream").fetchall()
        base.execute(_TWICE).fetchall()
        count, rows = base.execute("SELECT count(*), sum(times) FROM twice").fetchall()[0]
        if count:
            found = base.execute("SELECT id, first, times FROM twice ORDER BY first LIMIT 5").fetchall()
            words = ", ".join(f"{name!r} {times} times, first in row {row}" for name, row, times in found)
            words += ", ..." if count > len(found) else ""
            raise ValueError(
                f"{what}: {count} ids are there more than once, in {rows} rows ({words}); expected one row per node"
            )
        yield Dictionary(base, what, kind, budget)


def distinct_names(columns: list[IdColumn], budget: Budget) -> Names:
    """The names that occur in some columns, each once, in ascending order: integers by value, strings by their bytes.

    Of text, what looks like a number comes first, by value.
    """
    first = columns[0]
    for column in columns:
        if column.type != first.type:
            raise TypeError(
                f"{first.what} holds {first.type}, {column.what} {column.type}; expected ids of one type: convert one"
            )
    every = replace(first, blocks=lambda: (block for column in columns for _, block in column))
    with _database(budget) as base, _stream(base, every):
        order = "TRY_CAST(id AS HUGEINT), id" if first.is_text else "id"
        query = base.sql(f"SELECT DISTINCT id FROM stream ORDER BY {order}")

        def ordered() -> Iterator[Any]:
            with query.to_arrow_reader(_ROWS) as batches:
                yield from (batch.column(0) for batch in batches)

        return write_names(replace(every, blocks=ordered), budget)


@contextmanager
def _database(budget: Budget) -> Iterator[Any]:
    """A connection to a new database in temporary files. Nothing is loaded from elsewhere."""
    duckdb = require("duckdb", "names", "looking up ids of your own")
    with tempfile.TemporaryDirectory(dir=budget.scratch) as folder:
        limit = f"{max(_LEAST_MIB, budget.memory_bytes >> 21)}MiB"  # as much again is around it
        config = {
            "memory_limit": limit,
            "threads": _THREADS,
            "temp_directory": folder,
            "preserve_insertion_order": False,
            "disabled_optimizers": "join_order,build_side_probe_side",  # it would take a stream for a small table
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        try:
            with duckdb.connect(f"{folder}/names.duckdb", config=config) as base:
                yield base
        except duckdb.Error as error:
            raise ValueError(
                f"DuckDB could not look up ids in {limit}, half of memory_bytes= (--memory), and temporary files "
                f"beside the store: {error}"
            ) from error


@contextmanager
def _stream(base: Any, column: IdColumn) -> Iterator[None]:
    """A block in which `base` can read the rows of a column once, as the table `stream` of `row` and `id`."""
    arrow = require("pyarrow", "names", "names of nodes")
    schema = arrow.schema([("row", arrow.int64()), ("id", column.type)])
    raised: list[Exception] = []

    def batches() -> Iterator[Any]:
        try:
            for first, ids in column:
                rows = arrow.array(np.arange(first, first + len(ids)))
                yield arrow.record_batch([rows, ids], schema=schema)
        except Exception as error:  # DuckDB would raise one of its own, with this one as text
            raised.append(error)
            raise

    base.register("stream", arrow.RecordBatchReader.from_batches(schema, batches()))
    try:
        yield
    except Exception:
        if raised:
            raise raised[0] from None
        raise
    finally:
        base.unregister("stream")
