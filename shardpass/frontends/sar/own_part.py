"""What a graph is built of: `PartitionData`, checked and separated by type, or with all types made one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dgl
import torch
from torch import Tensor

from shardpass.frontends.dgl.convert import DGL_EDGE, DGL_NODE
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData, Ranges, ShardEdgesAndFeatures

Schema = dict[str, tuple[int, dict[str, list[Any]]]]


class OwnPart(NamedTuple):
    """The part of a rank by type, with the ids of `PartitionData.node_ranges`.

    ranges: (first id, end) of the nodes of each type in each part.
    nodes: tensors with a row for each node, by name.
    edges: all edges into this rank's nodes. Their ids are the feature ``_ID`` (``dgl.EID``).
    """

    rank: int
    ranges: dict[str, Ranges]
    nodes: dict[str, dict[str, Tensor]]
    edges: dict[CanonicalType, ShardEdgesAndFeatures]

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
    part = OwnPart(rank, ranges, _by_type(data.node_features, list(ranges)), {})
    part.edges.update(_edges(data, kinds or [(only, DGL_EDGE[1], only)], ranges, rank))
    for kind, fields in part.nodes.items():
        for name, rows in fields.items():
            if rows.size(0) != part.counts[kind]:
                raise ValueError(
                    f"node feature {name!r} has {rows.size(0)} rows; this rank has {part.counts[kind]} such nodes"
                )
    return part


def numbers_within(ranges: Ranges, ids: Tensor) -> Tensor:
    """The numbers of those `ids` that are nodes of a type, among all nodes of the type or those of some parts.

    Args:
        ranges: (first id, end) of the nodes of the type in these parts.
    """
    starts, ends = torch.tensor(ranges, device=ids.device).T.contiguous()
    part = torch.searchsorted(ends, ids, right=True).clamp(max=len(ranges) - 1)
    shifts = (ends - starts).cumsum(0) - ends
    return (ids + shifts[part])[(ids >= starts[part]) & (ids < ends[part])]


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
    names = list(data.node_type_names) or [DGL_NODE]
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


def _by_type(features: Mapping[str, Tensor], labels: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """The stored features of each type by plain name. A name without a type belongs to the only type, if there is one.

    What has rows of several types is left out: ids, types, and what the user has added.
    """
    found: dict[str, dict[str, Tensor]] = {label: {} for label in labels}
    for key, rows in features.items():
        owners = [label for label in labels if key.startswith(f"{label}/")] or list(labels)[: len(labels) == 1]
        if owners and key not in (dgl.NID, dgl.NTYPE):  # which are dgl.EID and dgl.ETYPE too
            label = max(owners, key=len)
            found[label][key.removeprefix(f"{label}/")] = rows
    return found


def _edges(
    data: PartitionData, kinds: Sequence[CanonicalType], ranges: Mapping[str, Ranges], rank: int
) -> dict[CanonicalType, ShardEdgesAndFeatures]:
    pieces: dict[CanonicalType, list[ShardEdgesAndFeatures]] = {kind: [] for kind in kinds}
    for part, ((src, dst), features) in enumerate(data.all_shard_edges):
        stored = _by_type(features, [":".join(kind) for kind in kinds])
        if len(kinds) > 1 and dgl.ETYPE not in features:
            raise ValueError(f"edge_features lacks {dgl.ETYPE!r}, the type of each edge; there are {len(kinds)} types")
        types = features[dgl.ETYPE] if len(kinds) > 1 else torch.zeros_like(src)
        for number, kind in enumerate(kinds):
            chosen = (types == number).nonzero().view(-1)
            ends = _within(src[chosen], ranges[kind[0]][part]), _within(dst[chosen], ranges[kind[2]][rank])
            position = sum(piece.edges[0].numel() for piece in pieces[kind])
            ids = features[dgl.EID][chosen] if dgl.EID in features else torch.arange(len(chosen)) + position
            fields = {**stored[":".join(kind)], dgl.EID: ids.to(src.device, torch.int64)}
            pieces[kind].append(ShardEdgesAndFeatures(ends, fields))
    return {kind: _joined(":".join(kind), found) for kind, found in pieces.items()}


def _within(ids: Tensor, ends: tuple[int, int]) -> Tensor:
    start, end = ends
    wrong = ids[(ids < start) | (ids >= end)]
    if wrong.numel():
        raise ValueError(
            f"an edge ends at node {int(wrong[0])}, which is outside [{start}, {end}). Edges of a shard lead from one "
            f"part to this rank's own, with ids as in node_ranges"
        )
    return ids.to(torch.int64)


def _joined(label: str, pieces: Sequence[ShardEdgesAndFeatures]) -> ShardEdgesAndFeatures:
    """The edges of a type from all parts, one part after the other."""
    for part, ((src, _), fields) in enumerate(pieces):
        for name, rows in fields.items():
            if rows.size(0) != src.numel():
                raise ValueError(
                    f"feature {name!r} of edges {label} from part {part} has {rows.size(0)} rows for "
                    f"{src.numel()} edges"
                )
        for name in fields.keys() ^ pieces[0].edge_features.keys():
            raise ValueError(f"feature {name!r} of edges {label} is missing in some of the shards")
    src, dst = (torch.cat([piece.edges[end] for piece in pieces]) for end in (0, 1))
    fields = {name: torch.cat([piece.edge_features[name] for piece in pieces]) for name in pieces[0].edge_features}
    return ShardEdgesAndFeatures((src, dst), fields)


# ---- what all ranks agree on


def _frames(part: OwnPart) -> dict[str, tuple[int, dict[str, Tensor]]]:
    """The number of nodes and edges of each type, and their tensors by name."""
    nodes = {f"nodes of type {kind!r}": (count, part.nodes[kind]) for kind, count in part.counts.items()}
    return nodes | {edges_of(kind): (listed[0][0].numel(), listed[1]) for kind, listed in part.edges.items()}


def edges_of(kind: CanonicalType) -> str:
    """What a `Schema` calls the edges of a type."""
    return f"edges {':'.join(kind)}"


def schema_of(part: OwnPart) -> Schema:
    """How many nodes and edges of each type there are, and the dtypes and shapes of their fields, in plain words."""
    return {
        what: (count, {name: _words_of(rows) for name, rows in sorted(fields.items())})
        for what, (count, fields) in _frames(part).items()
    }


def _words_of(tensor: Tensor) -> list[Any]:
    """The dtype of a tensor and the shape of a row."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape[1:]]


def take_over(part: OwnPart, every: Sequence[Schema], device: torch.device) -> None:
    """Give a rank without nodes or edges of a type the fields that the other ranks have, without rows.

    Raises:
        ValueError: ranks differ in what is stored (on every rank).
    """
    for what, (count, frame) in _frames(part).items():
        filled = {rank: schema[what][1] for rank, schema in enumerate(every) if schema[what][0]}
        known = {name: rank for rank in reversed(filled) for name in filled[rank]}
        for name, first in known.items():
            expected = filled[first][name]
            for rank, fields in filled.items():
                if name not in fields:
                    raise ValueError(f"rank {rank} has no {name!r} of {what}, which rank {first} has")
                if fields[name] != expected:
                    raise ValueError(
                        f"{name!r} of {what} is {expected} on rank {first}, but {fields[name]} on rank {rank}"
                    )
            if not count:
                frame[name] = torch.zeros((0, *expected[1:]), dtype=getattr(torch, expected[0]), device=device)


# ---- several types as one


def merge_types(part: OwnPart, node_ranges: Ranges, every: Sequence[Schema]) -> OwnPart:
    """The part with all types made one, as ``dgl.to_homogeneous`` does it. Nodes are in the order of `node_ranges`.

    Features that all types have with one dtype and shape are kept. Ids count on from one type to the next. `every` are
    the schemas of all ranks.
    """
    nodes = _alike(part.nodes.values())
    nodes[dgl.NTYPE] = torch.repeat_interleave(torch.arange(len(part.counts)), torch.tensor([*part.counts.values()]))
    if "orig_id" in nodes:
        totals = torch.tensor([sum(end - start for start, end in ends) for ends in part.ranges.values()])
        nodes["orig_id"] = nodes["orig_id"] + (totals.cumsum(0) - totals)[nodes[dgl.NTYPE]]
    kinds, first_id = [], 0
    for number, (kind, (_, fields)) in enumerate(part.edges.items()):
        fields[dgl.EID] = fields.pop("orig_id", fields[dgl.EID]).to(torch.int64) + first_id
        kinds.append(torch.full_like(fields[dgl.EID], number))
        first_id += sum(schema[edges_of(kind)][0] for schema in every)
    ends, frames = zip(*part.edges.values())
    src, dst = (torch.cat(end) for end in zip(*ends))
    edges = ShardEdgesAndFeatures((src, dst), {**_alike(frames), dgl.ETYPE: torch.cat(kinds)})
    return OwnPart(part.rank, {DGL_NODE: node_ranges}, {DGL_NODE: nodes}, {DGL_EDGE: edges})


def _alike(frames: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The fields that all frames have with one dtype and shape, one frame after the other."""
    first, *others = frames
    alike = [
        name for name, rows in first.items()
        if all(name in frame and _words_of(frame[name]) == _words_of(rows) for frame in others)
    ]  # fmt: skip
    return {name: torch.cat([frame[name] for frame in (first, *others)]) for name in alike}
