"""`Table`: a Parquet or CSV file whose columns are read by name."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardpass.core.ranks import refuse_irregular
from shardpass.data.column_names import pandas_index, refuse_separator
from shardpass.data.names import IdColumn, name_type
from shardpass.data.readers.parquet import open_dataset, record_batches
from shardpass.data.reading import reading
from shardpass.data.streaming import Budget
from shardpass.errors import require

TABLE_FILES = (".parquet", ".csv", ".csv.gz")


@dataclass(frozen=True)
class Table:
    """A Parquet file, a folder of them, or a CSV file whose first line names the columns. Made by `open_table`.

    types: the type of pyarrow of each column; of a CSV file what the first block of the column looks like.
    index: the columns in which pandas has written an index.
    """

    path: Path
    is_text: bool
    types: dict[str, Any]
    num_rows: int
    index: tuple[str, ...]

    def batches(self, types: Mapping[str, Any], budget: Budget) -> Iterator[tuple[int, Any]]:
        """Some columns in blocks of rows, each with the number of its first row. A CSV file is read as these types."""
        dataset = _text(self.path, types) if self.is_text else open_dataset(self.path)
        return record_batches(dataset, self.num_rows, self.path, _kind(self.is_text), list(types), budget)

    def ids(self, name: str, budget: Budget) -> IdColumn:
        """A column of names. Those of a CSV file are strings here, whatever they look like."""
        arrow = require("pyarrow", "names", "tables of edges and nodes")
        what = f"{self.path}, column {name!r}"
        kind = arrow.large_string() if self.is_text else name_type(self.types[name], what)

        def blocks() -> Iterator[Any]:
            for _, batch in self.batches({name: arrow.string()}, budget):
                yield batch.column(0)

        return IdColumn(what, self.num_rows, kind, self.is_text, blocks)


def open_table(path: Path) -> Table:
    """The table in a file or a folder."""
    is_text = path.name.endswith((".csv", ".csv.gz"))
    if is_text:
        with reading(path, _kind(True)):
            refuse_irregular(path)
            with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
                line = file.readline()
        refuse_separator(path, line)
    dataset = _text(path, {}) if is_text else open_dataset(path)
    names = dataset.schema.names
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has the columns {names}; expected another name for each")
    with reading(path, _kind(is_text)):
        return Table(
            path,
            is_text,
            dict(zip(names, dataset.schema.types)),
            dataset.count_rows(),
            tuple(pandas_index(dataset.schema)),
        )


def _kind(is_text: bool) -> str:
    return "a CSV file with a header" if is_text else "a Parquet file"


def _text(path: Path, types: Mapping[str, Any]) -> Any:
    """A CSV file as a `pyarrow.dataset.Dataset`. Nothing between two commas is no value; "NA" is a string."""
    datasets = require("pyarrow.dataset", "names", "reading tables")
    csv = require("pyarrow.csv", "names", "reading tables")
    options = csv.ConvertOptions(
        column_types=dict(types), null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    kind = datasets.CsvFileFormat(csv.ParseOptions(newlines_in_values=True), convert_options=options)
    with reading(path, _kind(True)):
        refuse_irregular(path)
        return datasets.dataset(str(path), format=kind)
