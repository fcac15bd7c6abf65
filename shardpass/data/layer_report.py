"""The nodes, edges and halo rows that each layer needs for some wanted nodes: what `ShardedGraph.layers` would save."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.data.merge import parts_of_rank
from shardpass.data.raw import EDGE, NODE
from shardpass.data.store import Store, open_store


@dataclass(frozen=True)
class LayerReport:
    """One layer: how many `nodes` it computes, `edges` into them, and `halo_rows` that all groups together fetch."""

    nodes: int
    edges: int
    halo_rows: int


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
    count = store.num_parts if ranks is None else ranks
    groups = [parts_of_rank(store.num_parts, count, group) for group in range(count)]
    reports: list[LayerReport] = []
    for _ in range(num_layers):
        report, wanted = _layer(store, groups, wanted)
        reports.insert(0, report)
    return reports


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
