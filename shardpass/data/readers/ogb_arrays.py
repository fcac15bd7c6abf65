"""The arrays in a directory of OGB, by OGB's names: what `ogb.io.read_graph_raw` reads, piece by piece."""

from __future__ import annotations

import csv
import gzip
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from shardpass.data.file_rows import FileRows, RowWriter, blocks
from shardpass.data.raw import EDGE, NODE, EdgeArrays, EdgeType, NodeType
from shardpass.data.readers.graph_files import open_edges, text_rows
from shardpass.data.streaming.budget import Budget

_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
_COUNTS = ("num_nodes_list", "num_edges_list")
_BLOCK_ROWS = 1 << 16


@dataclass
class OgbArrays:
    """A dataset as its files hold it; fields by OGB's names. splits: the folder of ids of each type that has one."""

    num_nodes: dict[NodeType, int]
    edges: dict[EdgeType, EdgeArrays]
    node_fields: dict[NodeType, dict[str, FileRows]]
    edge_fields: dict[EdgeType, dict[str, FileRows]]
    splits: dict[NodeType, Path] = field(default_factory=dict)


def is_binary(folder: Path) -> bool:
    """Whether a dataset has the layout of ogbn-papers100M."""
    return (folder / "raw" / "data.npz").exists()


def is_typed(folder: Path) -> bool:
    """Whether a dataset has several types, as ogbn-mag has."""
    return (folder / "raw" / "triplet-type-list.csv.gz").exists()


def ogb_arrays(folder: Path, budget: Budget, without: Collection[str] = ()) -> OgbArrays:
    """What is in a directory, but for the fields `without`.

    Raises:
        ValueError: files that are missing, torn or do not fit each other.
    """
    if is_typed(folder):
        return _typed(folder, budget, without)
    read = _binary if is_binary(folder) else _text
    ends, arrays = read(folder / "raw", budget, without)
    for name, told in zip(_COUNTS, ("num-node-list.csv.gz", "num-edge-list.csv.gz")):
        if name not in arrays:
            raise ValueError(f"{folder / 'raw' / told} is missing; expected the whole directory as OGB writes it")
    _check_edges(ends, arrays["num_edges_list"])
    num_nodes = _single(arrays["num_nodes_list"])
    of_edges = {name: rows for name, rows in arrays.items() if name.startswith("edge_")}
    of_nodes = {name: rows for name, rows in arrays.items() if name.startswith("node_")}
    split = _split(folder)
    splits = {} if split is None else {NODE: split}
    return OgbArrays({NODE: num_nodes}, {EDGE: ends}, {NODE: of_nodes}, {EDGE: of_edges}, splits)


def _text(raw: Path, budget: Budget, without: Collection[str]) -> tuple[EdgeArrays, dict[str, FileRows]]:
    return _text_edges(raw / "edge.csv.gz", budget), _tables(raw, budget, without)


def _typed(folder: Path, budget: Budget, without: Collection[str]) -> OgbArrays:
    raw = folder / "raw"
    types, counts = _lines(raw / "num-node-dict.csv.gz")[:2]
    found = OgbArrays({kind: int(count) for kind, count in sorted(zip(types, counts))}, {}, {}, {})
    for kind in found.num_nodes:
        folders = (raw / "node-feat" / kind, raw / "node-label" / kind)
        found.node_fields[kind] = {k: v for path in folders for k, v in _tables(path, budget, without).items()}
        split = _split(folder)
        if split and (split / kind).is_dir():
            found.splits[kind] = split / kind
    for triplet in sorted(tuple(line) for line in _lines(raw / "triplet-type-list.csv.gz")):
        edge_type = (triplet[0], triplet[1], triplet[2])
        relation = raw / "relations" / "___".join(triplet)
        ends = _text_edges(relation / "edge.csv.gz", budget)
        tables = _tables(relation, budget, without)
        if _COUNTS[1] not in tables:
            raise ValueError(f"{relation / 'num-edge-list.csv.gz'} is missing; expected it as OGB writes it")
        _check_edges(ends, tables.pop(_COUNTS[1]))
        found.edges[edge_type] = ends
        found.edge_fields[edge_type] = tables
    return found


def _tables(folder: Path, budget: Budget, without: Collection[str]) -> dict[str, FileRows]:
    """The numbers in the text files of a folder, but for the edges, by the names of OGB's arrays."""
    names = {"num-node-list": _COUNTS[0], "num-edge-list": _COUNTS[1], "species": "node_species"}
    found = {}
    for path in sorted(folder.glob("*.csv.gz")):
        stem = path.name.removesuffix(".csv.gz")
        name = names.get(stem, stem.replace("-", "_"))
        if stem != "edge" and name not in without:
            found[name] = text_rows(path, budget)
    return found


def _text_edges(path: Path, budget: Budget) -> EdgeArrays:
    if not path.exists():
        raise ValueError(f"{path} is missing; expected the whole directory as OGB writes it")
    ends, column = open_edges(path, budget)
    if column is not None:
        raise ValueError(f"{path} has 3 columns; expected source and destination")
    return ends


def _lines(path: Path) -> list[list[str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return [line for line in csv.reader(file) if line]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _split(folder: Path) -> Path | None:
    splits = sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if len(splits) > 1:
        raise ValueError(f"{folder / 'split'} holds {len(splits)} splits; expected one: move the others elsewhere")
    return splits[0] if splits else None


def _check_edges(ends: EdgeArrays, counts: FileRows) -> None:
    if len(ends.src) != _single(counts):
        raise ValueError(
            f"{ends.src.name}: {len(ends.src)} edges, but {counts.name.name} says {_single(counts)}; a file is torn"
        )


def _single(counts: FileRows) -> int:
    values = counts.load().reshape(-1).tolist()
    if len(values) != 1:
        raise ValueError(f"{counts.name} tells of {len(values)} graphs; expected a node dataset, which is one graph")
    return int(values[0])


def _binary(raw: Path, budget: Budget, without: Collection[str]) -> tuple[EdgeArrays, dict[str, FileRows]]:
    arrays: dict[str, FileRows] = {}
    for path in (raw / "data.npz", raw / "node-label.npz"):
        if path.exists():
            arrays.update(_npz_rows(path, budget, without))
    if "edge_index" not in arrays:
        raise ValueError(f"{raw / 'data.npz'} has no array 'edge_index'; it has {', '.join(arrays)}")
    index = arrays.pop("edge_index")
    if len(index.shape) != 2 or index.shape[0] != 2:
        raise ValueError(f"{index.name}: edge_index has the shape {list(index.shape)}; expected [2, num_edges]")
    return EdgeArrays(index.select(0), index.select(1)), arrays


def _npz_rows(path: Path, budget: Budget, without: Collection[str]) -> dict[str, FileRows]:
    """The arrays of an .npz: in place where they are not compressed, else copied to temporary files."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                info.filename.removesuffix(".npy"): _member(archive, info, path, budget) for info in archive.infolist()
            }
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an .npz of plain arrays: {error}") from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, budget: Budget) -> FileRows:
    with archive.open(info) as file:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds objects")
        if info.compress_type == zipfile.ZIP_STORED:
            return FileRows(path, dtype, shape, _start_in(path, info) + file.tell(), fortran)
        copy = budget.file()
        with open(copy, "wb") as out:
            done = 0
            while piece := file.read(1 << 24):
                budget.report("read", done, info.file_size)
                done += out.write(piece)
        return FileRows(copy, dtype, shape, 0, fortran, origin=path)


def _start_in(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of an uncompressed member begin: behind its local header (APPNOTE 4.3.7)."""
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return info.header_offset + 30 + name + extra


# ---- as a graph of ours has them


def with_inverse(ends: EdgeArrays, budget: Budget) -> Iterator[FileRows]:
    """Each edge followed by its reverse."""
    for own, other in ((ends.src, ends.dst), (ends.dst, ends.src)):
        writer = RowWriter(budget.file(), own.array_dtype, origin=own.name)
        for (_, first), (_, second) in zip(blocks(own, budget.block_edges), blocks(other, budget.block_edges)):
            writer.append(np.stack([first.numpy(), second.numpy()], axis=1).reshape(-1))
        yield writer.rows()


def repeated(rows: FileRows, budget: Budget) -> FileRows:
    """Each row twice."""
    writer = RowWriter(budget.file(), rows.array_dtype, tuple(rows.shape[1:]), rows.name)
    for _, block in blocks(rows, _BLOCK_ROWS):
        writer.append(np.repeat(block.numpy(), 2, axis=0))
    return writer.rows()


def labels(rows: FileRows, budget: Budget) -> FileRows:
    """Classes as int64 [num_nodes], -1 where there is NaN; of several tasks float32 [num_nodes, tasks]."""
    several = len(rows.shape) > 1 and rows.shape[1] > 1
    kind, row_shape = (np.float32, tuple(rows.shape[1:])) if several else (np.int64, ())
    writer = RowWriter(budget.file(), kind, row_shape, rows.name)
    for start, block in blocks(rows, _BLOCK_ROWS):
        values = block.numpy() if several else block.numpy().reshape(len(block))
        if not several and values.dtype.kind == "f":
            values = np.where(np.isnan(values), -1, values)
            wrong = np.flatnonzero(values != np.floor(values))
            if wrong.size:
                raise ValueError(f"{rows.name}, row {start + wrong[0]}: label {values[wrong[0]]}; expected a class")
        writer.append(values)
    return writer.rows()


def masks(split: Path, num_nodes: int, budget: Budget) -> dict[str, FileRows]:
    """The three masks of a folder of ids."""
    found = {}
    for name, mask in _MASKS.items():
        path = split / f"{name}.csv.gz"
        if not path.exists():
            raise ValueError(f"{path} is missing; expected train, valid and test there")
        found[mask] = _mask(text_rows(path, budget), num_nodes, budget)
    return found


def _mask(ids: FileRows, num_nodes: int, budget: Budget) -> FileRows:
    """True at the ids."""
    path = budget.file()
    with open(path, "wb") as file:
        file.truncate(num_nodes)
    rows = FileRows(path, np.dtype(bool), (num_nodes,), origin=ids.name)
    if not len(ids):
        return rows
    mask = np.memmap(path, bool, "r+", shape=(num_nodes,))
    for start, block in blocks(ids, budget.block_edges):
        wrong = np.flatnonzero(((block < 0) | (block >= num_nodes)).numpy())
        if block.is_floating_point() or wrong.size:
            row = int(wrong[0]) if wrong.size else 0
            raise ValueError(
                f"{ids.name}, row {start + row}: node {block[row].tolist()}; expected an integer in [0, {num_nodes})"
            )
        mask[block.numpy()] = True
    return rows
