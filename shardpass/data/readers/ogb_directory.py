"""Where the arrays of a dataset are in a directory of OGB.

The layout (Hu et al. 2020; `ogb.io.read_graph_raw`): ``raw/edge.csv.gz``, ``num-node-list.csv.gz``, and, where there
are any, ``node-feat.csv.gz``, ``node-label.csv.gz``, ``edge-feat.csv.gz``, ``node_*.csv.gz``, ``edge_*.csv.gz``; or,
for ogbn-papers100M, ``raw/data.npz`` and ``raw/node-label.npz``. ``split/<name>/{train,valid,test}.csv.gz`` hold node
ids. ogbn-mag, which has several types, has folders ``raw/node-feat/<type>``, ``raw/node-label/<type>``,
``raw/relations/<source>___<relation>___<target>`` and ``split/<name>/<type>`` with such files.
"""

from __future__ import annotations

import csv
import gzip
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardpass.core.ranks import refuse_irregular
from shardpass.data.raw import EDGE, NODE, EdgeType, NodeType
from shardpass.data.reading import reading

_NAMES = {
    "edge": "edge_index",
    "node_feat": "x",
    "node_label": "y",
    "edge_feat": "edge_attr",
    "species": "node_species",
}
"""Our names of OGB's arrays. All others keep theirs."""
_NODE_FIELDS, _EDGE_FIELDS = ("x", "y", "node_"), ("edge_",)

_Arrays = dict[str, Path]


@dataclass(frozen=True)
class OgbArrays:
    """The files of a dataset's arrays, for `open_edges` and `open_rows`; the names of fields are ours.

    splits: the folder of ids of each node type that has one.
    """

    num_nodes: dict[NodeType, int]
    edges: dict[EdgeType, Path]
    node_fields: dict[NodeType, _Arrays]
    edge_fields: dict[EdgeType, _Arrays]
    splits: dict[NodeType, Path]


def is_dataset(folder: Path) -> bool:
    """Whether a directory holds a node dataset."""
    return any((folder / "raw" / name).exists() for name in ("data.npz", "edge.csv.gz", "triplet-type-list.csv.gz"))


def has_several_types(folder: Path) -> bool:
    """Whether a dataset has several types, as ogbn-mag has."""
    return (folder / "raw" / "triplet-type-list.csv.gz").exists()


def find_arrays(folder: Path) -> OgbArrays:
    """The arrays in a directory."""
    raw, splits = folder / "raw", sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if len(splits) > 1:
        raise ValueError(f"{folder / 'split'} holds {len(splits)} splits; expected one: move the others elsewhere")
    if has_several_types(folder):
        return _several_types(raw, splits)
    arrays = {**_members(raw / "data.npz"), **_members(raw / "node-label.npz")} or _tables(raw)
    return OgbArrays(
        {NODE: _num_nodes(arrays, raw)},
        {EDGE: _edges(arrays, raw)},
        {NODE: _starting(arrays, _NODE_FIELDS)},
        {EDGE: _starting(arrays, _EDGE_FIELDS)},
        dict.fromkeys([NODE], splits[0]) if splits else {},
    )


def _several_types(raw: Path, splits: list[Path]) -> OgbArrays:
    path = raw / "num-node-dict.csv.gz"
    with reading(path, "numbers of nodes"):
        types, counts = _lines(path)[:2]
        num_nodes = {kind: int(count) for kind, count in sorted(zip(types, counts))}
    tables = {kind: {**_tables(raw / "node-feat" / kind), **_tables(raw / "node-label" / kind)} for kind in num_nodes}
    path = raw / "triplet-type-list.csv.gz"
    with reading(path, "types of edges"):
        triplets = sorted((s, relation, d) for s, relation, d in _lines(path))
    folders = {(s, relation, d): raw / "relations" / f"{s}___{relation}___{d}" for s, relation, d in triplets}
    return OgbArrays(
        num_nodes,
        {kind: _edges(_tables(of_kind), of_kind) for kind, of_kind in folders.items()},
        {kind: _starting(arrays, _NODE_FIELDS) for kind, arrays in tables.items()},
        {kind: _starting(_tables(of_kind), _EDGE_FIELDS) for kind, of_kind in folders.items()},
        {kind: split / kind for split in splits for kind in num_nodes if (split / kind).is_dir()},
    )


def _tables(folder: Path) -> _Arrays:
    """The text files of a folder."""
    names = {path: path.name.removesuffix(".csv.gz").replace("-", "_") for path in sorted(folder.glob("*.csv.gz"))}
    return {_NAMES.get(name, name): path for path, name in names.items()}


def _members(archive: Path) -> _Arrays:
    """The arrays of an `.npz` archive, if there is one."""
    if not archive.exists():
        return {}
    with reading(archive, "an .npz of plain arrays"):
        refuse_irregular(archive)
        names = zipfile.ZipFile(archive).namelist()
    return {_NAMES.get(name.removesuffix(".npy"), name.removesuffix(".npy")): archive / name for name in names}


def _starting(arrays: _Arrays, prefixes: tuple[str, ...]) -> _Arrays:
    return {name: path for name, path in arrays.items() if name.startswith(prefixes) and name != "edge_index"}


def _edges(arrays: _Arrays, folder: Path) -> Path:
    if "edge_index" not in arrays:
        raise ValueError(f"{folder / 'edge.csv.gz'} is missing; expected the whole directory as OGB writes it")
    return arrays["edge_index"]


def _num_nodes(arrays: _Arrays, raw: Path) -> int:
    """The number of nodes of the only graph in a dataset."""
    path = arrays.get("num_nodes_list", raw / "num-node-list.csv.gz")
    with reading(path, "a number of nodes"):
        if path.suffix == ".npy":
            counts = np.load(path.parent, allow_pickle=False)[path.stem].reshape(-1).tolist()
        else:
            counts = [int(line[0]) for line in _lines(path)]
    if len(counts) != 1:
        raise ValueError(f"{path} tells of {len(counts)} graphs; expected a node dataset, which is one graph")
    return int(counts[0])


def _lines(path: Path) -> list[list[str]]:
    if not path.exists():
        raise ValueError(f"{path} is missing; expected the whole directory as OGB writes it")
    with reading(path, "lines of text"):
        refuse_irregular(path)
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return [line for line in csv.reader(file) if line]
