"""An open store: its manifest, its part files, and what can be read of them part by part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from shardpass.core.ranks import require_path
from shardpass.data import keys
from shardpass.data.fields import Fields
from shardpass.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardpass.data.names import Names
from shardpass.data.part_edges import PartEdges, check_edges
from shardpass.data.raw import EdgeType, NodeType
from shardpass.data.soundness import are_pairs, check_nodes, contradiction
from shardpass.data.tensor_file import TensorFile
from shardpass.errors import StoreError


class Store:
    """An open store. Made by `open_store`; `manifest` says what it holds, `files` are its parts."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.files = [TensorFile(path / record.name, record) for record in manifest.files]
        records = manifest.names, manifest.graph_file
        self._names, self._of_graph = (
            None if record is None else TensorFile(path / record.name, record) for record in records
        )

    @property
    def num_parts(self) -> int:
        return self.manifest.num_parts

    def __repr__(self) -> str:
        nodes, edges = (sum(counts.values()) for counts in (self.manifest.num_nodes, self.manifest.num_edges))
        return f"Store({str(self.path)!r}, {self.num_parts} parts, {nodes} nodes, {edges} edges)"

    def part_edges(self, edge_type: EdgeType, part: int, mapped: bool = False) -> PartEdges:
        """A part's edges of one type, verified in the mapped file if `PartEdges.from_part` will be asked for them."""
        return check_edges(self.manifest, edge_type, part, self.files[part], mapped)

    def edge_id_blocks(self, edge_type: EdgeType, part: int) -> Iterator[Tensor]:
        """The original positions of a part's edges, block by block, int32 or int64. Refused as `part_edges`."""
        file, key = self.files[part], keys.edge_array_key(edge_type, "edge_ids")
        limit, outside = self.manifest.num_edges[edge_type], False
        for block in file.blocks(key):
            outside = outside or not 0 <= int(block.amin()) <= int(block.amax()) < limit
            yield block
        if outside:
            raise StoreError(f"{file.path}: {key} are not in [0, {limit}); the store is not as partition writes it")

    def edge_ids(self, edge_type: EdgeType, part: int) -> Tensor:
        """Original positions of a part's edges, int32 or int64 [num_edges]. Refused as `part_edges`."""
        for _ in self.edge_id_blocks(edge_type, part):
            pass
        return self.files[part].tensor(keys.edge_array_key(edge_type, "edge_ids"))

    def node_ids(self, node_type: NodeType, part: int) -> Tensor:
        """Original ids of a part's nodes, ascending, int64 [num_own]. Verified, and refused as `part_edges`."""
        file, key = self.files[part], keys.node_ids_key(node_type)
        ids = file.verified(key)
        check_nodes(ids, self.manifest.num_nodes[node_type], f"{file.path}: {key}")
        return ids

    def names(self, node_type: NodeType) -> Names | None:
        """The names of all nodes of a type, by original id, verified. `None` if they have none."""
        file, key = self._names, keys.names_key(node_type)
        integers, strings = [key], [f"{key}/text", f"{key}/ends"]
        held = [] if file is None else [name for name in integers + strings if name in file.record.tensors]
        if file is None or not held:
            return None
        if held not in (integers, strings):
            raise StoreError(f"{file.path} holds {', '.join(held)}; expected {key}, or {' and '.join(strings)}")
        names = Names(*map(file.verified, held))
        names.check(self.manifest.num_nodes[node_type], f"{file.path}: {key}")
        return names

    def graph_tensors(self) -> dict[str, Tensor]:
        """The arrays that belong to the graph as a whole, by name, verified. Refused as `part_edges`."""
        return self._under(keys.GRAPH_FIELDS)

    def links(self, edge_type: EdgeType) -> dict[str, Tensor]:
        """The links to score of a type, all of them, verified: see `RawGraph.links`. Refused as `part_edges`."""
        found = self._under(keys.links_of(edge_type))
        counts = [self.manifest.num_nodes[end] for end in edge_type[::2]]
        for name, values in found.items():
            pairs = values if name.endswith("_index") else found.get(f"{name}_index")
            if pairs is None or not are_pairs(pairs, counts) or values.shape[:1] not in ((2,), pairs.shape[1:]):
                raise StoreError(
                    f"{self.path}: {name!r} of {edge_type} does not fit pairs of nodes; write the store again"
                )
        return found

    def _under(self, prefix: str) -> dict[str, Tensor]:
        file = self._of_graph
        found = [] if file is None else [key for key in file.record.tensors if key.startswith(prefix)]
        return {} if file is None else {keys.name_of(key): file.verified(key) for key in found}

    def node_fields(self, node_type: NodeType, parts: range) -> Fields:
        """The node fields of a run of parts, one part after the other."""
        info = self.manifest.node_fields[node_type]
        return Fields(info, {name: keys.node_field_key(node_type, name) for name in info}, self.files_of(parts))

    def edge_fields(
        self, edge_type: EdgeType, parts: range, join: Callable[[Sequence[Tensor]], Tensor] | None = None
    ) -> Fields:
        """The edge fields of a run of parts, put together by `join`, or else one part after the other."""
        info = self.manifest.edge_fields[edge_type]
        return Fields(info, {name: keys.edge_field_key(edge_type, name) for name in info}, self.files_of(parts), join)

    def files_of(self, parts: range) -> list[TensorFile]:
        """The files of a run of parts."""
        return self.files[parts.start : parts.stop]


def open_store(path: str | os.PathLike[str]) -> Store:
    """The store in a directory. The manifest and the size and header of every part file have been verified.

    Raises:
        StoreError: when the directory is missing or is not a store, a file is missing, torn or altered, or a newer
            shardpass wrote it.
    """
    directory = require_path(path, "the folder of a store")
    manifest = read_manifest(directory)
    problem = contradiction(manifest)
    if problem:
        raise StoreError(f"{directory / MANIFEST_NAME} contradicts itself: {problem}")
    return Store(directory, manifest)
