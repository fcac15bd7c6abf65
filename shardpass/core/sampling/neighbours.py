"""One hop: the frontier of every rank goes to its owners, which draw in-edges and reply. Collective throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.core.kernels.sampling import draw, draw_weighted, gather, keys_of, loops_if_installed, segments, spread
from shardpass.core.ownership import EdgeType, NodeType, Ownership
from shardpass.core.random import derive_seed
from shardpass.core.sampling.source import SampledSource
from shardpass.core.sampling.wire import exchange_arrays, exchange_rows

Array = Any


class Hop(NamedTuple):
    """The edges of one type drawn for a frontier, those of one node after the other.

    Args:
        counts: how many for each node of the frontier, ``[num_frontier]`` int64.
        src_ids: global source id of each edge.
        edge_ids: original id of each edge.
        fields: rows of the wanted edge tensors.
    """

    counts: Array
    src_ids: Array
    edge_ids: Array
    fields: dict[str, Tensor]


class Routed(NamedTuple):
    """Ids of one type sorted by owner.

    Args:
        order: the permutation, stable.
        per_rank: how many each rank owns.
        rows: their rows at their owners, in that order.
    """

    order: Array
    per_rank: Array
    rows: Array

    @classmethod
    def of(cls, ids: Array, owned: Ownership) -> Routed:
        """`ids` global, int64."""
        offsets = np.array(owned.offsets, dtype=np.int64)
        owners = np.searchsorted(offsets[1:], ids, side="right")
        order = np.argsort(owners, kind="stable")
        per_rank = np.bincount(owners, minlength=owned.num_ranks)
        return cls(order, per_rank, ids[order] - np.repeat(offsets[:-1], per_rank))

    def split(self, values: Array) -> list[Array]:
        """`values` in the sorted order, cut by owner."""
        found: list[Array] = np.split(values, np.cumsum(self.per_rank)[:-1])
        return found


class Drawer:
    """Draws in-edges over all ranks. Making one is collective.

    Args:
        source: this rank's share.
        replace: draw with replacement.
        weighted: draw in proportion to the weights in ``source``.
        edge_fields: names of the edge tensors that come with the edges, by type.
        wire: the dtype in which rows of float32 travel; None: their own.
    """

    def __init__(
        self,
        source: SampledSource,
        replace: bool = False,
        weighted: bool = False,
        edge_fields: Mapping[EdgeType, Sequence[str]] | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        self.source, self.replace, self.weighted, self.wire = source, replace, weighted, wire
        wanted = edge_fields or {}
        self.edge_fields = {kind: sorted(wanted.get(kind, ())) for kind in source.edges}
        self.loops = loops_if_installed()
        sizes = [owned.num_total for owned in source.ownership.values()]
        sizes += [int(edges.edge_ids.max(initial=0)) for edges in source.edges.values()]
        largest = torch.tensor([max(sizes, default=0)], device=source.comm.device)
        largest = source.comm.all_reduce(largest, "max", "sampling: largest id")
        self._wire_ids = np.int32 if int(largest) < 2**31 else np.int64

    def hop(
        self, frontier: Mapping[NodeType, Array], fanouts: Mapping[EdgeType, int], seed: int
    ) -> dict[EdgeType, Hop]:
        """The edges drawn into the nodes of `frontier`, by type. Collective.

        Args:
            frontier: different global ids by node type, int64; may be empty.
            fanouts: by edge type, the same on every rank; ALL (-1) takes all in-edges, 0 none.
            seed: of this hop; the same on every rank.
        """
        source, kinds = self.source, [kind for kind in self.source.edges if fanouts[kind] != 0]
        types = list(dict.fromkeys(kind[2] for kind in kinds))
        if not kinds:
            return {}
        if source.comm.size == 1:
            return {
                kind: self._complete(kind, *self._draw(kind, frontier[kind[2]], fanouts[kind], seed)) for kind in kinds
            }
        routes = {kind: Routed.of(frontier[kind], source.ownership[kind]) for kind in types}
        asked = list(zip(*(routes[kind].split(routes[kind].rows) for kind in types)))
        requests = exchange_arrays(source.comm, asked, "sampling: frontier", self._wire_ids)
        answers: list[list[Array]] = []
        places: list[list[Array]] = []
        for request in requests:
            rows = dict(zip(types, request))
            answers.append([])
            places.append([])
            for kind in kinds:
                counts, drawn = self._draw(kind, rows[kind[2]], fanouts[kind], seed)
                edges = source.edges[kind]
                answers[-1] += [counts, *gather(drawn, edges.src_ids, edges.edge_ids, self._wire_ids, self.loops)]
                places[-1].append(drawn)
        replies = exchange_arrays(source.comm, answers, "sampling: neighbours", self._wire_ids)
        fields = self._fetch_fields(kinds, places, replies)
        return {
            kind: self._in_frontier_order(
                routes[kind[2]], [reply[3 * i : 3 * i + 3] for reply in replies], [held[i] for held in fields]
            )
            for i, kind in enumerate(kinds)
        }

    def _draw(self, kind: EdgeType, rows: Array, fanout: int, seed: int) -> tuple[Array, Array]:
        """``(counts, places)`` in the CSR of this rank's edges of a type."""
        edges = self.source.edges[kind]
        keys = keys_of(derive_seed(seed, kind), self.source.node_ids[kind[2]][rows])
        if self.weighted:
            return draw_weighted(edges.indptr, rows, keys, edges.weights, fanout, self.replace)
        return draw(edges.indptr, rows, keys, fanout, self.replace, self.loops)

    def _complete(self, kind: EdgeType, counts: Array, places: Array) -> Hop:
        edges = self.source.edges[kind]
        rows = torch.from_numpy(edges.rows[places].astype(np.int64)) if self.edge_fields[kind] else None
        fields = {
            name: edges.fields[name].index_select(0, rows.to(edges.fields[name].device))
            for name in self.edge_fields[kind]
            if rows is not None
        }
        return Hop(counts, *gather(places, edges.src_ids, edges.edge_ids, np.int64, self.loops), fields)

    def _fetch_fields(
        self, kinds: list[EdgeType], places: list[list[Array]], replies: list[list[Array]]
    ) -> list[list[dict[str, Tensor]]]:
        comm, edges = self.source.comm, self.source.edges
        if not any(self.edge_fields[kind] for kind in kinds):
            return [[{} for _ in kinds] for _ in replies]
        tensors = [{name: edges[kind].fields[name] for name in self.edge_fields[kind]} for kind in kinds]
        send = [
            [torch.from_numpy(edges[k].rows[part].astype(np.int64)).to(comm.device) for k, part in zip(kinds, parts)]
            for parts in places
        ]
        counts = [[len(reply[3 * i + 1]) for i in range(len(kinds))] for reply in replies]
        return exchange_rows(comm, tensors, send, counts, self.wire, "sampling: edge fields")

    def _in_frontier_order(self, route: Routed, parts: list[list[Array]], fields: list[dict[str, Tensor]]) -> Hop:
        """The replies of all owners, put in the order of the frontier."""
        counts = np.empty(len(route.order), dtype=np.int64)
        counts[route.order] = np.concatenate([part[0] for part in parts])
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        ids = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
        rows = {name: tensor.new_empty((total, *tensor.shape[1:])) for name, tensor in fields[0].items()}
        for (drawn, src_ids, edge_ids), chosen, held in zip(parts, route.split(route.order), fields):
            starts = ends[chosen] - counts[chosen]
            spread(starts, drawn, src_ids, edge_ids, ids, self.loops)
            if held:
                places = torch.from_numpy(segments(starts, drawn))
            for name, tensor in held.items():
                rows[name].index_copy_(0, places.to(tensor.device), tensor)
        return Hop(counts, *ids, rows)
