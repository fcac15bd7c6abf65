"""Edge lists with arrays beside them, in memory or in files, for which `partition` has a folder of temporary files."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shardpass.core.ranks import refuse_irregular, tells_of_full_disk
from shardpass.data.column_names import refuse_doubtful
from shardpass.data.file_rows import FileRows, in_memory
from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers.inverse import inverse_added
from shardpass.data.readers.mapping import count_nodes
from shardpass.data.readers.parquet import parquet_edges, parquet_features, parquet_rows
from shardpass.data.readers.text import is_text, text_edges, text_features, text_rows
from shardpass.data.reading import reading
from shardpass.data.rows import as_tensor
from shardpass.data.streaming import Budget

PathLike = str | os.PathLike[str]

_FIELD_FILES = (".npy", ".parquet", ".csv", ".csv.gz")
_EDGE_FILES = (*_FIELD_FILES, ".txt", ".txt.gz")
_IN_FOLDERS = {
    "x": ("x", "features"),
    "y": ("y", "labels"),
    "train_mask": ("train_mask",),
    "val_mask": ("val_mask",),
    "test_mask": ("test_mask",),
}
"""The fields that a folder may hold, and the names of their files."""


class GraphFiles(ABC):
    """A graph in files that has not been read yet. `shardpass.partition` takes it."""

    @abstractmethod
    def open(self, budget: Budget) -> RawGraph:
        """The graph, not checked yet. Its arrays stay in files.

        Where the given files cannot be read row by row, the arrays are in temporary files in `budget.scratch`.
        """

    def open_together(self, budget: Budget) -> RawGraph:
        """The same graph on each of the ranks `budget.team`. Collective. By default, rank 0 opens it."""
        return budget.team.first("the graph", lambda: self.open(budget.alone))


@dataclass(frozen=True)
class EdgeListFiles(GraphFiles):
    """An edge list and arrays beside it. Made by `stream_edge_list`.

    drop: the names of fields to leave out.
    keep: columns of `x` whose names are those of an index or a label.
    add_inverse_edge: whether the reverse of each edge is added.
    """

    edges: Path
    fields: Mapping[str, Path]
    weights: Path | None = None
    num_nodes: int | None = None
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    add_inverse_edge: bool = False

    def open(self, budget: Budget) -> RawGraph:
        x = None if "x" in self.drop else self.fields.get("x")
        columns = [] if x is None else budget.team.first(str(x), partial(_features, x, self.keep))
        ends, weights = open_edges(self.edges, budget)
        if self.weights is not None:
            if weights is not None:
                raise ValueError(f"edge weights are given twice: in {self.edges} and as weights={self.weights}")
            weights = open_rows(self.weights, budget)
        node_fields = {name: open_rows(path, budget) for name, path in self.fields.items() if name not in self.drop}
        weights = None if "edge_weight" in self.drop else weights
        graph = _graph(ends, weights, node_fields, self.num_nodes, f"{self.edges.name} (edge list)")
        graph = replace(graph, columns={NODE: {"x": columns}} if columns else {})
        return inverse_added(graph, budget) if self.add_inverse_edge else graph

    open_together = open


def stream_edge_list(
    edges: PathLike,
    *,
    features: PathLike | None = None,
    labels: PathLike | None = None,
    masks: Mapping[str, PathLike] | None = None,
    weights: PathLike | None = None,
    num_nodes: int | None = None,
    keep: Collection[str] = (),
    add_inverse_edge: bool = False,
) -> EdgeListFiles:
    """An edge list in files, for `shardpass.partition`, which never holds it in memory as a whole.

    The files are read when the graph is partitioned, and must not change until then. `.npy` files are read in place.
    All others are first copied, as plain numbers, to temporary files beside the store.

    Args:
        edges: `.npy` with integers [2, num_edges] or [num_edges, 2], source first. Or `.csv` (commas, perhaps a header
            line) or `.txt` (blanks; `#` begins a comment), perhaps compressed as `.gz`, with the weight of the edge as
            a third column if there is one. Or `.parquet`, or a folder of such files, with the columns src and dst (or
            source and target, or any two) and perhaps weight. Or a folder that holds everything: ``edges``, ``x`` or
            ``features``, ``y`` or ``labels``, ``train_mask``, ``val_mask``, ``test_mask`` and ``weights``, each with
            one of these suffixes.
        features: becomes `x`, [num_nodes, ...]: `.npy`, `.csv` or `.parquet` (a column of lists, or a column for each
            channel; a column of ids must count from 0).
        labels: becomes `y`, [num_nodes]; -1 for unlabelled nodes.
        masks: booleans [num_nodes] by name, such as `"train_mask"`.
        weights: becomes `edge_weight`, [num_edges].
        num_nodes: needed when there are neither features nor labels nor masks.
        keep: columns of the features that are meant, though their names are those of an index or a label.
        add_inverse_edge: add the reverse of each edge right behind it, with its weight. Nothing is merged: of a list
            that has both directions, each edge would be there twice.

    Raises:
        ValueError: when a file does not exist or is of a kind that cannot be read.
    """
    given = {"x": features, "y": labels, **(masks or {})}
    fields = {name: Path(path) for name, path in given.items() if path is not None}
    path, beside = Path(edges), Path(weights) if weights is not None else None
    if path.is_dir() and (_in_folder(path, "edges") or not list(path.glob("*.parquet"))):
        found = {field: _in_folder(path, *names) for field, names in _IN_FOLDERS.items()}
        fields = {**{field: file for field, file in found.items() if file is not None}, **fields}
        beside = beside or _in_folder(path, "weights")
        path = _edges_in(path)
    if keep and "x" not in fields:
        raise ValueError(f"keep={[*keep]} (--keep) names columns of features, and none are given: pass features=")
    _check_kind(path, _EDGE_FILES)
    for file in (*fields.values(), *([beside] if beside else [])):
        _check_kind(file, _FIELD_FILES)
    return EdgeListFiles(path, fields, beside, num_nodes, keep=tuple(keep), add_inverse_edge=add_inverse_edge)


def read_edge_list(
    edges: Any,
    *,
    features: Any = None,
    labels: Any = None,
    masks: Mapping[str, Any] | None = None,
    weights: Any = None,
    num_nodes: int | None = None,
) -> RawGraph:
    """The graph of an edge list, checked.

    Args:
        edges: integers [2, num_edges] or [num_edges, 2], source first: an array, or a path of one of the files that
            `stream_edge_list` reads. A third column of a text file is the edge weight.
        features: becomes `x`, [num_nodes, ...]: an array, or the path of an `.npy` file, which stays memory-mapped.
        labels: becomes `y`, [num_nodes]; -1 for unlabelled nodes. An array or the path of an `.npy` file.
        masks: booleans [num_nodes] by name, such as `"train_mask"`. Arrays or paths of `.npy` files.
        weights: becomes `edge_weight`, [num_edges]. An array or the path of an `.npy` file.
        num_nodes: needed when there are neither features nor labels nor masks.

    Raises:
        ValueError, TypeError: when a file or array is not as described.
    """
    ends, column = _load_edges(edges)
    if weights is not None and column is not None:
        raise ValueError("edge weights are given twice: as the third column of the edges and as weights=")
    given = {"x": features, "y": labels, **(masks or {})}
    node_fields = {name: _load(values, name) for name, values in given.items() if values is not None}
    edge_weight = column if weights is None else _load(weights, "weights")
    source = f"{Path(edges).name} (edge list)" if isinstance(edges, str | os.PathLike) else "an edge list"
    return _graph(ends, edge_weight, node_fields, num_nodes, source).validate()


def _graph(ends: EdgeArrays, weights: Any, node_fields: Mapping[str, Any], num_nodes: Any, source: str) -> RawGraph:
    edge_fields = {} if weights is None else {"edge_weight": weights}
    count = count_nodes(num_nodes, node_fields, NODE)
    return RawGraph({NODE: count}, {EDGE: ends}, {NODE: node_fields}, {EDGE: edge_fields}, {}, source)


def _features(path: Path, keep: Collection[str]) -> list[str]:
    """The names of the columns of features in a file, if it has names."""
    if path.suffix == ".parquet" or path.is_dir():
        return parquet_features(path, keep)
    if is_text(path):
        return text_features(path, keep)
    refuse_doubtful(path, (), (), keep)  # an array has no names to keep
    return []


def open_edges(path: Path, budget: Budget) -> tuple[EdgeArrays, FileRows | None]:
    """Both ends of the edges in a file, and their weights if they are in it too. Collective."""
    if is_text(path):
        return text_edges(path, budget)
    if path.suffix == ".parquet" or path.is_dir():
        return parquet_edges(path, budget)
    return columns_of(open_rows(path, budget), f"{path}: "), None


def open_rows(path: Path, budget: Budget) -> FileRows:
    """The array in a file or in an `.npz` archive (``graph.npz/x.npy``), one row per node or edge. Collective."""
    if path.suffix == ".parquet" or path.is_dir():
        return parquet_rows(path, budget)
    return budget.team.first(str(path), lambda: _open_rows(path, budget.alone))


def _open_rows(path: Path, budget: Budget) -> FileRows:
    if is_text(path):
        return text_rows(path, budget)
    return _unpacked(path, budget) if path.parent.suffix == ".npz" else FileRows.of_npy(path)


def _unpacked(path: Path, budget: Budget) -> FileRows:
    """An array of an `.npz` archive, such as ``graph.npz/x.npy``, copied to a temporary file."""
    copy = budget.file()
    with reading(path.parent, "an .npz of plain arrays"):
        refuse_irregular(path.parent)
        with zipfile.ZipFile(path.parent) as archive, archive.open(path.name) as packed:
            num_bytes = archive.getinfo(path.name).file_size
            with tells_of_full_disk(copy, num_bytes), open(copy, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 24)
    return FileRows.of_npy(copy, path)


def columns_of(edges: FileRows | Tensor, where: str = "") -> EdgeArrays:
    """Both ends of edges of the shape [2, num_edges] or [num_edges, 2]."""
    shape = list(edges.shape)
    if len(shape) != 2 or 2 not in shape:
        raise ValueError(f"{where}edges have the shape {shape}; expected [2, num_edges] or [num_edges, 2]")
    if shape == [2, 2]:
        raise ValueError(
            f"{where}edges of the shape [2, 2] can be read both ways; save them as .csv, or pass "
            "{'edge_index': edges, 'num_nodes': n} to shardpass.data.read"
        )
    return EdgeArrays(edges[0], edges[1]) if shape[0] == 2 else EdgeArrays(edges[:, 0], edges[:, 1])


def _check_kind(file: Path, suffixes: tuple[str, ...]) -> None:
    if not file.exists():
        raise ValueError(f"there is no file {file}")
    if not file.name.endswith(suffixes) and not file.is_dir():
        raise ValueError(f"{file}: expected one of {', '.join(suffixes)}; save arrays with numpy.save")


def _edges_in(folder: Path) -> Path:
    path = _in_folder(folder, "edges")
    if path is None:
        raise ValueError(
            f"{folder} holds no edges: expected edges{', edges'.join(_EDGE_FILES)}, or raw/ as OGB writes it; "
            "of a DGL partition pass the .json in it"
        )
    return path


def _in_folder(folder: Path, *names: str) -> Path | None:
    """The one file of these names with a known suffix, or `None`."""
    found = [folder / f"{name}{suffix}" for name in names for suffix in _EDGE_FILES]
    found = [path for path in found if path.exists()]
    if len(found) > 1:
        raise ValueError(f"{folder} holds both {found[0].name} and {found[1].name}; expected one of them")
    return found[0] if found else None


def _load_edges(edges: Any) -> tuple[EdgeArrays, Any]:
    """Both ends of the edges, and the weights if they are in the same file."""
    if not isinstance(edges, str | os.PathLike) or Path(edges).suffix == ".npy":
        return columns_of(as_tensor(_load(edges, "edges"), "edges")), None
    with tempfile.TemporaryDirectory() as scratch:
        ends, weights = open_edges(Path(edges), Budget(Path(scratch)))
        return EdgeArrays(in_memory(ends.src), in_memory(ends.dst)), None if weights is None else in_memory(weights)


def _load(values: Any, what: str) -> Any:
    if not isinstance(values, str | os.PathLike):
        return as_tensor(values, what)
    path = Path(values)
    if path.suffix != ".npy":
        raise ValueError(f"{what}: {path} is not an .npy file; save the array with numpy.save")
    # copy-on-write: the file is never changed, and rows are read when they are written to their part
    with reading(path, "an .npy file of numbers"):
        refuse_irregular(path)
        return np.load(path, mmap_mode="c", allow_pickle=False)
