"""Graphs in files that are too large for memory: opened by `partition`, which has a folder for temporary files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardpass.data.file_rows import FileRows, RowWriter
from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers.mapping import count_nodes
from shardpass.data.readers.parquet import parquet_edges, parquet_rows
from shardpass.data.readers.text import edge_columns, header_and_columns, is_text, table_blocks
from shardpass.data.streaming.budget import Budget

PathLike = str | os.PathLike[str]

_FIELD_FILES = (".npy", ".parquet", ".csv", ".csv.gz")
_EDGE_FILES = (*_FIELD_FILES, ".txt", ".txt.gz")
_NAMES = {"x": ("x", "features"), "y": ("y", "labels")}
_MASKS = ("train_mask", "val_mask", "test_mask")


class GraphFiles(ABC):
    """A graph in files, not read yet. `shardpass.partition` takes it."""

    @abstractmethod
    def open(self, budget: Budget) -> RawGraph:
        """The graph, not yet checked, of arrays that stay in files: the given ones, or temporary ones in
        `budget.scratch` where the given ones cannot be read row by row."""


@dataclass(frozen=True)
class EdgeListFiles(GraphFiles):
    """An edge list and arrays beside it; made by `stream_edge_list`.

    drop: names of fields to leave out.
    """

    edges: Path
    fields: Mapping[str, Path]
    weights: Path | None = None
    num_nodes: int | None = None
    drop: tuple[str, ...] = ()

    def open(self, budget: Budget) -> RawGraph:
        ends, column = open_edges(self.edges, budget)
        if self.weights is not None and column is not None:
            raise ValueError(f"edge weights are given twice: in {self.edges} and as weights={self.weights}")
        weights = column if self.weights is None else open_rows(self.weights, budget)
        node_fields = {name: open_rows(path, budget) for name, path in self.fields.items() if name not in self.drop}
        edge_fields = {} if weights is None or "edge_weight" in self.drop else {"edge_weight": weights}
        count = count_nodes(self.num_nodes, node_fields, NODE)
        source = f"{self.edges.name} (edge list)"
        return RawGraph({NODE: count}, {EDGE: ends}, {NODE: node_fields}, {EDGE: edge_fields}, {}, source)


def stream_edge_list(
    edges: PathLike,
    *,
    features: PathLike | None = None,
    labels: PathLike | None = None,
    masks: Mapping[str, PathLike] | None = None,
    weights: PathLike | None = None,
    num_nodes: int | None = None,
) -> EdgeListFiles:
    """An edge list in files, for `shardpass.partition`, which never holds it in memory as a whole.

    The files are read when it is partitioned, and must not change until then. `.npy` files are read in place; all
    others are first copied, as plain numbers, to temporary files beside the store.

    Args:
        edges: `.npy` of integers [2, num_edges] or [num_edges, 2], source first; `.csv` (commas; a header line is
            skipped, but names such as dst and src must be in order) or `.txt` (blanks; `#` begins a comment), perhaps
            compressed as `.gz`, with the weight of the edge as third column if there is one; `.parquet`, or a folder of
            such files, with the columns src and dst (or source and target, or any two) and perhaps weight. Or a folder
            that holds all: ``edges``, ``x`` or ``features``, ``y`` or ``labels``, ``train_mask``, ``val_mask``,
            ``test_mask`` and ``weights``, each with one of these suffixes.
        features: becomes `x`, [num_nodes, ...]: `.npy`, `.parquet` (a column of lists, or one column per channel; a
            column id must count from 0) or `.csv`.
        labels: becomes `y`, [num_nodes]; -1 for unlabelled nodes.
        masks: by name (`"train_mask"`), booleans [num_nodes].
        weights: becomes `edge_weight`, [num_edges].
        num_nodes: needed when there is neither features nor labels nor masks.

    Raises:
        ValueError: there is no such file, or of a kind that is not read.
    """
    given = {"x": features, "y": labels, **(masks or {})}
    fields = {name: Path(path) for name, path in given.items() if path is not None}
    path, beside = Path(edges), Path(weights) if weights is not None else None
    if path.is_dir() and (_in_folder(path, "edges") or not list(path.glob("*.parquet"))):
        folder, path = path, _found(path)
        fields = {**_fields_in(folder), **fields}
        beside = beside or _in_folder(folder, "weights")
    for file, suffixes in ((path, _EDGE_FILES), *((file, _FIELD_FILES) for file in (*fields.values(), beside) if file)):
        if not file.exists():
            raise ValueError(f"there is no file {file}")
        if not file.name.endswith(suffixes) and not file.is_dir():
            raise ValueError(f"{file}: expected one of {', '.join(suffixes)}; save arrays with numpy.save")
    return EdgeListFiles(path, fields, beside, num_nodes)


def open_edges(path: Path, budget: Budget) -> tuple[EdgeArrays, FileRows | None]:
    """Both ends of the edges in a file, and their weights if they are in it too.

    Raises:
        ValueError, TypeError: what is not as expected, with file and place.
    """
    if is_text(path):
        return _text_edges(path, budget)
    if path.suffix == ".parquet" or path.is_dir():
        src, dst, weights = parquet_edges(path, budget)
        return EdgeArrays(src, dst), weights
    return columns_of(FileRows.of_npy(path)), None


def open_rows(path: Path, budget: Budget) -> FileRows:
    """The array in a file, one row per node or edge.

    Raises:
        ValueError, TypeError: what is not as expected, with file and place.
    """
    if is_text(path):
        return text_rows(path, budget)
    if path.suffix == ".parquet" or path.is_dir():
        return parquet_rows(path, budget)
    return FileRows.of_npy(path)


def columns_of(edges: FileRows) -> EdgeArrays:
    """Both ends of edges of the shape [2, num_edges] or [num_edges, 2].

    Raises:
        ValueError: for another shape, or one that can be read both ways.
    """
    shape = list(edges.shape)
    if len(shape) != 2 or 2 not in shape:
        raise ValueError(f"{edges.name}: edges have the shape {shape}; expected [2, num_edges] or [num_edges, 2]")
    if shape == [2, 2]:
        raise ValueError(f"{edges.name}: edges of the shape [2, 2] can be read both ways; save them as .csv")
    if shape[0] == 2:
        return EdgeArrays(edges.select(0), edges.select(1))
    return EdgeArrays(edges.select(slice(None), 0), edges.select(slice(None), 1))


def text_rows(path: Path, budget: Budget) -> FileRows:
    """The numbers of a text file, [num_rows] or [num_rows, columns]: int64 if all are whole, else float32."""
    skip, columns = header_and_columns(path)
    row_shape = () if columns <= 1 else (columns,)
    for kind in (np.int64, np.float32):
        writer = RowWriter(budget.file(), kind, row_shape, path)
        try:
            for table in table_blocks(path, kind, skip, budget.report):
                writer.append(table.reshape(-1, *row_shape))
        except ValueError:
            if kind is np.float32:
                raise
            continue
        break
    return writer.rows()


def _text_edges(path: Path, budget: Budget) -> tuple[EdgeArrays, FileRows | None]:
    skip, columns = edge_columns(path)
    kind = np.dtype([("src", np.int64), ("dst", np.int64), ("weight", np.float32)][: columns or 2])
    writers = {name: RowWriter(budget.file(), kind[name], origin=path) for name in kind.names or ()}
    for table in table_blocks(path, kind, skip, budget.report):
        for name, writer in writers.items():
            writer.append(table[name])
    rows = {name: writer.rows() for name, writer in writers.items()}
    return EdgeArrays(rows["src"], rows["dst"]), rows.get("weight")


def _found(folder: Path) -> Path:
    path = _in_folder(folder, "edges")
    if path is None:
        raise ValueError(
            f"{folder} holds no edges: expected edges{', edges'.join(_EDGE_FILES)}, or raw/ as OGB writes it; "
            "of a DGL partition pass the .json in it"
        )
    return path


def _fields_in(folder: Path) -> dict[str, Path]:
    names = {**_NAMES, **{mask: (mask,) for mask in _MASKS}}
    found = {field: _in_folder(folder, *choices) for field, choices in names.items()}
    return {field: path for field, path in found.items() if path is not None}


def _in_folder(folder: Path, *names: str) -> Path | None:
    """The one file of these names with a known suffix."""
    found = [folder / f"{name}{suffix}" for name in names for suffix in _EDGE_FILES]
    found = [path for path in found if path.exists()]
    if len(found) > 1:
        raise ValueError(f"{folder} holds both {found[0].name} and {found[1].name}; expected one of them")
    return found[0] if found else None
