"""Numbers in Parquet files, read row group by row group with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.data.file_rows import FileRows, RowWriter
from shardpass.data.readers.column_names import in_order, place_of
from shardpass.data.streaming.budget import Budget
from shardpass.errors import require

_BATCH_ROWS = 1 << 16
_IDS = ("id", "node_id", "nid")
_WEIGHTS = ("weight", "edge_weight")


def parquet_files(path: Path) -> list[Path]:
    """The file itself, or the Parquet files of a folder, in the order of their names."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.parquet"))
    if not found:
        raise ValueError(f"{path} is a folder without .parquet files")
    return found


def parquet_columns(path: Path, names: list[str] | None, budget: Budget) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Columns of a file or a folder of files, block by block: the number of the first row, and an array per column.

    Args:
        names: of the columns; None for all.

    Raises:
        ValueError: a null, lists of several lengths, or a type that is no number; file and row are named.
        MissingDependencyError: when pyarrow is not installed.
    """
    pq = require("pyarrow.parquet", "parquet", "reading Parquet files")
    paths = parquet_files(path)
    readers = [_opened(pq, part) for part in paths]
    total, done = sum(reader.metadata.num_rows for reader in readers), 0
    for part, reader in zip(paths, readers):
        of_file = 0
        for batch in reader.iter_batches(batch_size=_BATCH_ROWS, columns=names):
            budget.report("read", done, max(1, total))
            yield done, [_numbers(column, f"{part}, column {name!r}", of_file) for name, column in _named(batch)]
            done += batch.num_rows
            of_file += batch.num_rows
    budget.report("read", total, max(1, total))


def _opened(pq: Any, path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a Parquet file: {error}") from error


def column_names(path: Path) -> list[str]:
    """The columns of a file, or of the first one of a folder, which all must have."""
    pq = require("pyarrow.parquet", "parquet", "reading Parquet files")
    paths = parquet_files(path)
    names = [list(_opened(pq, part).schema_arrow.names) for part in paths]
    for part, found in zip(paths, names):
        if found != names[0]:
            raise ValueError(f"{part} has the columns {found}; {paths[0].name} beside it has {names[0]}")
    return names[0]


def parquet_edges(path: Path, budget: Budget) -> tuple[FileRows, FileRows, FileRows | None]:
    """Sources, destinations and weights (if there are any), copied to temporary files.

    Raises:
        ValueError: columns that cannot be told apart, ids that are no integers; and as `parquet_columns`.
    """
    names = column_names(path)
    weights = [name for name in names if name in _WEIGHTS]
    ends = [name for name in names if name not in weights]
    if [place_of(name) for name in ends] == [1, 0]:
        ends.reverse()
    if len(ends) != 2 or not in_order(ends) or len(weights) > 1:
        raise ValueError(
            f"{path} has the columns {names}; expected two of node ids (src and dst) and perhaps one named weight"
        )
    writers = [RowWriter(budget.file(), np.int64, origin=path) for _ in ends]
    weight_writer = RowWriter(budget.file(), np.float32, origin=path) if weights else None
    for first, arrays in parquet_columns(path, ends + weights, budget):
        for name, writer, values in zip(ends, writers, arrays):
            if values.dtype.kind not in "iu":
                raise TypeError(f"{path}, column {name!r}, row {first}: {values.dtype}; expected integers")
            writer.append(values)
        if weight_writer:
            weight_writer.append(arrays[2])
    return writers[0].rows(), writers[1].rows(), weight_writer.rows() if weight_writer else None


def parquet_rows(path: Path, budget: Budget) -> FileRows:
    """The rows of a file, in their order, copied to a temporary file.

    One column gives [num_rows] (or, of lists, [num_rows, length]), several give [num_rows, columns] in their common
    type. A column id must count from 0 and is left out.

    Raises:
        ValueError: as `parquet_columns`, and ids that are not 0, 1, 2, ...
    """
    names = column_names(path)
    ids = [name for name in names if name in _IDS]
    kept = [name for name in names if name not in ids]
    if not kept or len(ids) > 1:
        raise ValueError(f"{path} has the columns {names}; expected one or more of values and at most one of ids")
    writer: RowWriter | None = None
    for first, arrays in parquet_columns(path, kept + ids, budget):
        if ids:
            _check_ids(arrays.pop(), first, f"{path}, column {ids[0]!r}")
        rows = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)
        writer = writer or RowWriter(budget.file(), rows.dtype, rows.shape[1:], path)
        if rows.shape[1:] != writer.row_shape:
            raise ValueError(f"{path}, row {first}: lists of {rows.shape[1:]}; expected {writer.row_shape} as before")
        writer.append(rows)
    return (writer or RowWriter(budget.file(), np.float32, origin=path)).rows()


def _check_ids(ids: np.ndarray, first: int, what: str) -> None:
    wrong = np.flatnonzero(ids != np.arange(first, first + len(ids)))
    if wrong.size:
        row = first + int(wrong[0])
        raise ValueError(f"{what}, row {row}: found {ids[wrong[0]]}; expected {row}: sort the rows by id")


def _named(batch: Any) -> Iterator[tuple[str, Any]]:
    return zip(batch.schema.names, batch.columns)


def _numbers(column: Any, what: str, first: int) -> np.ndarray:
    """The values of a column: [n], or [n, length] of lists."""
    if column.null_count:
        row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{what}, row {row}: there is no value; expected a number in every row")
    if hasattr(column.type, "value_type") and hasattr(column, "flatten"):
        compute = require("pyarrow.compute", "parquet", "reading Parquet files")
        lengths = np.unique(compute.list_value_length(column).to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise ValueError(f"{what}, rows from {first} on: lists of {lengths.tolist()} numbers; expected one length")
        inner = column.flatten()
        if inner.null_count:
            raise ValueError(f"{what}, rows from {first} on: a list without one of its values; expected numbers")
        return _numbers(inner, what, first).reshape(len(column), -1)
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{what}: {column.type}; expected numbers")
    return values
