"""The edges of one type into this rank's nodes, and the fields of its nodes or edges by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, halo_plan_of
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.given import as_given
from shardpass.core.ranks import Options, Ranks, RowSet
from shardpass.core.sharding import (
    HOST,
    EdgeShards,
    LazyTensor,
    NodeType,
    OwnerEdges,
    Ownership,
    edges_by_owner,
    shards_of_owners,
    smallest_index_dtype,
)


class OwnFields(Mapping[str, Tensor]):
    """The fields of this rank's nodes or edges by name; each is read, put in order and moved to the device once.

    A model may be the first to read one, and nobody follows how that is done.

    Args:
        stored: the tensors, which may be read from files.
        comm: the ranks.
        of: which rows they have.
        place: puts the rows of one in order; by default it moves them to the device of the ranks.
    """

    def __init__(
        self, stored: Mapping[str, Tensor], comm: Ranks, of: RowSet, place: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._stored, self._comm, self._of = stored, comm, of
        self._place = place or (lambda rows: rows.to(comm.device))
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            if name not in self._stored:
                raise KeyError(f"no field {name!r} is stored for this graph; there are: {self.listed()}")
            with self._comm.unfollowed():
                self._read[name] = self._place(self._stored[name])
            self._comm.mark_rows(self._read[name], self._of)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def given(self, name: str) -> Tensor:
        """A field as code outside of models gets it; see `as_given`."""
        return as_given(self[name], self._comm)

    def followed(self, field: Tensor) -> Tensor:
        """A field as a script gets it that keeps it for its models too."""
        return as_given(field, self._comm, is_kept=True)

    def read(self) -> Iterator[Tensor]:
        """The fields that were read."""
        return iter(self._read.values())

    def of_same_rows(self, stored: Mapping[str, Tensor]) -> OwnFields:
        """Other fields of the same nodes or edges."""
        return OwnFields(stored, self._comm, self._of, self._place)

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
        fields: edge tensors in the rank's edge order.
        ids: the owner of `edge_ids`.
    """

    plan: HaloPlan
    shards: EdgeShards
    edge_index: ShardedEdgeIndex
    fields: OwnFields
    ids: LazyTensor

    @property
    def edge_ids(self) -> Tensor:
        """Original position of each edge, ``[num_edges]`` int64; made when it is first read."""
        return self.ids.read()


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
    last_node: int | None = None,
) -> Relation:
    """The edges of one type, sharded. Collective; `sources` and `options` must be the same on every rank.

    Args:
        src_ids: global source id of each edge, ``[num_edges]`` int64.
        dst_rows: own destination row of each edge, ``[num_edges]`` int64.
        edge_ids, fields: per edge, in the same order as `src_ids`.
        ends: the types of sources and destinations, by which edges of another type are recognised.
        last_node: see `HaloPlan`.
    """
    device = HOST if options.stream_structure else comm.device
    owners, order = edges_by_owner(sources, comm.rank, src_ids.to(device), dst_rows.to(device), num_dst)
    num_own = sources.num_own(comm.rank)
    return relation_of(comm, owners, num_own, num_dst, lambda: edge_ids, fields, options, ends, order, last_node)


def relation_of(
    comm: Ranks,
    owners: Sequence[OwnerEdges],
    num_own_src: int,
    num_dst: int,
    edge_ids: Callable[[], Tensor],
    fields: Mapping[str, Tensor],
    options: Options,
    ends: tuple[NodeType, NodeType] | None = None,
    order: Tensor | None = None,
    last_node: int | None = None,
    weights: str | None = None,
) -> Relation:
    """The edges of one type, of which each rank has those by owner. Collective. Their tensors are taken as they are.

    Args:
        owners: the edges from each rank's nodes, in the order of the ranks.
        num_own_src: source rows that this rank owns. num_dst: destination rows.
        edge_ids: gives the original position of each edge, called when they are first needed.
        fields: per edge, in the same order as `edge_ids`.
        options, ends, last_node: as of `build_relation`. weights: see `HaloPlan`.
        order: where each of the edges of `owners` stands in `edge_ids` and `fields`. `None`: they have the same order.
    """
    device = HOST if options.stream_structure else comm.device
    owners = [edges.to(device) for edges in owners]
    num_edges = sum(edges.src_rows.numel() for edges in owners)
    plan = halo_plan_of(comm, num_own_src, [edges.needed for edges in owners], num_dst, num_edges, options)
    plan = replace(plan, ends=ends, last_node=last_node, weights=weights)
    shards = replace(shards_of_owners(owners, plan.blocks, num_dst), is_stored=True)
    order = None if order is None else order.to(device, smallest_index_dtype(order.numel()))
    if options.mode == "halo":  # layers that see whole neighbourhoods break ties by the order of edges
        given = edge_ids().to(device)
        by_id = torch.argsort(given if order is None else given.index_select(0, order))
        shards = _in_order(shards, by_id)
        order = by_id if order is None else order[by_id]

    def ordered(stored: Tensor) -> Tensor:
        return stored.to(device) if order is None else stored.to(device).index_select(0, order)

    def ids() -> Tensor:
        with comm.unfollowed():
            return ordered(edge_ids()).to(torch.int64)

    index = ShardedEdgeIndex.of_shards(shards, plan)
    of = plan.edge_set(shards.num_edges)
    return Relation(plan, shards, index, OwnFields(fields, comm, of, ordered), LazyTensor(ids))


def _in_order(shards: EdgeShards, order: Tensor) -> EdgeShards:
    """The same edges in a list whose i-th edge is the one that stood at ``order[i]``."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return replace(shards, shards=tuple(replace(shard, rows=places[shard.edge_rows]) for shard in shards.shards))
