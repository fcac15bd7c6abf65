"""Reading a store: `open_store`, its parts, and the check of every byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardpass.data import keys
from shardpass.data.fields import Fields
from shardpass.data.manifest import Manifest, read_manifest
from shardpass.data.raw import EdgeType, NodeType
from shardpass.data.tensor_file import TensorFile
from shardpass.errors import StoreError

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`."""


@dataclass(frozen=True)
class PartEdges:
    """A part's edges of one type, sorted by (source part, destination, original id). Views of the file's memory.

    src: new global ids, int32 or int64. dst: rows of the part, int32. edge_ids: original positions, int64.
    shard_offsets: int64 [num_parts + 1]; the edges from part q are `[shard_offsets[q], shard_offsets[q + 1])`.
    """

    src: Tensor
    dst: Tensor
    edge_ids: Tensor
    shard_offsets: Tensor


@dataclass(frozen=True)
class PartData:
    """One part of a store. Structure is verified; fields are verified when they are first asked for.

    node_ids: original ids of the part's nodes, int64, per node type. edges: in-edges of its nodes, per edge type.
    """

    part: int
    node_ids: dict[NodeType, Tensor]
    node_fields: dict[NodeType, Fields]
    edges: dict[EdgeType, PartEdges]
    edge_fields: dict[EdgeType, Fields]


class Store:
    """An open partition directory. Made by `open_store`; `manifest` says what it holds."""

    def __init__(self, path: Path, manifest: Manifest, files: list[TensorFile]) -> None:
        self.path, self.manifest, self.files = path, manifest, files

    @property
    def num_parts(self) -> int:
        return self.manifest.num_parts

    def __repr__(self) -> str:
        nodes, edges = (sum(counts.values()) for counts in (self.manifest.num_nodes, self.manifest.num_edges))
        return f"Store({str(self.path)!r}, {self.num_parts} parts, {nodes} nodes, {edges} edges)"

    def read_part(self, part: int) -> PartData:
        """One part, memory-mapped.

        Raises:
            StoreError: when the part's structure is altered.
            ValueError: when there is no such part.
        """
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part {part} is outside the valid interval [0, {self.num_parts}) of {self.path}")
        file = self.files[part]
        return PartData(
            part=part,
            node_ids={kind: file.verified(keys.node_ids_key(kind)) for kind in self.manifest.node_types},
            node_fields={kind: self.node_fields(kind, range(part, part + 1)) for kind in self.manifest.node_types},
            edges={kind: self.part_edges(kind, part) for kind in self.manifest.edge_types},
            edge_fields={kind: self.edge_fields(kind, range(part, part + 1)) for kind in self.manifest.edge_types},
        )

    def part_edges(self, edge_type: EdgeType, part: int) -> PartEdges:
        """A part's edges of one type, verified."""
        file = self.files[part]
        return PartEdges(*(file.verified(keys.edge_array_key(edge_type, name)) for name in keys.EDGE_ARRAYS))

    def node_fields(self, node_type: NodeType, parts: range) -> Fields:
        """The node fields of a run of parts, one part after the other."""
        info = self.manifest.node_fields[node_type]
        return Fields(info, {name: keys.node_field_key(node_type, name) for name in info}, self._files_of(parts))

    def edge_fields(self, edge_type: EdgeType, parts: range) -> Fields:
        """The edge fields of a run of parts, one part after the other."""
        info = self.manifest.edge_fields[edge_type]
        return Fields(info, {name: keys.edge_field_key(edge_type, name) for name in info}, self._files_of(parts))

    def verify(self, progress: Progress | None = None) -> None:
        """Return when every byte of every file is what was written.

        Raises:
            StoreError: naming the first file that differs.
        """
        for done, file in enumerate(self.files):
            if progress:
                progress("verify", done, len(self.files))
            for key in file.record.tensors:
                file.verify(key)
        if progress:
            progress("verify", len(self.files), len(self.files))

    def _files_of(self, parts: range) -> list[TensorFile]:
        return [self.files[part] for part in parts]


def open_store(path: str | os.PathLike[str]) -> Store:
    """The store in a directory, with its manifest and the size and header of every part file verified.

    Raises:
        StoreError: when the directory is missing or no store, a file is missing, torn or altered, or the format is
            that of a newer shardpass.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    expected = [keys.part_file_name(part) for part in range(manifest.num_parts)]
    if [record.name for record in manifest.files] != expected:
        raise StoreError(f"{directory}: the manifest lists {len(manifest.files)} files for {manifest.num_parts} parts")
    return Store(directory, manifest, [TensorFile(directory / record.name, record) for record in manifest.files])
