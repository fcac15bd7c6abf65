"""An open store: its manifest, its part files, and what can be read of them part by part."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardpass.data import keys
from shardpass.data.fields import Fields
from shardpass.data.manifest import Manifest, read_manifest
from shardpass.data.raw import EdgeType, NodeType
from shardpass.data.tensor_file import TensorFile
from shardpass.errors import StoreError


@dataclass(frozen=True)
class PartEdges:
    """A part's edges of one type, sorted by (source part, destination, original id). Views of the mapped file.

    src: new global ids, int32 or int64. dst: rows of the part, int32. edge_ids: original positions, int64.
    shard_offsets: int64 [num_parts + 1]; the edges from part q are `[shard_offsets[q], shard_offsets[q + 1])`.
    """

    src: Tensor
    dst: Tensor
    edge_ids: Tensor
    shard_offsets: Tensor


class Store:
    """An open store. Made by `open_store`; `manifest` says what it holds, `files` are its parts."""

    def __init__(self, path: Path, manifest: Manifest, files: list[TensorFile]) -> None:
        self.path, self.manifest, self.files = path, manifest, files

    @property
    def num_parts(self) -> int:
        return self.manifest.num_parts

    def __repr__(self) -> str:
        nodes, edges = (sum(counts.values()) for counts in (self.manifest.num_nodes, self.manifest.num_edges))
        return f"Store({str(self.path)!r}, {self.num_parts} parts, {nodes} nodes, {edges} edges)"

    def part_edges(self, edge_type: EdgeType, part: int) -> PartEdges:
        """A part's edges of one type, verified."""
        file = self.files[part]
        return PartEdges(*(file.verified(keys.edge_array_key(edge_type, name)) for name in keys.EDGE_ARRAYS))

    def node_fields(self, node_type: NodeType, parts: range) -> Fields:
        """The node fields of a run of parts, one part after the other."""
        info = self.manifest.node_fields[node_type]
        return Fields(info, {name: keys.node_field_key(node_type, name) for name in info}, self.files_of(parts))

    def edge_fields(self, edge_type: EdgeType, parts: range) -> Fields:
        """The edge fields of a run of parts, one part after the other."""
        info = self.manifest.edge_fields[edge_type]
        return Fields(info, {name: keys.edge_field_key(edge_type, name) for name in info}, self.files_of(parts))

    def files_of(self, parts: range) -> list[TensorFile]:
        """The files of a run of parts."""
        return self.files[parts.start : parts.stop]


def open_store(path: str | os.PathLike[str]) -> Store:
    """The store in a directory. The manifest and the size and header of every part file have been verified.

    Raises:
        StoreError: when the directory is missing or is not a store, a file is missing, torn or altered, or a newer
            shardpass wrote it.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    expected = [keys.part_file_name(part) for part in range(manifest.num_parts)]
    if [record.name for record in manifest.files] != expected:
        raise StoreError(f"{directory}: the manifest lists {len(manifest.files)} files for {manifest.num_parts} parts")
    return Store(directory, manifest, [TensorFile(directory / record.name, record) for record in manifest.files])
