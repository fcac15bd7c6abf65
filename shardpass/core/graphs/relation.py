"""The edges of one type into this rank's nodes, and the fields of its nodes or edges by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, build_halo_plan
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import (
    HOST,
    EdgeShards,
    NodeType,
    Ownership,
    build_shards,
    shard_order,
    smallest_index_dtype,
)


class OwnFields(Mapping[str, Tensor]):
    """The fields of this rank's nodes or edges by name; each is read, put in order and moved to the device once."""

    def __init__(self, stored: Mapping[str, Tensor], place: Callable[[Tensor], Tensor]) -> None:
        self._stored, self._place = stored, place
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            if name not in self._stored:
                raise KeyError(f"no field {name!r} is stored for this graph; there are: {self.listed()}")
            self._read[name] = self._place(self._stored[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def read(self) -> Iterator[Tensor]:
        """The fields that were read."""
        return iter(self._read.values())

    def listed(self) -> str:
        """The names, for an error message."""
        return ", ".join(sorted(self)) or "none"


@dataclass
class Relation:
    """The edges of one type into this rank's destination nodes.

    Args:
        plan: the halo of their sources.
        shards: the edges by source block, in the rank's edge order.
        edge_index: the stand-in for ``edge_index``.
        edge_ids: original position of each edge, ``[num_edges]`` int64.
        fields: edge tensors in the rank's edge order.
    """

    plan: HaloPlan
    shards: EdgeShards
    edge_index: ShardedEdgeIndex
    edge_ids: Tensor
    fields: OwnFields


def build_relation(
    comm: Ranks,
    sources: Ownership,
    src_ids: Tensor,
    dst_rows: Tensor,
    num_dst: int,
    edge_ids: Tensor,
    fields: Mapping[str, Tensor],
    options: Options,
    ends: tuple[NodeType, NodeType] | None = None,
) -> Relation:
    """The edges of one type, sharded. Collective; `sources` and `options` must be the same on every rank.

    Args:
        src_ids: global source id of each edge, ``[num_edges]`` int64.
        dst_rows: own destination row of each edge, ``[num_edges]`` int64.
        edge_ids, fields: per edge, in the same order as `src_ids`.
        ends: the types of sources and destinations, by which edges of another type are recognised.
    """
    device = HOST if options.stream_structure else comm.device
    src_ids, dst_rows, edge_ids = src_ids.to(device), dst_rows.to(device), edge_ids.to(device)
    plan, src_rows = build_halo_plan(comm, sources, src_ids, num_dst, options)
    plan = replace(plan, ends=ends)
    if options.mode == "halo":
        order = torch.argsort(edge_ids)  # layers that see whole neighbourhoods break ties by the order of edges
    else:
        order, _ = shard_order(src_rows, dst_rows, plan.blocks)  # shards are slices of edge tensors
    src_rows, dst_rows = src_rows[order], dst_rows[order]
    shards = build_shards(src_rows, dst_rows, plan.blocks, num_dst)
    edge_index = ShardedEdgeIndex.wrap(torch.stack([src_rows, dst_rows]), plan, shards)
    where = order.to(smallest_index_dtype(order.numel())) if fields else order[:0]  # is kept

    def placed(stored: Tensor) -> Tensor:
        with comm.unfollowed():  # a model may be the first to read a field
            rows = stored.to(device).index_select(0, where)
        comm.mark_rows(rows, plan.edge_set(shards.num_edges))
        return rows

    return Relation(plan, shards, edge_index, edge_ids[order], OwnFields(fields, placed))
