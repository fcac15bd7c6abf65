"""What a partition costs, per part or per rank: sizes, halo rows, cut edges, balance. And the check of every byte."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from shardpass.data.manifest import Manifest
from shardpass.data.merge import parts_of_rank
from shardpass.data.raw import EdgeType, NodeType
from shardpass.data.store import Progress, Store, open_store


@dataclass(frozen=True)
class GroupReport:
    """One part, or the run of parts of one rank.

    nodes: own nodes per node type. edges: edges into them per edge type.
    halo_rows: distinct sources owned by others, per edge type. cut_edges: edges from such sources, per edge type.
    feature_bytes: bytes of all node and edge fields. structure_bytes: bytes of ids and edges, as stored.
    """

    parts: range
    nodes: dict[NodeType, int]
    edges: dict[EdgeType, int]
    halo_rows: dict[EdgeType, int]
    cut_edges: dict[EdgeType, int]
    feature_bytes: int
    structure_bytes: int

    @property
    def num_nodes(self) -> int:
        return sum(self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(self.edges.values())

    @property
    def num_halo_rows(self) -> int:
        return sum(self.halo_rows.values())

    @property
    def num_cut_edges(self) -> int:
        return sum(self.cut_edges.values())

    @property
    def num_bytes(self) -> int:
        return self.feature_bytes + self.structure_bytes


@dataclass(frozen=True)
class Report:
    """A store seen as `groups`: one per part when `ranks` is None, else one per rank."""

    path: Path
    manifest: Manifest
    ranks: int | None
    groups: list[GroupReport]

    @property
    def num_cut_edges(self) -> int:
        """Edges whose ends are in different groups."""
        return sum(group.num_cut_edges for group in self.groups)

    @property
    def num_halo_rows(self) -> int:
        """Rows that all groups together fetch in one layer."""
        return sum(group.num_halo_rows for group in self.groups)

    def balance(self, quantity: str) -> float:
        """The largest group over the mean (1.0 is perfect; 1.0 also where there is nothing).

        Args:
            quantity: "num_nodes", "num_edges", "num_halo_rows", "num_cut_edges" or "num_bytes".
        """
        values = [getattr(group, quantity) for group in self.groups]
        return max(values) * len(values) / sum(values) if sum(values) else 1.0


def inspect(path: str | os.PathLike[str], ranks: int | None = None) -> Report:
    """Sizes, halo rows, cut edges and bytes of a store, per part, or per rank when run on `ranks` ranks.

    Reads (and verifies) all source ids, no features.

    Raises:
        StoreError: when the store cannot be opened or its structure is altered.
        ValueError: when there are more ranks than parts.
    """
    store = open_store(path)
    count = store.num_parts if ranks is None else ranks
    groups = [_group(store, parts_of_rank(store.num_parts, count, group)) for group in range(count)]
    return Report(store.path, store.manifest, ranks, groups)


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Manifest:
    """The manifest of a store of which every byte has been checked.

    Raises:
        StoreError: naming the first file that is missing, torn or altered.
    """
    store = open_store(path)
    store.verify(progress)
    return store.manifest


def _group(store: Store, parts: range) -> GroupReport:
    manifest = store.manifest
    spans = {kind: (offsets[parts.start], offsets[parts.stop]) for kind, offsets in manifest.offsets.items()}
    halo_rows, cut_edges = {}, {}
    for kind in manifest.edge_types:
        halo_rows[kind], cut_edges[kind] = _remote(store, kind, parts, *spans[kind[0]])
    files = [store.files[part] for part in parts]
    features = sum(file.num_bytes(key) for file in files for key in file.record.tensors if _is_field(key))
    total = sum(file.num_bytes(key) for file in files for key in file.record.tensors)
    return GroupReport(
        parts=parts,
        nodes={kind: stop - start for kind, (start, stop) in spans.items()},
        edges={kind: sum(counts[part] for part in parts) for kind, counts in manifest.part_edges.items()},
        halo_rows=halo_rows,
        cut_edges=cut_edges,
        feature_bytes=features,
        structure_bytes=total - features,
    )


def _remote(store: Store, edge_type: EdgeType, parts: range, first: int, stop: int) -> tuple[int, int]:
    """How many distinct sources outside `[first, stop)` the parts have, and how many edges from them."""
    distinct, edges = [torch.empty(0, dtype=torch.int64)], 0
    for part in parts:
        src = store.part_edges(edge_type, part).src
        remote = src[(src < first) | (src >= stop)]
        edges += remote.numel()
        distinct.append(remote.unique().long())
    return torch.cat(distinct).unique().numel(), edges


def _is_field(key: str) -> bool:
    return key.startswith(("node/", "edgefield/"))
