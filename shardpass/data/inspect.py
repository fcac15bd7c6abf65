"""What a partition costs, for each part, rank or layer: sizes, halo rows, cut edges. And the check of every byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardpass.core.ranks import require_count
from shardpass.data import keys
from shardpass.data.layout import partition_fingerprint
from shardpass.data.manifest import Manifest
from shardpass.data.merge import merge_parts, parts_of_rank
from shardpass.data.raw import EDGE, NODE, EdgeType, NodeType
from shardpass.data.store import Store, open_store
from shardpass.data.tally import check_tallies, tally
from shardpass.errors import StoreError

_MOST_RANKS = 99_999  # as many as a store may have parts


@dataclass(frozen=True)
class GroupReport:
    """One part, or the run of parts of one rank.

    nodes: the number of own nodes of each node type. edges: the number of edges into them, of each edge type.
    halo_rows: the number of distinct sources that others own, for each edge type.
    cut_edges: the number of edges from such sources, of each edge type.
    feature_bytes: the bytes of all node and edge fields. structure_bytes: the bytes of ids and edges, as stored.
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
    """A store seen as `groups`: one for each rank, or one for each part if `ranks` is `None`."""

    path: Path
    manifest: Manifest
    ranks: int | None
    groups: list[GroupReport]

    @property
    def num_cut_edges(self) -> int:
        """The number of edges whose ends are in different groups."""
        return sum(group.num_cut_edges for group in self.groups)

    @property
    def num_halo_rows(self) -> int:
        """The number of rows that all groups together fetch in one layer."""
        return sum(group.num_halo_rows for group in self.groups)

    def balance(self, quantity: str) -> float:
        """The largest group over the mean. 1.0 is perfect, and also what you get where there is nothing.

        Args:
            quantity: "num_nodes", "num_edges", "num_halo_rows", "num_cut_edges" or "num_bytes".
        """
        values = [getattr(group, quantity) for group in self.groups]
        return max(values) * len(values) / sum(values) if sum(values) else 1.0


@dataclass(frozen=True)
class LayerReport:
    """One layer: how many `nodes` it computes, `edges` into them, and `halo_rows` that all groups together fetch."""

    nodes: int
    edges: int
    halo_rows: int


def inspect(path: str | os.PathLike[str], ranks: int | None = None) -> Report:
    """Sizes, halo rows, cut edges and bytes of the store at `path`. All edges are read and verified, but no features.

    Args:
        ranks: report what each of this many ranks would have. `None` reports each part.

    Raises:
        StoreError: when the store cannot be opened or its structure is altered.
        ValueError: when there are more ranks than parts.
    """
    store = open_store(path)
    groups = [_group(store, parts) for parts in groups_of(store, ranks)]
    return Report(store.path, store.manifest, ranks, groups)


def groups_of(store: Store, ranks: int | None) -> list[range]:
    """The parts of each rank; each part alone for `None`."""
    count = store.num_parts if ranks is None else require_count(ranks, "ranks", "inspect(path, ranks)", 1, _MOST_RANKS)
    return [parts_of_rank(store.num_parts, count, rank) for rank in range(count)]


def inspect_layers(
    path: str | os.PathLike[str], mask: str, num_layers: int, ranks: int | None = None
) -> list[LayerReport]:
    """What each layer needs for the nodes of a stored mask, such as ``"train_mask"``. The first layer comes first.

    Args:
        path: a store of one node and one edge type.
        ranks: count the halo rows between this many ranks. `None` counts them between parts.

    Raises:
        StoreError: when the store cannot be opened or is altered.
        ValueError: when the graph has several types, the store has no such mask, or there are more ranks than parts.
    """
    store = open_store(path)
    if list(store.manifest.num_edges) != [EDGE] or list(store.manifest.num_nodes) != [NODE]:
        raise ValueError(f"{store.path}: layers can be inspected for graphs of one node and one edge type")
    info = store.manifest.node_fields[NODE].get(mask)
    if info is None or info.dtype != torch.bool or info.shape:
        masks = [name for name, i in store.manifest.node_fields[NODE].items() if i.dtype == torch.bool and not i.shape]
        raise ValueError(f"{store.path} has no node mask {mask!r}; there are: {', '.join(masks) or 'none'}")
    wanted = store.node_fields(NODE, range(store.num_parts))[mask].clone()
    groups = groups_of(store, ranks)
    reports: list[LayerReport] = []
    for _ in range(num_layers):
        report, wanted = _layer(store, groups, wanted)
        reports.insert(0, report)
    return reports


def verify(path: str | os.PathLike[str], progress: Callable[[str, int, int], None] | None = None) -> Manifest:
    """The manifest of the store at `path`, after every byte has been checked, and that its parts are one graph.

    Args:
        progress: called as ``progress("verify", done, total)`` with the number of files.

    Raises:
        StoreError: when a file is missing, torn or altered, or contradicts the others. The error names the first one.
    """
    store = open_store(path)
    report = progress or (lambda stage, done, total: None)
    manifest, tallies = store.manifest, []
    part_of = {kind: torch.empty(count, dtype=torch.int32) for kind, count in manifest.num_nodes.items()}
    for part, file in enumerate(store.files):
        report("verify", part, len(store.files))
        for key in filter(keys.is_field, file.record.tensors):  # what follows verifies the structure
            file.verified(key)
        data = merge_parts(store, store.num_parts, part)
        tallies.append(tally(store, data))
        for kind, ids in data.node_ids.items():
            part_of[kind][ids] = part
    report("verify", len(store.files), len(store.files))
    for kind in manifest.node_types:
        store.names(kind)
    store.graph_tensors()
    for edge_type in manifest.edge_types:
        store.links(edge_type)
    check_tallies(store.path, tallies)
    if partition_fingerprint(manifest.graph_fingerprint, store.num_parts, part_of) != manifest.partition_fingerprint:
        raise StoreError(f"{store.path} contradicts itself: its fingerprint is not that of the parts of its nodes")
    return manifest


def _group(store: Store, parts: range) -> GroupReport:
    manifest = store.manifest
    halo_rows, cut_edges = {}, {}
    for kind in manifest.edge_types:
        halo_rows[kind], cut_edges[kind] = _remote(store, kind, parts)
    num_bytes = {False: 0, True: 0}
    for file in store.files_of(parts):
        for key in file.record.tensors:
            num_bytes[keys.is_field(key)] += file.tensor(key).nbytes
    return GroupReport(
        parts=parts,
        nodes={kind: offsets[parts.stop] - offsets[parts.start] for kind, offsets in manifest.offsets.items()},
        edges={kind: sum(counts[part] for part in parts) for kind, counts in manifest.part_edges.items()},
        halo_rows=halo_rows,
        cut_edges=cut_edges,
        feature_bytes=num_bytes[True],
        structure_bytes=num_bytes[False],
    )


def _remote(store: Store, edge_type: EdgeType, parts: range) -> tuple[int, int]:
    """How many distinct sources in other parts these parts have, and how many edges from them."""
    edges = [store.part_edges(edge_type, part) for part in parts]
    others = [source for source in range(store.num_parts) if source not in parts]
    rows = (torch.cat([part.halo_rows(source) for part in edges]).unique().numel() for source in others)
    return sum(rows), sum(part.counts[source] for part in edges for source in others)


def _layer(store: Store, groups: list[range], wanted: Tensor) -> tuple[LayerReport, Tensor]:
    """What a layer needs to compute the nodes `wanted`, and the nodes that it reads or computes."""
    offsets = store.manifest.offsets[NODE]
    read = wanted.clone()
    num_edges = num_halo = 0
    for parts in groups:
        remote = torch.zeros(wanted.numel(), dtype=torch.bool)
        for part in parts:
            needed, edges = wanted[offsets[part] : offsets[part + 1]], store.part_edges(EDGE, part)
            for source, first in enumerate(offsets[:-1]):
                halo, starts, src_rows = edges.from_part(source)
                rows = src_rows[torch.repeat_interleave(needed, starts.diff())]
                num_edges += rows.numel()
                remote[(rows if source == part else halo[rows]) + first] = True
        read |= remote
        remote[offsets[parts.start] : offsets[parts.stop]] = False
        num_halo += int(remote.sum())
    return LayerReport(int(wanted.sum()), num_edges, num_halo), read
