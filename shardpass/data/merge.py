"""Which parts a rank owns, and the contents of these parts merged into one range of nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.data.fields import Fields, joined
from shardpass.data.raw import EdgeType, NodeType
from shardpass.data.store import Store


@dataclass(frozen=True)
class RankEdges:
    """The edges of one type into a rank's own nodes, part by part, in the order that they have in each part.

    src: new global ids. dst: rows of the rank, in `[0, num_own)` of the destination type. edge_ids: original positions.
    All are int64 [num_edges]. The edge fields have the same order.
    """

    src: Tensor
    dst: Tensor
    edge_ids: Tensor


@dataclass(frozen=True)
class RankData:
    """What the rank that owns a run of parts needs. Structure is verified, fields when you first ask for them.

    parts: the parts of the store that the rank owns.
    node_ids: for each node type, the original id of each own row, int64 [num_own].
    node_fields, edge_fields: for each type, tensors by name, with one row per own node or edge.
    edges: the edges of each edge type.
    """

    parts: range
    node_ids: dict[NodeType, Tensor]
    node_fields: dict[NodeType, Fields]
    edges: dict[EdgeType, RankEdges]
    edge_fields: dict[EdgeType, Fields]


def parts_of_rank(num_parts: int, ranks: int, rank: int) -> range:
    """The run of parts that a rank owns. The numbers of parts of two ranks differ by at most one.

    Raises:
        ValueError: when there are more ranks than parts, or the rank is out of range.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected a rank in [0, {ranks}) of at least one")
    if ranks > num_parts:
        raise ValueError(
            f"{ranks} ranks, but the store has {num_parts} parts and every rank needs one: "
            f"run at most {num_parts} ranks, or partition the graph again into {ranks} parts or more"
        )
    size, larger = divmod(num_parts, ranks)
    first = rank * size + min(rank, larger)
    return range(first, first + size + (rank < larger))


def merge_parts(store: Store, parts: range) -> RankData:
    """The contents of a run of parts, merged into one range of nodes.

    Raises:
        StoreError: when their structure is altered, or is not what the manifest says of it.
        ValueError: when `parts` is empty or not a run of parts of the store.
    """
    if not len(parts) or parts.step != 1 or parts[0] < 0 or parts[-1] >= store.num_parts:
        raise ValueError(f"{parts} is not a run of parts in [0, {store.num_parts}) of {store.path}")
    manifest = store.manifest
    return RankData(
        parts=parts,
        node_ids={kind: joined([store.node_ids(kind, part) for part in parts]) for kind in manifest.node_types},
        node_fields={kind: store.node_fields(kind, parts) for kind in manifest.node_types},
        edges={kind: _merged_edges(store, kind, parts) for kind in manifest.edge_types},
        edge_fields={kind: store.edge_fields(kind, parts) for kind in manifest.edge_types},
    )


def _merged_edges(store: Store, edge_type: EdgeType, parts: range) -> RankEdges:
    offsets = store.manifest.offsets[edge_type[2]]
    # filled part by part, so that there is never more than one 64-bit copy
    num_edges = sum(store.manifest.part_edges[edge_type][part] for part in parts)
    src, dst, edge_ids = (torch.empty(num_edges, dtype=torch.int64) for _ in range(3))
    start = 0
    for part in parts:
        edges = store.part_edges(edge_type, part)
        rows = slice(start, start + edges.src.numel())
        src[rows], dst[rows], edge_ids[rows] = edges.src, edges.dst, edges.edge_ids
        dst[rows] += offsets[part] - offsets[parts[0]]
        start = rows.stop
    return RankEdges(src, dst, edge_ids)
