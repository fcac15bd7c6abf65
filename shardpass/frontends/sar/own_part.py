"""What a graph is built of: `PartitionData`, checked and separated by type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dgl
import torch
from torch import Tensor

from shardpass.frontends.dgl.convert import DGL_EDGE
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData, type_ranges

_RESERVED = (dgl.EID, dgl.ETYPE)
Ranges = Sequence[tuple[int, int]]
Schema = dict[str, dict[str, Any]]


@dataclass
class EdgeList:
    """The edges of one type into this rank's nodes.

    Args:
        parts: the part of each source, int64 [num_edges].
        src_rows: the row of each source among the sources of its part.
        dst_rows: the own row of each destination.
        ids: the id of each edge.
        fields: tensors with a row per edge, by name.
    """

    parts: Tensor
    src_rows: Tensor
    dst_rows: Tensor
    ids: Tensor
    fields: dict[str, Tensor]


@dataclass
class OwnPart:
    """A rank's part by type.

    Args:
        device: where the graph is.
        ranges: (first id, end) of the nodes of each type in each part.
        counts: how many own nodes there are of each type.
        node_fields: the node features of each type, by name.
        edges: the edges of each type.
    """

    device: torch.device
    ranges: dict[str, list[tuple[int, int]]]
    counts: dict[str, int]
    node_fields: dict[str, dict[str, Tensor]]
    edges: dict[CanonicalType, EdgeList]


def own_part(data: PartitionData, rank: int, size: int) -> OwnPart:
    """The part of `rank`, of `size` ranks.

    Raises:
        ValueError: the partition does not fit the ranks, or the data contradict each other.
    """
    _check_ranks(data, rank, size)
    ranges = type_ranges(data)
    names = list(ranges)
    kinds: list[CanonicalType] = [(src, kind, dst) for src, kind, dst in data.edge_type_names]
    kinds = kinds or [(names[0], DGL_EDGE[1], names[0])]
    counts = {kind: ends[rank][1] - ends[rank][0] for kind, ends in ranges.items()}
    labels = [":".join(kind) for kind in kinds]
    edges = {
        kind: _edge_list(data, number, labels, ranges[kind[0]], ranges[kind[2]][rank])
        for number, kind in enumerate(kinds)
    }
    fields = _node_fields(data.node_features, names, counts)
    return OwnPart(data.all_shard_edges[0].edges[0].device, ranges, counts, fields, edges)


def _check_ranks(data: PartitionData, rank: int, size: int) -> None:
    parts = len(data.node_ranges)
    if parts != size:
        raise ValueError(
            f"the graph has {parts} parts, but there are {size} ranks: start {parts} ranks, or partition it into {size}"
        )
    part = rank if data.partition_book is None else int(data.partition_book.partid)
    if part != rank:
        raise ValueError(f"rank {rank} holds part {part}; load part {rank} on it")
    if len(data.all_shard_edges) != parts:
        raise ValueError(
            f"rank {rank}: all_shard_edges has {len(data.all_shard_edges)} entries; expected one for each of the "
            f"{parts} parts"
        )


def _edge_list(
    data: PartitionData, number: int, labels: Sequence[str], sources: Ranges, targets: tuple[int, int]
) -> EdgeList:
    found: dict[str, list[Tensor]] = {"parts": [], "src_rows": [], "dst_rows": [], "ids": []}
    fields: dict[str, list[Tensor]] = {}
    position = 0
    for part, (edges, features) in enumerate(data.all_shard_edges):
        chosen = _of_type(features, edges[0], number, len(labels))
        src, dst = (_rows(ids[chosen], *ends) for ids, ends in zip(edges, (sources[part], targets)))
        default = torch.arange(position, position + chosen.numel(), device=chosen.device)
        ids = features[dgl.EID][chosen] if dgl.EID in features else default
        parts = torch.full_like(src, part)
        for name, rows in zip(found, (parts, src, dst, ids)):
            found[name].append(rows)
        for name, rows in _fields_of(features, labels[number], len(labels) == 1).items():
            if rows.size(0) != chosen.numel():
                raise ValueError(
                    f"feature {name!r} of edges {labels[number]} from part {part} has {rows.size(0)} rows for "
                    f"{chosen.numel()} edges"
                )
            fields.setdefault(name, []).append(rows)
        position += chosen.numel()
    lacking = [name for name, pieces in fields.items() if len(pieces) != len(data.node_ranges)]
    if lacking:
        raise ValueError(f"feature {lacking[0]!r} of edges {labels[number]} is missing in some of the shards")
    joined = {name: torch.cat(pieces) for name, pieces in found.items()}
    return EdgeList(**joined, fields={name: torch.cat(pieces) for name, pieces in fields.items()})


def _of_type(features: Mapping[str, Tensor], like: Tensor, number: int, num_types: int) -> Tensor:
    """Positions of the edges of a type."""
    if num_types == 1:
        return torch.arange(like.numel(), device=like.device)
    if dgl.ETYPE not in features:
        raise ValueError(f"edge_features lacks {dgl.ETYPE!r}, the type of each edge, but there are {num_types} types")
    return (features[dgl.ETYPE] == number).nonzero().view(-1)


def _rows(ids: Tensor, start: int, end: int) -> Tensor:
    if ids.numel() and not (int(ids.min()) >= start and int(ids.max()) < end):
        wrong = ids[(ids < start) | (ids >= end)]
        raise ValueError(
            f"an edge ends at node {int(wrong[0])}, which is outside [{start}, {end}). Edges of a shard lead from one "
            f"part to this rank's own, with ids as in node_ranges"
        )
    return ids.to(torch.int64) - start


def _fields_of(features: Mapping[str, Tensor], label: str, only_type: bool) -> dict[str, Tensor]:
    found = {name[len(label) + 1 :]: rows for name, rows in features.items() if name.startswith(f"{label}/")}
    if only_type:
        plain = {name: rows for name, rows in features.items() if name not in _RESERVED and "/" not in name}
        found = {**plain, **found}
    return found


def _node_fields(
    features: Mapping[str, Tensor], names: Sequence[str], counts: Mapping[str, int]
) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in names}
    for key, rows in features.items():
        if key in (dgl.NID, dgl.NTYPE):
            continue
        kinds = [kind for kind in names if key.startswith(f"{kind}/")]
        if not kinds and len(names) > 1:
            continue  # a feature that the user added, with rows of several types
        kind = max(kinds, key=len, default=names[0])
        if rows.size(0) != counts[kind]:
            raise ValueError(f"node feature {key!r} has {rows.size(0)} rows; this rank has {counts[kind]} such nodes")
        found[kind][key[len(kind) + 1 :] if kinds else key] = rows
    return found


def schemas(part: OwnPart) -> Schema:
    """How many nodes and edges of each type there are, and the dtypes and shapes of their fields, as JSON values."""
    rows: dict[str, tuple[int, Mapping[str, Tensor]]] = {
        f"nodes of type {kind!r}": (count, part.node_fields[kind]) for kind, count in part.counts.items()
    }
    rows |= {f"edges {':'.join(kind)}": (listed.ids.numel(), listed.fields) for kind, listed in part.edges.items()}
    return {
        what: {"count": count, "fields": {name: words_of(tensor) for name, tensor in sorted(fields.items())}}
        for what, (count, fields) in rows.items()
    }


def take_over(part: OwnPart, every: Sequence[Schema], rank: int) -> None:
    """Give a rank without nodes or edges of a type the fields that the other ranks have, without rows.

    Raises:
        ValueError: ranks differ in what is stored (on every rank).
    """
    frames: list[dict[str, Tensor]] = [part.node_fields[kind] for kind in part.counts]
    frames += [listed.fields for listed in part.edges.values()]
    for frame, what in zip(frames, every[rank]):
        known: dict[str, tuple[int, list[Any]]] = {}
        for other, schema in enumerate(every):
            for name, words in schema[what]["fields"].items() if schema[what]["count"] else ():
                first, expected = known.setdefault(name, (other, words))
                if expected != words:
                    raise ValueError(f"{name!r} of {what} is {expected} on rank {first}, but {words} on rank {other}")
        for other, schema in enumerate(every):
            lacking = [name for name in known if name not in schema[what]["fields"]]
            if lacking and schema[what]["count"]:
                raise ValueError(f"rank {other} has no {lacking[0]!r} of {what}, which rank {known[lacking[0]][0]} has")
        if not every[rank][what]["count"]:
            for name, (_, (dtype, *tail)) in known.items():
                frame[name] = torch.zeros((0, *tail), dtype=getattr(torch, dtype), device=part.device)


def words_of(tensor: Tensor) -> list[Any]:
    """The dtype of a tensor and the shape of a row."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape[1:]]
