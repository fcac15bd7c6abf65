"""One hop: each rank sends the nodes of its frontier to their owners, which draw in-edges and reply. All collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import Routed, exchange_arrays, exchange_rows
from shardpass.core.ranks import derive_seed
from shardpass.core.sampling.drawing import draw, draw_weighted, keys_of, loops_if_installed, segments
from shardpass.core.sampling.source import Array, SampledSource, Structure
from shardpass.core.sharding import EdgeType, NodeType

Arrays = list[list[Array]]  # one list for each rank
Rows = Mapping[NodeType, Array]  # of nodes, at their owner


class Hop(NamedTuple):
    """The edges of one type drawn for a frontier, node after node.

    Args:
        counts: how many edges were drawn for each node of the frontier, ``[num_frontier]`` int64.
        src_ids: global source id of each edge.
        edge_ids: original id of each edge.
        fields: the edges' rows of the wanted edge tensors.
    """

    counts: Array
    src_ids: Array
    edge_ids: Array
    fields: dict[str, Tensor]


class Drawer:
    """Draws in-edges over all ranks. Making one is collective.

    Args:
        source: this rank's share.
        replace: draw with replacement.
        weighted: draw in proportion to the weights in `source`.
        edge_fields: names of the edge tensors that come with the edges, by type.
        wire: the dtype in which float32 rows travel. `None` keeps float32.
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
            frontier: global ids by node type, int64, none of them twice. It may be empty.
            fanouts: how many edges to draw by edge type; `ALL` (-1) takes all in-edges. The same on every rank.
            seed: of this hop, the same on every rank.
        """
        source, kinds = self.source, [kind for kind in self.source.edges if fanouts[kind] != 0]
        types = list(dict.fromkeys(kind[2] for kind in kinds))
        if not kinds:
            return {}
        if source.comm.size == 1:
            return {
                kind: self._complete(kind, *self._draw(source.own, kind, frontier[kind[2]], fanouts[kind], seed))
                for kind in kinds
            }
        routes = {kind: Routed.of(frontier[kind], source.ownership[kind]) for kind in types}
        asked = [dict(zip(types, rows)) for rows in zip(*(routes[kind].split(routes[kind].rows) for kind in types))]
        wanted = {kind: fanouts[kind] for kind in kinds}
        replies, edge_rows = (self._ask if source.parts is None else self._read)(asked, wanted, seed)
        fields = self._fetch_fields(kinds, edge_rows, replies)
        return {
            kind: self._in_frontier_order(
                routes[kind[2]], [reply[3 * i : 3 * i + 3] for reply in replies], [held[i] for held in fields]
            )
            for i, kind in enumerate(kinds)
        }

    def _ask(self, asked: Sequence[Rows], fanouts: Mapping[EdgeType, int], seed: int) -> tuple[Arrays, Arrays]:
        """``(replies, edge_rows)``: what each owner draws for its rows, and which own edges were drawn for each rank.

        A reply has three arrays for each edge type: counts, source ids, edge ids. Own edges are rows of the own edge
        tensors by type; the list is empty if no fields are wanted.
        """
        comm, types = self.source.comm, list(asked[0])
        sent = [list(rows.values()) for rows in asked]
        requests = exchange_arrays(comm, sent, "sampling: frontier", self._wire_ids)
        own = self.source.own
        drawn = [self._answer(own, dict(zip(types, request)), fanouts, seed) for request in requests]
        replies = exchange_arrays(comm, [answer for answer, _ in drawn], "sampling: neighbours", self._wire_ids)
        return replies, [rows for _, rows in drawn]

    def _read(self, asked: Sequence[Rows], fanouts: Mapping[EdgeType, int], seed: int) -> tuple[Arrays, Arrays]:
        """As `_ask`, but this rank makes the draws itself, from the structure of the owners."""
        parts = self.source.parts or ()
        drawn = [self._answer(part, rows, fanouts, seed) for part, rows in zip(parts, asked)]
        edge_rows = [rows for _, rows in drawn]
        if edge_rows[0]:
            edge_rows = exchange_arrays(self.source.comm, edge_rows, "sampling: edges drawn", self._wire_ids)
        return [answer for answer, _ in drawn], edge_rows

    def _answer(
        self, part: Structure, rows: Rows, fanouts: Mapping[EdgeType, int], seed: int
    ) -> tuple[list[Array], list[Array]]:
        """A reply for `rows` of a part, and the edges drawn; see `_ask`."""
        answer: list[Array] = []
        edge_rows: list[Array] = []
        for kind, fanout in fanouts.items():
            counts, places = self._draw(part, kind, rows[kind[2]], fanout, seed)
            edges = part.edges[kind]
            answer += [
                counts,
                *(ids[places].astype(self._wire_ids, copy=False) for ids in (edges.src_ids, edges.edge_ids)),
            ]
            if self._with_fields(fanouts):
                edge_rows.append(edges.rows[places])
        return answer, edge_rows

    def _with_fields(self, kinds: Iterable[EdgeType]) -> bool:
        return any(self.edge_fields[kind] for kind in kinds)

    def _draw(self, part: Structure, kind: EdgeType, rows: Array, fanout: int, seed: int) -> tuple[Array, Array]:
        """``(counts, places)`` of the edges drawn in the CSR of a part's edges of a type."""
        edges = part.edges[kind]
        keys = keys_of(derive_seed(seed, kind), part.node_ids[kind[2]][rows])
        if self.weighted:
            return draw_weighted(edges.indptr, rows, keys, edges.weights, fanout, self.replace)
        return draw(edges.indptr, rows, keys, fanout, self.replace, self.loops)

    def _complete(self, kind: EdgeType, counts: Array, places: Array) -> Hop:
        edges = self.source.edges[kind]
        rows = torch.from_numpy(edges.rows[places].astype(np.int64)) if self.edge_fields[kind] else None
        fields = {
            name: edges.fields[name].index_select(0, rows.to(edges.fields[name].device)).to(self.source.comm.device)
            for name in self.edge_fields[kind]
            if rows is not None
        }
        return Hop(counts, *edges.ids(places, np.int64), fields)

    def _fetch_fields(self, kinds: list[EdgeType], edge_rows: Arrays, replies: Arrays) -> list[list[dict[str, Tensor]]]:
        comm, edges = self.source.comm, self.source.edges
        if not self._with_fields(kinds):
            return [[{} for _ in kinds] for _ in replies]
        tensors = [{name: edges[kind].fields[name] for name in self.edge_fields[kind]} for kind in kinds]
        send = [[torch.from_numpy(part.astype(np.int64)).to(comm.device) for part in parts] for parts in edge_rows]
        counts = [[len(reply[3 * i + 1]) for i in range(len(kinds))] for reply in replies]
        return exchange_rows(comm, tensors, send, counts, self.wire, "sampling: edge fields")

    def _in_frontier_order(self, route: Routed, parts: list[list[Array]], fields: list[dict[str, Tensor]]) -> Hop:
        """The replies of all owners, put into the order of the frontier."""
        counts = np.empty(len(route.order), dtype=np.int64)
        counts[route.order] = np.concatenate([part[0] for part in parts])
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        ids = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
        rows = {name: tensor.new_empty((total, *tensor.shape[1:])) for name, tensor in fields[0].items()}
        for (drawn, src_ids, edge_ids), chosen, held in zip(parts, route.split(route.order), fields):
            places = segments(ends[chosen] - counts[chosen], drawn)
            ids[0][places], ids[1][places] = src_ids, edge_ids
            for name, tensor in held.items():
                rows[name].index_copy_(0, torch.from_numpy(places).to(tensor.device), tensor)
        return Hop(counts, *ids, rows)
