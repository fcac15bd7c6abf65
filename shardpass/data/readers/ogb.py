"""Node datasets of the Open Graph Benchmark, from OGB's own directories, read piece by piece.

The layout (Hu et al. 2020; `ogb.io.read_graph_raw`): ``raw/edge.csv.gz``, ``num-node-list.csv.gz``, and, where there
are any, ``node-feat.csv.gz``, ``node-label.csv.gz``, ``edge-feat.csv.gz``, ``node_*.csv.gz``, ``edge_*.csv.gz``; or,
for ogbn-papers100M, ``raw/data.npz`` and ``raw/node-label.npz``. ``split/<name>/{train,valid,test}.csv.gz`` hold node
ids. ogbn-mag, which has several types, has folders ``raw/node-feat/<type>``, ``raw/node-label/<type>``,
``raw/relations/<source>___<relation>___<target>`` and ``split/<name>/<type>`` with such files.
"""

from __future__ import annotations

import csv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from shardpass.data.file_rows import FileRows
from shardpass.data.raw import EdgeArrays, NodeType, RawGraph
from shardpass.data.readers.graph_files import GraphFiles, PathLike
from shardpass.data.readers.ogb_arrays import (
    OgbArrays,
    is_binary,
    is_typed,
    labels,
    masks,
    ogb_arrays,
    repeated,
    with_inverse,
)
from shardpass.data.streaming.budget import Budget
from shardpass.errors import require

PREFIX = "ogbn-"
_WITH_INVERSE = ("ogbn_proteins", "ogbn_products")  # where OGB's own loader adds the reverse of every edge
_NAMES = {"node_feat": "x", "node_label": "y", "edge_feat": "edge_attr"}


@dataclass(frozen=True)
class OgbFiles(GraphFiles):
    """A directory in OGB's layout; made by `stream_ogb`."""

    folder: Path
    add_inverse_edge: bool
    drop: tuple[str, ...] = ()

    def open(self, budget: Budget) -> RawGraph:
        found = ogb_arrays(self.folder, budget, self._not_read())
        node_fields = {kind: self._node_fields(found, kind, budget) for kind in found.num_nodes}
        edges = found.edges
        if self.add_inverse_edge:
            edges = {kind: EdgeArrays(*with_inverse(ends, budget)) for kind, ends in edges.items()}
        edge_fields = {kind: self._edge_fields(fields, budget) for kind, fields in found.edge_fields.items()}
        source = f"{self.folder.name} (OGB{', with inverse edges' if self.add_inverse_edge else ''})"
        return RawGraph(found.num_nodes, edges, node_fields, edge_fields, {}, source)

    def _not_read(self) -> list[str]:
        """OGB's names of what is dropped."""
        return [*self.drop, *(theirs for theirs, ours in _NAMES.items() if ours in self.drop)]

    def _node_fields(self, found: OgbArrays, kind: NodeType, budget: Budget) -> dict[str, FileRows]:
        fields = {_NAMES.get(name, name): rows for name, rows in found.node_fields[kind].items()}
        if "y" in fields:
            fields["y"] = labels(fields["y"], budget)
        if kind in found.splits:
            fields |= masks(found.splits[kind], found.num_nodes[kind], budget)
        return {name: rows for name, rows in fields.items() if name not in self.drop}

    def _edge_fields(self, fields: dict[str, FileRows], budget: Budget) -> dict[str, FileRows]:
        named = {_NAMES.get(name, name): rows for name, rows in fields.items()}
        kept = {name: rows for name, rows in named.items() if name not in self.drop}
        return {name: repeated(rows, budget) for name, rows in kept.items()} if self.add_inverse_edge else kept


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
    if not is_binary(folder) and not is_typed(folder) and not (raw / "edge.csv.gz").exists():
        raise ValueError(
            f"{folder} has neither raw/edge.csv.gz nor raw/data.npz; expected a node dataset as OGB writes it"
        )
    if add_inverse_edge and is_typed(folder):
        raise ValueError(f"{folder} has several types: reverse edges would be of other types; add them as relations")
    inverse = folder.name in _WITH_INVERSE if add_inverse_edge is None else add_inverse_edge
    return OgbFiles(folder, inverse, tuple(drop))


def is_ogb(path: Path) -> bool:
    """Whether a directory has OGB's layout."""
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
