"""Node datasets of the Open Graph Benchmark, from OGB's own directories, read piece by piece.

The layout (Hu et al. 2020; `ogb.io.read_graph_raw`): ``raw/edge.csv.gz``, ``num-node-list.csv.gz``, and, where there
are any, ``node-feat.csv.gz``, ``node-label.csv.gz``, ``edge-feat.csv.gz``, ``node_*.csv.gz``, ``edge_*.csv.gz``; or,
for ogbn-papers100M, ``raw/data.npz`` and ``raw/node-label.npz``. ``split/<name>/{train,valid,test}.csv.gz`` hold node
ids.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from shardpass.data.file_rows import FileRows, RowWriter, blocks
from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers.graph_files import GraphFiles, PathLike, open_edges, text_rows
from shardpass.data.streaming.budget import Budget
from shardpass.errors import require

PREFIX = "ogbn-"
_WITH_INVERSE = ("ogbn_proteins", "ogbn_products")  # where OGB's own loader adds the reverse of every edge
_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
_COUNTS = ("num_nodes_list", "num_edges_list")
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class OgbFiles(GraphFiles):
    """A directory in OGB's layout; made by `stream_ogb`."""

    folder: Path
    add_inverse_edge: bool
    drop: tuple[str, ...] = ()

    def open(self, budget: Budget) -> RawGraph:
        arrays = _binary(self.folder, budget) if is_binary(self.folder) else _text(self.folder, budget)
        ends = arrays.pop("edge_index")
        edge_fields = {name: rows for name, rows in arrays.items() if name.startswith("edge_")}
        node_fields = {name: rows for name, rows in arrays.items() if name.startswith("node_")}
        num_nodes = _single(arrays["num_nodes_list"], self.folder)
        if self.add_inverse_edge:
            ends = EdgeArrays(*_with_inverse(ends, budget))
            edge_fields = {name: _repeated(rows, budget) for name, rows in edge_fields.items()}
        node_fields = {_plain(name): rows for name, rows in node_fields.items()}
        if "y" in node_fields:
            node_fields["y"] = _labels(node_fields["y"], budget)
        node_fields |= _masks(self.folder, num_nodes, budget)
        edge_fields = {"edge_attr" if name == "edge_feat" else name: rows for name, rows in edge_fields.items()}
        node_fields, edge_fields = (
            {name: rows for name, rows in fields.items() if name not in self.drop}
            for fields in (node_fields, edge_fields)
        )
        source = f"{self.folder.name} (OGB{', with inverse edges' if self.add_inverse_edge else ''})"
        return RawGraph({NODE: num_nodes}, {EDGE: ends}, {NODE: node_fields}, {EDGE: edge_fields}, {}, source)


def stream_ogb(
    dataset: PathLike, *, add_inverse_edge: bool | None = None, root: PathLike = "dataset", drop: tuple[str, ...] = ()
) -> OgbFiles:
    """A node dataset of OGB, for `shardpass.partition`, which never holds it in memory as a whole.

    `x` are the node features, `y` the labels: int64 [num_nodes], -1 for unlabelled nodes, where there is one label per
    node; else float32 [num_nodes, tasks]. `edge_attr` are the edge features. `train_mask`, `val_mask` and `test_mask`
    are OGB's split. Further arrays keep their names (`node_year`, `node_species`).

    Args:
        dataset: the directory of a dataset (``.../ogbn_arxiv``), or a name (``"ogbn-arxiv"``), which is looked for in
            `root` and downloaded there with the ogb package if it is not there.
        add_inverse_edge: add the reverse of each edge right behind it. None: where OGB's own loader does so
            (ogbn-proteins and ogbn-products).
        root: the directory of OGB's datasets.
        drop: names of fields to leave out.

    Raises:
        ValueError: a directory of another layout, a dataset that is not there and cannot be downloaded.
        MissingDependencyError: when it is to be downloaded and ogb is not installed.
    """
    folder = Path(dataset)
    if not folder.exists() and str(dataset).startswith(PREFIX):
        folder = Path(root) / str(dataset).replace("-", "_")
        if not folder.exists():
            _download(str(dataset), folder)
    raw = folder / "raw"
    if (raw / "triplet-type-list.csv.gz").exists():
        raise ValueError(
            f"{folder} is a graph of several types, which this reader does not know; load it with ogb, make a "
            "HeteroData of it and pass that"
        )
    if not is_binary(folder) and not (raw / "edge.csv.gz").exists():
        raise ValueError(
            f"{folder} has neither raw/edge.csv.gz nor raw/data.npz; expected a node dataset as OGB writes it"
        )
    inverse = folder.name in _WITH_INVERSE if add_inverse_edge is None else add_inverse_edge
    return OgbFiles(folder, inverse, tuple(drop))


def is_ogb(path: Path) -> bool:
    """Whether a directory has OGB's layout."""
    return (path / "raw").is_dir()


def is_binary(folder: Path) -> bool:
    return (folder / "raw" / "data.npz").exists()


def _download(name: str, folder: Path) -> None:
    """Get a dataset with the functions of the ogb package, into `folder`."""
    otherwise = f"get {name} elsewhere and pass its directory"
    url_tools = require("ogb.utils.url", "ogb", f"downloading {name}", otherwise)
    import csv

    with open(Path(str(url_tools.__file__)).parents[1] / "nodeproppred" / "master.csv", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if name not in rows[0]:
        raise ValueError(f"OGB has no node dataset {name!r}; it has {', '.join(rows[0][1:])}")
    facts = {row[0]: row[rows[0].index(name)] for row in rows}
    try:
        archive = Path(url_tools.download_url(facts["url"], str(folder.parent)))
        url_tools.extract_zip(str(archive), str(folder.parent))
        archive.unlink()
        (folder.parent / facts["download_name"]).rename(folder)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{name} is not in {folder.parent} and could not be downloaded from {facts['url']} ({error}); "
            f"{otherwise.replace('elsewhere', 'where there is a network')}"
        ) from error


# ---- the two layouts, as arrays by OGB's names


def _text(folder: Path, budget: Budget) -> dict[str, Any]:
    raw = folder / "raw"
    ends, column = open_edges(raw / "edge.csv.gz", budget)
    if column is not None:
        raise ValueError(f"{raw / 'edge.csv.gz'} has 3 columns; expected source and destination")
    arrays: dict[str, Any] = {"edge_index": ends}
    names = {"num-node-list": _COUNTS[0], "num-edge-list": _COUNTS[1], "species": "node_species"}
    for path in sorted(raw.glob("*.csv.gz")):
        stem = path.name.removesuffix(".csv.gz")
        if stem != "edge":
            arrays[names.get(stem, stem.replace("-", "_"))] = text_rows(path, budget)
    _check_counts(arrays, raw)
    return arrays


def _binary(folder: Path, budget: Budget) -> dict[str, Any]:
    raw = folder / "raw"
    arrays: dict[str, Any] = {}
    for path in (raw / "data.npz", raw / "node-label.npz"):
        if path.exists():
            arrays |= _npz_rows(path, budget)
    for name in ("edge_index", *_COUNTS):
        if name not in arrays:
            raise ValueError(f"{raw / 'data.npz'} has no array {name!r}; it has {', '.join(arrays)}")
    index = arrays["edge_index"]
    if len(index.shape) != 2 or index.shape[0] != 2:
        raise ValueError(f"{index.name}: edge_index has the shape {list(index.shape)}; expected [2, num_edges]")
    arrays["edge_index"] = EdgeArrays(index.select(0), index.select(1))
    _check_counts(arrays, raw)
    return arrays


def _check_counts(arrays: dict[str, Any], raw: Path) -> None:
    for name, told in zip(_COUNTS, ("num-node-list.csv.gz", "num-edge-list.csv.gz")):
        if name not in arrays:
            raise ValueError(f"{raw / told} is missing; expected the whole directory as OGB writes it")
    expected, found = _single(arrays["num_edges_list"], raw), len(arrays["edge_index"].src)
    if expected != found:
        raise ValueError(f"{raw}: {found} edges, but the list of numbers of edges says {expected}; a file is torn")


def _single(counts: FileRows, folder: Path) -> int:
    values = counts.load().reshape(-1).tolist()
    if len(values) != 1:
        raise ValueError(f"{folder} holds {len(values)} graphs; expected a node dataset, which is one graph")
    return int(values[0])


def _npz_rows(path: Path, budget: Budget) -> dict[str, FileRows]:
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


# ---- into the shape of ours


def _plain(name: str) -> str:
    return {"node_feat": "x", "node_label": "y"}.get(name, name)


def _with_inverse(ends: EdgeArrays, budget: Budget) -> Iterator[FileRows]:
    """Each edge followed by its reverse."""
    for own, other in ((ends.src, ends.dst), (ends.dst, ends.src)):
        writer = RowWriter(budget.file(), own.array_dtype, origin=own.name)
        for (_, first), (_, second) in zip(blocks(own, budget.block_edges), blocks(other, budget.block_edges)):
            writer.append(np.stack([first.numpy(), second.numpy()], axis=1).reshape(-1))
        yield writer.rows()


def _repeated(rows: FileRows, budget: Budget) -> FileRows:
    writer = RowWriter(budget.file(), rows.array_dtype, tuple(rows.shape[1:]), rows.name)
    for _, block in blocks(rows, _BLOCK_ROWS):
        writer.append(np.repeat(block.numpy(), 2, axis=0))
    return writer.rows()


def _labels(rows: FileRows, budget: Budget) -> FileRows:
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


def _masks(folder: Path, num_nodes: int, budget: Budget) -> dict[str, FileRows]:
    splits = sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if len(splits) > 1:
        raise ValueError(f"{folder / 'split'} holds {len(splits)} splits; expected one: move the others elsewhere")
    masks = {}
    for split in splits:
        for name, mask in _MASKS.items():
            path = split / f"{name}.csv.gz"
            if not path.exists():
                raise ValueError(f"{path} is missing; expected train, valid and test there")
            masks[mask] = _mask(text_rows(path, budget), num_nodes, budget)
    return masks


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
