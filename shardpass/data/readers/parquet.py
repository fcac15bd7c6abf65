"""Numbers in Parquet files, read with pyarrow a block of rows at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.core.ranks import refuse_irregular
from shardpass.data.column_names import in_order, pandas_index, place_of, refuse_doubtful, refuse_index
from shardpass.data.file_rows import FileRows, RowWriter
from shardpass.data.raw import EdgeArrays
from shardpass.data.reading import reading
from shardpass.data.streaming import Budget
from shardpass.errors import require

_BATCH_ROWS = 1 << 16
ID_NAMES = ("id", "node_id", "nid")
"""The names by which a column of ids is known."""


def parquet_edges(path: Path, budget: Budget) -> tuple[EdgeArrays, FileRows | None]:
    """Both ends of the edges in a file or a folder of files, and their weights if there is a column of them.

    Collective. Each rank copies its share of the rows.
    """
    table = open_dataset(path)
    names = table.schema.names
    weights = [name for name in names if place_of(name) == 2]
    ends = [name for name in names if name not in weights]
    if [place_of(name) for name in ends] == [1, 0]:
        ends.reverse()
    if len(ends) != 2 or not in_order(ends) or len(weights) > 1:
        raise ValueError(
            f"{path} has the columns {names}; expected two of node ids (src and dst) and perhaps one named weight"
        )
    refuse_index(path, ends)
    writers = [RowWriter(budget.file(), kind, name=path) for kind in (np.int64, np.int64, np.float32)]

    def copy() -> None:
        for first, arrays in _blocks(table, path, ends + weights, budget):
            for name, values in zip(ends, arrays):
                if values.dtype.kind not in "iu":
                    raise TypeError(f"{path}, column {name!r}, row {first}: {values.dtype}; expected integers")
            for writer, values in zip(writers, arrays):
                writer.append(values)

    budget.team.together(str(path), copy)
    src, dst, weight = (budget.team.join(writer) for writer in writers)
    return EdgeArrays(src, dst), weight if weights else None


def parquet_rows(path: Path, budget: Budget) -> FileRows:
    """The rows of a file or a folder of files, in their order. Collective.

    Each rank copies its share. One column gives [num_rows], or [num_rows, length] if it holds lists. Several columns
    give [num_rows, columns] in their common type. A column of ids must count from 0, and is left out.
    """
    table = open_dataset(path)
    ids = [name for name in table.schema.names if name in ID_NAMES]
    kept = [name for name in table.schema.names if name not in ids]
    if not kept or len(ids) > 1:
        raise ValueError(
            f"{path} has the columns {table.schema.names}; expected one or more of values and at most one of ids"
        )

    def copied() -> RowWriter:
        writer: RowWriter | None = None
        for first, arrays in _blocks(table, path, kept + ids, budget):
            if ids:
                _check_ids(arrays.pop(), first, f"{path}, column {ids[0]!r}")
            rows = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)
            writer = writer or RowWriter(budget.file(), rows.dtype, rows.shape[1:], path)
            if rows.shape[1:] != writer.row_shape:
                raise ValueError(
                    f"{path}, row {first}: lists of {rows.shape[1:]}; expected {writer.row_shape} as before"
                )
            writer.append(rows)
        return writer or RowWriter(budget.file(), np.float32, name=path)

    return budget.team.join(budget.team.together(str(path), copied))


def parquet_features(path: Path, keep: Collection[str]) -> list[str]:
    """The names of the columns that `parquet_rows` reads as features; none of a column of lists.

    Those that look like an index or a label, and that `keep` does not name, are refused.
    """
    schema = open_dataset(path).schema
    names = [name for name in schema.names if name not in ID_NAMES]
    refuse_doubtful(path, names, pandas_index(schema), keep)
    return names if len(names) > 1 else []


def open_dataset(path: Path) -> Any:
    """The file, or the files of a folder in the order of their names, as one `pyarrow.dataset.Dataset`."""
    dataset = require("pyarrow.dataset", "parquet", "reading Parquet files")
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} is a folder without .parquet files")
    with reading(path, "a Parquet file"):
        for file in files:
            refuse_irregular(file)
        return dataset.dataset([str(file) for file in files], format="parquet")


def record_batches(
    table: Any, num_rows: int, path: Path, kind: str, names: list[str], budget: Budget
) -> Iterator[tuple[int, Any]]:
    """Some columns of a dataset, which is `kind`, in blocks of rows, each with the number of its first row."""
    done, total = 0, max(1, num_rows)
    # by default pyarrow reads far ahead, with many threads
    ahead: dict[str, Any] = {"use_threads": False, "batch_readahead": 1, "fragment_readahead": 1}
    with reading(path, kind):
        batches = table.to_batches(columns=names, batch_size=_BATCH_ROWS, **ahead)
    while True:
        with reading(path, kind):
            batch = next(batches, None)
        if batch is None:
            break
        budget.report("read", done, total)
        yield done, batch
        done += batch.num_rows
    budget.report("read", total, total)


def _blocks(table: Any, path: Path, names: list[str], budget: Budget) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Some columns of this rank's rows, block by block: the number of the first row, and an array for each column."""
    with reading(path, "a Parquet file"):
        num_rows, first = table.count_rows(), 0
        wanted = budget.team.share(num_rows)
        if budget.team.size > 1:
            table, first, num_rows = _row_groups(table, wanted)
    for done, batch in record_batches(table, num_rows, path, "a Parquet file", names, budget):
        start = max(wanted.start - first - done, 0)
        rows, at = batch.slice(start, max(0, wanted.stop - first - done - start)), first + done + start
        if rows.num_rows or not batch.num_rows:
            columns = zip(rows.schema.names, rows.columns)
            with reading(path, "a Parquet file"):
                arrays = [numbers_of(column, f"{path}, column {name!r}", at) for name, column in columns]
            yield at, arrays


def _row_groups(table: Any, wanted: range) -> tuple[Any, int, int]:
    """A dataset of the row groups that hold some of the wanted rows, the number of its first row, and of its rows."""
    groups, starts, start = [], [], 0
    for fragment in table.get_fragments():
        for group in fragment.split_by_row_group():
            count = sum(found.num_rows for found in group.row_groups)  # `group.count_rows()` is of the whole file
            if start < wanted.stop and start + count > wanted.start:
                groups.append(group)
                starts += [start, start + count]
            start += count
    dataset = require("pyarrow.dataset", "parquet", "reading Parquet files")
    first, stop = (starts[0], starts[-1]) if starts else (0, 0)
    return dataset.FileSystemDataset(groups, table.schema, table.format, table.filesystem), first, stop - first


def _check_ids(ids: np.ndarray, first: int, what: str) -> None:
    wrong = np.flatnonzero(ids != np.arange(first, first + len(ids)))
    if wrong.size:
        row = first + int(wrong[0])
        raise ValueError(f"{what}, row {row}: found {ids[wrong[0]]}; expected {row}: sort the rows by id")


def numbers_of(column: Any, what: str, first: int) -> np.ndarray:
    """The values of a column: [n], or [n, length] of lists."""
    if column.null_count:
        row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{what}, row {row}: there is no value; expected a number in every row")
    if hasattr(column, "flatten"):  # a column of lists
        values = column.flatten()
        compute = require("pyarrow.compute", "parquet", "reading Parquet files")
        lengths = np.unique(compute.list_value_length(column).to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise ValueError(f"{what}, rows from {first} on: lists of {lengths.tolist()} numbers; expected one length")
        if values.null_count:
            raise ValueError(f"{what}, rows from {first} on: a list without one of its values; expected numbers")
        return numbers_of(values, what, first).reshape(len(column), -1)
    found: np.ndarray = column.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "biuf":
        raise ValueError(
            f"{what}: {column.type}; expected numbers (shardpass.data.stream_tables, or --names, takes ids of any kind)"
        )
    return found
