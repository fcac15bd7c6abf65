"""What a graph is built of: `PartitionData`, checked and separated by type, or with all types made one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dgl
import torch
from torch import Tensor

from shardpass.frontends.dgl.convert import DGL_EDGE, DGL_NODE
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData, Ranges

Schema = dict[str, dict[str, Any]]


@dataclass
class EdgeList:
    """The edges of one type into this rank's nodes: their ids, and tensors with a row for each, by name.

    parts: the part of each source, int64 [num_edges].
    src, dst: the nodes at both ends, in the numbering of `PartitionData.node_ranges`.
    """

    parts: Tensor
    src: Tensor
    dst: Tensor
    ids: Tensor
    fields: dict[str, Tensor]


@dataclass
class OwnPart:
    """The part of a rank by type. `ranges` are the first id, and the end, of the nodes of each type in each part."""

    rank: int
    device: torch.device
    ranges: dict[str, Ranges]
    node_fields: dict[str, dict[str, Tensor]]
    edges: dict[CanonicalType, EdgeList]

    @property
    def counts(self) -> dict[str, int]:
        """How many own nodes there are of each type."""
        return {kind: ends[self.rank][1] - ends[self.rank][0] for kind, ends in self.ranges.items()}


def own_part(data: PartitionData, rank: int, size: int) -> OwnPart:
    """The part of `rank`, of `size` ranks.

    Raises:
        ValueError: the partition does not fit the ranks, or the data contradict each other.
    """
    _check_ranks(data, rank, size)
    ranges = _ranges_by_type(data)
    only = next(iter(ranges))
    kinds: list[CanonicalType] = [(src, kind, dst) for src, kind, dst in data.edge_type_names]
    kinds = kinds or [(only, DGL_EDGE[1], only)]
    part = OwnPart(rank, data.all_shard_edges[0].edges[0].device, ranges, {}, {})
    part.edges = {kind: _edge_list(data, kinds, kind, ranges, rank) for kind in kinds}
    part.node_fields = _node_fields(data.node_features, part.counts)
    return part


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


def _ranges_by_type(data: PartitionData) -> dict[str, Ranges]:
    """(First id, end) of the nodes of each type in each part."""
    names = list(data.node_type_names) or ["_N"]
    if len(names) == 1:
        return {names[0]: [(start, end) for start, end in data.node_ranges]}
    if data.partition_book is None:
        raise ValueError(f"there are the node types {names}, but no partition_book, which says how many nodes each has")
    ranges: dict[str, Ranges] = {kind: [] for kind in names}
    for part, (position, _) in enumerate(data.node_ranges):
        for kind in names:
            end = position + data.partition_book.partid2nids(part, kind).numel()
            ranges[kind].append((position, end))
            position = end
    return ranges


def _edge_list(
    data: PartitionData, kinds: Sequence[CanonicalType], kind: CanonicalType, ranges: Mapping[str, Ranges], rank: int
) -> EdgeList:
    found: dict[str, list[Tensor]] = {"parts": [], "src": [], "dst": [], "ids": []}
    fields: dict[str, list[Tensor]] = {}
    label, position = ":".join(kind), 0
    for part, (edges, features) in enumerate(data.all_shard_edges):
        chosen = _of_type(features, edges[0], kinds.index(kind), len(kinds))
        src = _within(edges[0][chosen], ranges[kind[0]][part])
        dst = _within(edges[1][chosen], ranges[kind[2]][rank])
        default = torch.arange(position, position + chosen.numel(), device=chosen.device)
        ids = features[dgl.EID][chosen] if dgl.EID in features else default
        for pieces, rows in zip(found.values(), (torch.full_like(src, part), src, dst, ids)):
            pieces.append(rows)
        for name, rows in _fields_of(features, label, len(kinds) == 1).items():
            if rows.size(0) != chosen.numel():
                raise ValueError(
                    f"feature {name!r} of edges {label} from part {part} has {rows.size(0)} rows for "
                    f"{chosen.numel()} edges"
                )
            fields.setdefault(name, []).append(rows)
        position += chosen.numel()
    for name, pieces in fields.items():
        if len(pieces) != len(data.node_ranges):
            raise ValueError(f"feature {name!r} of edges {label} is missing in some of the shards")
    joined = {name: torch.cat(pieces) for name, pieces in found.items()}
    return EdgeList(**joined, fields={name: torch.cat(pieces) for name, pieces in fields.items()})


def _of_type(features: Mapping[str, Tensor], like: Tensor, number: int, num_types: int) -> Tensor:
    """Positions of the edges of a type."""
    if num_types == 1:
        return torch.arange(like.numel(), device=like.device)
    if dgl.ETYPE not in features:
        raise ValueError(f"edge_features lacks {dgl.ETYPE!r}, the type of each edge, but there are {num_types} types")
    return (features[dgl.ETYPE] == number).nonzero().view(-1)


def _within(ids: Tensor, ends: tuple[int, int]) -> Tensor:
    start, end = ends
    wrong = ids[(ids < start) | (ids >= end)]
    if wrong.numel():
        raise ValueError(
            f"an edge ends at node {int(wrong[0])}, which is outside [{start}, {end}). Edges of a shard lead from one "
            f"part to this rank's own, with ids as in node_ranges"
        )
    return ids.to(torch.int64)


def _fields_of(features: Mapping[str, Tensor], label: str, only_type: bool) -> dict[str, Tensor]:
    found = {name: rows for name, rows in features.items() if only_type and "/" not in name}
    found |= {name[len(label) + 1 :]: rows for name, rows in features.items() if name.startswith(f"{label}/")}
    return {name: rows for name, rows in found.items() if name not in (dgl.EID, dgl.ETYPE)}


def _node_fields(features: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in counts}
    for key, rows in features.items():
        if key in (dgl.NID, dgl.NTYPE):
            continue
        kinds = [kind for kind in counts if key.startswith(f"{kind}/")]
        if not kinds and len(counts) > 1:
            continue  # a feature that the user added, with rows of several types
        kind = max(kinds, key=len, default=next(iter(counts)))
        if rows.size(0) != counts[kind]:
            raise ValueError(f"node feature {key!r} has {rows.size(0)} rows; this rank has {counts[kind]} such nodes")
        found[kind][key[len(kind) + 1 :] if kinds else key] = rows
    return found


# ---- what all ranks agree on


def schemas(part: OwnPart) -> Schema:
    """How many nodes and edges of each type there are, and the dtypes and shapes of their fields, as JSON values."""
    rows: dict[str, tuple[int, Mapping[str, Tensor]]] = {
        f"nodes of type {kind!r}": (count, part.node_fields[kind]) for kind, count in part.counts.items()
    }
    rows |= {f"edges {':'.join(kind)}": (listed.ids.numel(), listed.fields) for kind, listed in part.edges.items()}
    return {
        what: {"count": count, "fields": {name: _words_of(tensor) for name, tensor in sorted(fields.items())}}
        for what, (count, fields) in rows.items()
    }


def _words_of(tensor: Tensor) -> list[Any]:
    """The dtype of a tensor and the shape of a row."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape[1:]]


def take_over(part: OwnPart, every: Sequence[Schema]) -> None:
    """Give a rank without nodes or edges of a type the fields that the other ranks have, without rows.

    Raises:
        ValueError: ranks differ in what is stored (on every rank).
    """
    frames = [*part.node_fields.values(), *(listed.fields for listed in part.edges.values())]
    for frame, what in zip(frames, every[part.rank]):
        known: dict[str, tuple[int, list[Any]]] = {}
        filled = [(rank, schema[what]["fields"]) for rank, schema in enumerate(every) if schema[what]["count"]]
        for rank, fields in filled:
            for name, words in fields.items():
                first, expected = known.setdefault(name, (rank, words))
                if expected != words:
                    raise ValueError(f"{name!r} of {what} is {expected} on rank {first}, but {words} on rank {rank}")
        for rank, fields in filled:
            for name in known:
                if name not in fields:
                    raise ValueError(f"rank {rank} has no {name!r} of {what}, which rank {known[name][0]} has")
        if not every[part.rank][what]["count"]:
            for name, (_, (dtype, *tail)) in known.items():
                frame[name] = torch.zeros((0, *tail), dtype=getattr(torch, dtype), device=part.device)


# ---- several types as one


def merge_types(part: OwnPart, node_ranges: Ranges, every: Sequence[Schema]) -> OwnPart:
    """The part with all types made one, as ``dgl.to_homogeneous`` does it. Nodes are in the order of `node_ranges`.

    Features that all types have with one dtype and shape are kept. Ids count on from one type to the next. `every` are
    the `schemas` of all ranks.
    """
    nodes = _alike(part.node_fields.values())
    nodes[dgl.NTYPE] = torch.repeat_interleave(torch.arange(len(part.counts)), torch.tensor([*part.counts.values()]))
    if "orig_id" in nodes:
        totals = torch.tensor([sum(end - start for start, end in ends) for ends in part.ranges.values()])
        nodes["orig_id"] = nodes["orig_id"] + (totals.cumsum(0) - totals)[nodes[dgl.NTYPE]]
    ids, kinds, first_id = [], [], 0
    for number, (kind, listed) in enumerate(part.edges.items()):
        ids.append(listed.fields.pop("orig_id", listed.ids).to(torch.int64) + first_id)
        kinds.append(torch.full_like(listed.ids, number))
        first_id += sum(schema[f"edges {':'.join(kind)}"]["count"] for schema in every)
    lists = list(part.edges.values())
    fields = {**_alike([listed.fields for listed in lists]), dgl.ETYPE: torch.cat(kinds)}
    parts, src, dst = (torch.cat([getattr(listed, name) for listed in lists]) for name in ("parts", "src", "dst"))
    edges = EdgeList(parts, src, dst, torch.cat(ids), fields)
    return OwnPart(part.rank, part.device, {DGL_NODE: node_ranges}, {DGL_NODE: nodes}, {DGL_EDGE: edges})


def _alike(frames: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The fields that all frames have with one dtype and shape, one frame after the other."""
    first, *others = frames
    alike = [
        name for name, rows in first.items()
        if all(name in frame and _words_of(frame[name]) == _words_of(rows) for frame in others)
    ]  # fmt: skip
    return {name: torch.cat([frame[name] for frame in (first, *others)]) for name in alike}
