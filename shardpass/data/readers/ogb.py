"""Node datasets of the Open Graph Benchmark, from OGB's own directories, read piece by piece."""

from __future__ import annotations

import csv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, RowWriter, blocks
from shardpass.data.raw import EdgeArrays, RawGraph
from shardpass.data.readers.graph_files import GraphFiles, PathLike, open_edges, open_rows
from shardpass.data.readers.inverse import inverse_added
from shardpass.data.readers.ogb_directory import find_arrays, has_several_types, is_dataset
from shardpass.data.readers.text import text_rows
from shardpass.data.rows import Field
from shardpass.data.streaming import Budget
from shardpass.errors import require

PREFIX = "ogbn-"
_WITH_INVERSE = ("ogbn_proteins", "ogbn_products")  # where OGB's own loader adds the reverse of every edge
_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class OgbFiles(GraphFiles):
    """A directory in OGB's layout. Made by `stream_ogb`."""

    folder: Path
    add_inverse_edge: bool
    drop: tuple[str, ...] = ()

    def open(self, budget: Budget) -> RawGraph:
        found = find_arrays(self.folder)
        edges = {kind: _edges(path, budget) for kind, path in found.edges.items()}
        edge_fields = {kind: self._opened(paths, budget) for kind, paths in found.edge_fields.items()}
        node_fields: dict[str, dict[str, Field]] = {}
        for kind, count in found.num_nodes.items():
            node_fields[kind] = {**self._opened(found.node_fields[kind], budget)}
            if kind in found.splits:
                paths = {mask: found.splits[kind] / f"{name}.csv.gz" for name, mask in _MASKS.items()}
                node_fields[kind] |= {
                    mask: _mask(path, count, budget) for mask, path in paths.items() if mask not in self.drop
                }
        source = f"{self.folder.name} (OGB{', with inverse edges' if self.add_inverse_edge else ''})"
        graph = RawGraph(found.num_nodes, edges, node_fields, edge_fields, {}, source)
        return inverse_added(graph, budget) if self.add_inverse_edge else graph

    def _opened(self, paths: dict[str, Path], budget: Budget) -> dict[str, FileRows]:
        rows = {name: open_rows(path, budget) for name, path in paths.items() if name not in self.drop}
        return {name: _labels(field, budget) if name == "y" else field for name, field in rows.items()}


def stream_ogb(
    dataset: PathLike, *, add_inverse_edge: bool | None = None, root: PathLike = "dataset", drop: tuple[str, ...] = ()
) -> OgbFiles:
    """A node dataset of OGB, for `shardpass.partition`, which never holds it in memory as a whole.

    `x` are the node features. `y` are the labels: int64 [num_nodes], -1 for unlabelled nodes, if there is one label per
    node; else float32 [num_nodes, tasks]. `edge_attr` are the edge features. `train_mask`, `val_mask` and `test_mask`
    are OGB's split. Further arrays keep their names (`node_year`, `node_species`).

    Args:
        dataset: the directory of a dataset (``.../ogbn_arxiv``), or a name (``"ogbn-arxiv"``). The directory of this
            name is looked for in `root`; if it is not there, the ogb package downloads it.
        add_inverse_edge: add the reverse of each edge right behind it. `None` does so where OGB's own loader does
            (ogbn-proteins and ogbn-products).
        root: the directory of OGB's datasets.
        drop: the names of fields to leave out.

    Raises:
        ValueError: when the directory has another layout, or the dataset cannot be downloaded.
        MissingDependencyError: when the dataset is to be downloaded and ogb is not installed.
    """
    folder = Path(dataset)
    if not folder.exists() and str(dataset).startswith(PREFIX):
        folder = Path(root) / str(dataset).replace("-", "_")
        if not folder.exists():
            _download(str(dataset), folder)
    if not is_dataset(folder):
        raise ValueError(
            f"{folder} has neither raw/edge.csv.gz nor raw/data.npz; expected a node dataset as OGB writes it"
        )
    if add_inverse_edge and has_several_types(folder):
        raise ValueError(f"{folder} has several types: reverse edges would be of other types; add them as relations")
    inverse = folder.name in _WITH_INVERSE if add_inverse_edge is None else add_inverse_edge
    return OgbFiles(folder, inverse, tuple(drop))


def is_ogb(path: Path) -> bool:
    """Whether a directory may be one of OGB's."""
    return (path / "raw").is_dir()


def _download(name: str, folder: Path) -> None:
    """Get a dataset with the functions of the ogb package, into `folder`."""
    otherwise = f"get {name} elsewhere and pass its directory"
    url_tools = require("ogb.utils.url", "ogb", f"downloading {name}", otherwise)
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


def _edges(path: Path, budget: Budget) -> EdgeArrays:
    ends, weights = open_edges(path, budget)
    if weights is not None:
        raise ValueError(f"{path} has 3 columns; expected source and destination")
    return ends


def _labels(rows: FileRows, budget: Budget) -> FileRows:
    """Classes as int64 [num_nodes], -1 in the place of NaN; the labels of several tasks as float32."""
    several = len(rows.shape) > 1 and rows.shape[1] > 1
    kind, row_shape = (np.float32, tuple(rows.shape[1:])) if several else (np.int64, ())
    writer = RowWriter(budget.file(), kind, row_shape, rows.name)
    for start, block in blocks(rows, _BLOCK_ROWS):
        values = block if several else block.double().nan_to_num(nan=-1).reshape(-1)
        wrong = torch.nonzero(values != values.floor())
        if wrong.numel() and not several:
            row = int(wrong[0])
            raise ValueError(f"{rows.name}, row {start + row}: label {float(values[row])}; expected a class")
        writer.append(values.numpy())
    return writer.rows()


def _mask(path: Path, num_nodes: int, budget: Budget) -> Tensor:
    """True at the ids in a file, bool [num_nodes]."""
    if not path.exists():
        raise ValueError(f"{path} is missing; expected train, valid and test there")
    ids = text_rows(path, budget).load()
    wrong = torch.nonzero((ids < 0) | (ids >= num_nodes) | (ids != ids.floor()))
    if wrong.numel():
        row = int(wrong[0])
        raise ValueError(f"{path}, row {row}: node {ids[row].item()}; expected an integer in [0, {num_nodes})")
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[ids.long()] = True
    return mask
