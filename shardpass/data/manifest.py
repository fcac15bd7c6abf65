"""`Manifest`: what the part files of a store hold, and the JSON file that says so."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from shardpass.core.ranks import COUNT, TensorInfo, mismatch, refuse_irregular, tells_of_full_disk
from shardpass.data.raw import FIELD_DTYPES, EdgeType, NodeType, Scalar
from shardpass.data.tensor_file import FileRecord
from shardpass.errors import StoreError

FORMAT = "shardpass store"
VERSION = 2
MANIFEST_NAME = "manifest.json"

_BLANK = "0" * 64
_MOST_BYTES = 1 << 26
_DTYPES = {name: dtype for dtype, name in FIELD_DTYPES.items()}


@dataclass(frozen=True)
class FieldInfo:
    """A stored field: its dtype and the shape of one row (`()` for one number per node or edge)."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, count: int) -> TensorInfo:
        """The tensor that a file holds for `count` rows. A complex number is two real ones."""
        if self.dtype.is_complex:
            return TensorInfo(self.dtype.to_real(), (count, *self.shape, 2))
        return TensorInfo(self.dtype, (count, *self.shape))


@dataclass(frozen=True)
class Manifest:
    """What a store holds. Counts are of the whole graph, lists have an entry for each part.

    num_parts: the number of parts P.
    num_nodes: the number of nodes of each node type. num_edges: the number of edges of each edge type.
    offsets: for each node type, P + 1 numbers: the new ids of part p are `[offsets[p], offsets[p + 1])`.
    part_edges: for each edge type, the number of edges of each part, which are those into its nodes.
    halo_rows: for each edge type and part, the number of distinct sources of its edges that are in other parts.
    cut_edges: for each edge type, the number of edges whose ends are in different parts.
    node_fields, edge_fields: for each type, the dtype and row shape of every field. graph_fields: numbers and strings.
    files: the size and the checksums of each part's file. names: those of the file with the names of the nodes, if
        they have any. graph_file: those of the file with links to score and with arrays of the graph as a whole.
    columns: for some node types, the names of the columns of some fields, such as those of `x` that come from a table.
    source, method, seed: where the graph came from and how it was partitioned.
    graph_fingerprint: a hash of the structure, the same for every partition of a graph.
    partition_fingerprint: a hash of the structure and the partition.
    """

    num_parts: int
    num_nodes: dict[NodeType, int]
    num_edges: dict[EdgeType, int]
    offsets: dict[NodeType, list[int]]
    part_edges: dict[EdgeType, list[int]]
    halo_rows: dict[EdgeType, list[int]]
    cut_edges: dict[EdgeType, int]
    node_fields: dict[NodeType, dict[str, FieldInfo]]
    edge_fields: dict[EdgeType, dict[str, FieldInfo]]
    graph_fields: dict[str, Scalar]
    files: list[FileRecord]
    source: str
    method: str
    seed: int
    shardpass_version: str
    graph_fingerprint: str
    partition_fingerprint: str
    names: FileRecord | None = None
    graph_file: FileRecord | None = None
    columns: dict[NodeType, dict[str, list[str]]] = field(default_factory=dict)
    format_version: int = field(default=VERSION)

    def __str__(self) -> str:
        """How large it is, and what its partition costs, in a line each."""
        nodes, edges = sum(self.num_nodes.values()), sum(self.num_edges.values())
        part_nodes = [sum(ends) - sum(starts) for starts, ends in pairwise(zip(*self.offsets.values()))] or [0]
        part_edges = [sum(counts) for counts in zip(*self.part_edges.values())] or [0]
        return (
            f"{nodes:,} nodes and {edges:,} edges in {self.num_parts} part{'s'[: self.num_parts != 1]}, "
            f"{sum(self.cut_edges.values()) / max(1, edges):.1%} of the edges cut ({self.method})\n"
            f"nodes of a part: {min(part_nodes):,} to {max(part_nodes):,}; its edges: {min(part_edges):,} to "
            f"{max(part_edges):,}"
        ) + "".join(f"\n{line}" for line in self.column_lines())

    def column_lines(self) -> list[str]:
        """The names of the columns of each field that has some, in a line for each field."""
        several = len(self.num_nodes) > 1
        return [
            f"columns of {f'{kind}.' if several else ''}{name}: {', '.join(columns)}"
            for kind, fields in self.columns.items()
            for name, columns in fields.items()
        ]

    __repr__ = __str__  # what an interpreter and a notebook show, instead of every number

    @property
    def contents_fingerprint(self) -> str:
        """A hash of everything in the files but names: structure, partition and fields."""
        records = [*self.files, *([] if self.graph_file is None else [self.graph_file])]
        return hashlib.sha256(json.dumps([vars(record) for record in records]).encode()).hexdigest()

    @property
    def node_types(self) -> list[NodeType]:
        return list(self.num_nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        return list(self.num_edges)


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest with the SHA-256 of its own text, in which 64 zeros stand for the checksum."""
    document = {"format": FORMAT, "version": manifest.format_version, "sha256": _BLANK, **_to_json(manifest)}
    text = json.dumps(document, indent=1).encode()
    if len(text) > _MOST_BYTES:
        raise StoreError(f"the manifest would have {len(text)} bytes, {_MOST_BYTES} are possible: make fewer parts")
    with tells_of_full_disk(path, len(text)):
        path.write_bytes(text.replace(_BLANK.encode(), hashlib.sha256(text).hexdigest().encode(), 1))


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the store in a directory."""
    path = directory / MANIFEST_NAME
    if directory.is_file():
        raise StoreError(
            f"{directory} is a file, not a store; make a store of the graph first, with shardpass.partition, "
            "or with `shardpass partition FILE STORE`"
        )
    if not directory.is_dir():
        where = f"{directory.absolute()} on {platform.node()}"
        raise StoreError(
            f"there is no directory {where}; write a store there with shardpass.partition, or copy the one there that "
            f"other ranks read"
        )
    text = _read_text(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is altered or torn: it is not JSON ({error})") from error
    _check_head(document, text, path)
    for file in _OPTIONAL_FILES:
        document.setdefault(file, None)
    document.setdefault("columns", {})  # which a store without names of columns has not
    problem = mismatch(document, _SCHEMA)
    if problem:
        raise StoreError(f"{path} is not as format version {VERSION} requires: {problem}")
    manifest = _from_json(document)
    if {**document, **_to_json(manifest)} != document:
        raise StoreError(f"{path} contradicts itself: a type or a field is there twice, or has a key that is unknown")
    return manifest


def _read_text(path: Path) -> bytes:
    try:
        refuse_irregular(path)
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise StoreError(f"{path} has {size} bytes; expected at most {_MOST_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path.parent} is not a shardpass store: {path.name} cannot be read ({error.strerror or error})"
        ) from error


def _check_head(document: Any, text: bytes, path: Path) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{path} is not the manifest of a shardpass store: it lacks format = {FORMAT!r}")
    version: Any = document.get("version")
    problem = mismatch(version, range(1, 2**31), "its format version")
    if problem:
        raise StoreError(f"{path} is altered: {problem}")
    if version > VERSION:
        raise StoreError(
            f"{path} has format version {version}, this shardpass reads up to {VERSION}; upgrade shardpass, "
            "or write the store again with this version"
        )
    if version < VERSION:
        raise StoreError(
            f"{path} has format version {version}, which an older shardpass wrote; this one reads version {VERSION}: "
            "write the store again with shardpass.partition"
        )
    checksum = str(document["sha256"]) if mismatch(document, {"sha256": str}) is None else ""
    blanked = text.replace(checksum.encode(), _BLANK.encode(), 1)
    if hashlib.sha256(blanked).hexdigest() != checksum:
        raise StoreError(f"{path} is altered: its checksum differs from its contents; it is not meant to be edited")


_PLAIN = (
    "shardpass_version", "source", "method", "seed", "graph_fingerprint", "partition_fingerprint", "num_parts",
    "graph_fields",
)  # fmt: skip
"""The attributes that a document holds as they are."""
_PER_NODE_TYPE, _PER_EDGE_TYPE = ("num_nodes", "offsets"), ("num_edges", "part_edges", "halo_rows", "cut_edges")
"""Those that it holds in an entry for each type."""
_OPTIONAL_FILES = ("names", "graph_file")
_RECORD = ("name", "bytes", "header_sha256", "tensors")
_FIELDS = [{"name": str, "dtype": frozenset(_DTYPES), "row_shape": [COUNT]}]
_FILE = {"name": str, "bytes": COUNT, "header_sha256": str, "tensors": {str: str}}
_SCHEMA = {
    "shardpass_version": str, "source": str, "method": str, "graph_fingerprint": str, "partition_fingerprint": str,
    "seed": int, "num_parts": COUNT, "graph_fields": {str: (bool, int, float, str)},
    "node_types": [{"type": str, "num_nodes": COUNT, "offsets": [COUNT], "fields": _FIELDS}],
    "edge_types": [
        {
            "type": [str], "num_edges": COUNT, "part_edges": [COUNT], "halo_rows": [COUNT], "cut_edges": COUNT,
            "fields": _FIELDS,
        }
    ],
    "files": [_FILE],
    "names": (None, _FILE),
    "graph_file": (None, _FILE),
    "columns": {str: {str: [str]}},
}  # fmt: skip


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        **{name: getattr(manifest, name) for name in _PLAIN},
        "node_types": [
            {
                "type": kind,
                **{name: getattr(manifest, name)[kind] for name in _PER_NODE_TYPE},
                "fields": _fields_to_json(fields),
            }
            for kind, fields in manifest.node_fields.items()
        ],
        "edge_types": [
            {
                "type": list(kind),
                **{name: getattr(manifest, name)[kind] for name in _PER_EDGE_TYPE},
                "fields": _fields_to_json(fields),
            }
            for kind, fields in manifest.edge_fields.items()
        ],
        "files": [vars(record) for record in manifest.files],
        **({"columns": manifest.columns} if manifest.columns else {}),
        **{name: vars(getattr(manifest, name)) for name in _OPTIONAL_FILES if getattr(manifest, name) is not None},
    }


def _from_json(document: dict[str, Any]) -> Manifest:
    nodes = {entry["type"]: entry for entry in document["node_types"]}
    edges = {tuple(entry["type"]): entry for entry in document["edge_types"]}
    values: dict[str, Any] = {
        **{name: None if document[name] is None else _record(document[name]) for name in _OPTIONAL_FILES},
        **{name: document[name] for name in _PLAIN},
        **{name: {kind: entry[name] for kind, entry in nodes.items()} for name in _PER_NODE_TYPE},
        **{name: {kind: entry[name] for kind, entry in edges.items()} for name in _PER_EDGE_TYPE},
    }
    return Manifest(
        **values,
        node_fields={kind: _fields_from_json(entry["fields"]) for kind, entry in nodes.items()},
        edge_fields={kind: _fields_from_json(entry["fields"]) for kind, entry in edges.items()},
        files=[_record(found) for found in document["files"]],
        columns=document["columns"],
        format_version=document["version"],
    )


def _record(found: dict[str, Any]) -> FileRecord:
    return FileRecord(*(found[name] for name in _RECORD))


def _fields_to_json(fields: dict[str, FieldInfo]) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": FIELD_DTYPES[info.dtype], "row_shape": list(info.shape)}
        for name, info in fields.items()
    ]


def _fields_from_json(entries: list[dict[str, Any]]) -> dict[str, FieldInfo]:
    return {e["name"]: FieldInfo(_DTYPES[e["dtype"]], tuple(e["row_shape"])) for e in entries}
