"""A graph of several types as one of a single type, as ``dgl.to_homogeneous`` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dgl
import torch
from torch import Tensor

from shardpass.frontends.dgl.convert import DGL_EDGE, DGL_NODE
from shardpass.frontends.sar.own_part import EdgeList, OwnPart, Schema, words_of


def merged(part: OwnPart, every: Sequence[Schema]) -> OwnPart:
    """The part with all types made one. Nodes are in the order of `PartitionData.node_ranges`.

    Features that all types have with one dtype and shape are kept.

    Args:
        part: of this rank.
        every: the `schemas` of all ranks.
    """
    parts = [(min(a for a, _ in ends), max(b for _, b in ends)) for ends in zip(*part.ranges.values())]
    rank_counts = list(part.counts.values())
    nodes = _alike(list(part.node_fields.values()))
    nodes[dgl.NTYPE] = torch.repeat_interleave(torch.arange(len(rank_counts)), torch.tensor(rank_counts))
    lists, kinds, first_id = [], [], 0
    for number, ((source, name, target), listed) in enumerate(part.edges.items()):
        starts = torch.tensor([own[0] - whole[0] for own, whole in zip(part.ranges[source], parts)])
        before = list(part.counts).index(target)
        ids = listed.fields.get("orig_id", listed.ids).to(torch.int64) + first_id
        src_rows = listed.src_rows + starts.to(listed.parts.device)[listed.parts]
        dst_rows = listed.dst_rows + sum(rank_counts[:before])
        fields = {key: rows for key, rows in listed.fields.items() if key != "orig_id"}
        lists.append(EdgeList(listed.parts, src_rows, dst_rows, ids, fields))
        kinds.append(torch.full_like(ids, number))
        first_id += sum(schema[f"edges {source}:{name}:{target}"]["count"] for schema in every)
    joined = {
        name: torch.cat([getattr(one, name) for one in lists]) for name in ("parts", "src_rows", "dst_rows", "ids")
    }
    fields = {**_alike([one.fields for one in lists]), dgl.ETYPE: torch.cat(kinds)}
    nodes = _with_offsets(nodes, part)
    count = sum(rank_counts)
    return OwnPart(
        part.device,
        {DGL_NODE: parts},
        {DGL_NODE: count},
        {DGL_NODE: nodes},
        {DGL_EDGE: EdgeList(**joined, fields=fields)},
    )


def _with_offsets(nodes: dict[str, Tensor], part: OwnPart) -> dict[str, Tensor]:
    """Original ids count on from one type to the next, as those of ``dgl.to_homogeneous`` do."""
    if "orig_id" in nodes:
        totals = [sum(end - start for start, end in ends) for ends in part.ranges.values()]
        offsets = torch.tensor([sum(totals[:number]) for number in range(len(totals))])
        nodes["orig_id"] = nodes["orig_id"] + offsets[nodes[dgl.NTYPE]]
    return nodes


def _alike(frames: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The fields that all frames have with one dtype and shape, one frame after the other."""
    names = [name for name in frames[0] if all(name in frame for frame in frames)]
    alike = [name for name in names if all(words_of(frame[name]) == words_of(frames[0][name]) for frame in frames)]
    return {name: torch.cat([frame[name] for frame in frames]) for name in alike}
