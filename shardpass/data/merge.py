"""Which parts a rank owns, and their contents merged into one range of nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.data import keys
from shardpass.data.fields import Fields, read_joined
from shardpass.data.raw import EdgeType, NodeType
from shardpass.data.store import Store


@dataclass(frozen=True)
class RankEdges:
    """A rank's edges of one type (their destinations are its own), part by part, as the parts are sorted.

    src: new global ids, int64. dst: rows of the rank, int64, in `[0, num_own)` of the destination type.
    edge_ids: original positions, int64. All [num_edges]; the edge fields have this order too.
    """

    src: Tensor
    dst: Tensor
    edge_ids: Tensor


@dataclass(frozen=True)
class RankData:
    """What the rank that owns a run of parts needs. Structure is verified; fields when they are first asked for.

    parts: the parts of the store that the rank owns.
    first_ids: per node type, the new global id of the rank's row 0; its own ids are `[first, first + num_own)`.
    node_ids: per node type, the original id of each own row, int64 [num_own].
    node_fields, edge_fields: per type, tensors by name, in row order and in edge order.
    edges: per edge type.
    """

    parts: range
    first_ids: dict[NodeType, int]
    node_ids: dict[NodeType, Tensor]
    node_fields: dict[NodeType, Fields]
    edges: dict[EdgeType, RankEdges]
    edge_fields: dict[EdgeType, Fields]


def parts_of_rank(num_parts: int, ranks: int, rank: int) -> range:
    """The parts that a rank owns: contiguous, as many on each rank as possible (they differ by at most one).

    Raises:
        ValueError: when there are more ranks than parts, or no such rank.
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
        StoreError: when their structure is altered.
        ValueError: when `parts` is not a non-empty run of parts of the store.
    """
    if not len(parts) or parts.step != 1 or parts[0] < 0 or parts[-1] >= store.num_parts:
        raise ValueError(f"{parts} is not a run of parts in [0, {store.num_parts}) of {store.path}")
    manifest = store.manifest
    files = [store.files[part] for part in parts]
    return RankData(
        parts=parts,
        first_ids={kind: manifest.offsets[kind][parts[0]] for kind in manifest.node_types},
        node_ids={kind: read_joined(files, keys.node_ids_key(kind)) for kind in manifest.node_types},
        node_fields={kind: store.node_fields(kind, parts) for kind in manifest.node_types},
        edges={kind: _merged_edges(store, kind, parts) for kind in manifest.edge_types},
        edge_fields={kind: store.edge_fields(kind, parts) for kind in manifest.edge_types},
    )


def _merged_edges(store: Store, edge_type: EdgeType, parts: range) -> RankEdges:
    offsets = store.manifest.offsets[edge_type[2]]
    # filled part by part: the 64-bit copies are made once, at their final place
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
