"""The graph that SAR's scripts use: a `ShardedDGLGraph` with the names that SAR adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dgl
import torch
from torch import Tensor

from shardpass.core.exchange import halo_fetch
from shardpass.core.graphs import is_on
from shardpass.core.sharding import Ownership
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.blocks import edges_between
from shardpass.frontends.dgl.frames import DataViews
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.private import ALL
from shardpass.frontends.dgl.structure import Nodes
from shardpass.frontends.sar.common_tuples import CanonicalType, Ranges, ShardEdgesAndFeatures
from shardpass.frontends.sar.config import ConfiguredEdges
from shardpass.frontends.sar.core.counts import OwnEdgeCount, OwnNodeCount


@dataclass(frozen=True)
class GraphShard:
    """The edges from one part into this rank's nodes, as data. The engine keeps its shards in a form of its own."""

    shard_edges_features: ShardEdgesAndFeatures
    src_range: tuple[int, int]
    tgt_range: tuple[int, int]
    edge_type_names: list[CanonicalType]


class NodeRanges(list[tuple[int, int]]):
    """(First id, end) of the nodes of each part; calling it gives it, since scripts read it both ways."""

    def __call__(self) -> NodeRanges:
        return self


@dataclass(frozen=True, eq=False)
class NodeIds(DataViews):
    """``graph.srcnodes["type"].data``, and ``graph.srcnodes("type")``, which gives rows of this rank's part."""

    rows: dict[str, Tensor]

    def __call__(self, ntype: str | None = None) -> Tensor:  # type: ignore[override]
        """The nodes of a type as rows of this rank's part, int64."""
        if ntype is None and len(self.rows) == 1:
            return next(iter(self.rows.values()))
        if ntype not in self.rows:
            raise KeyError(f"{self.name}: expected one of the types {list(self.rows)}, got {ntype!r}")
        return self.rows[ntype]


class GraphShardManager(ShardedDGLGraph):
    """One rank's share of a graph, made by `construct_full_graph`, `construct_mfgs` or `convert_dist_graph`.

    Pass it to a layer of ``dgl.nn`` as its DGLGraph or block; see `ShardedDGLGraph`. The `input_nodes` and `seeds` of a
    block from `construct_mfgs` say which nodes it takes and gives.
    """

    shows_part, node_count, edge_count = True, OwnNodeCount, OwnEdgeCount  # type: ignore[assignment]
    node_ranges: NodeRanges
    """(First id, end) of the nodes of each part."""
    type_ranges: Mapping[str, Ranges]
    """(First id, end) of the nodes of each type in each part."""
    _partition_book: Any
    """DGL's partition book, under the name by which SAR's programs read it."""
    _num_edges: Mapping[CanonicalType, int]
    """How many edges of each type all ranks have."""

    def share_of(
        self, node_ranges: NodeRanges, type_ranges: Mapping[str, Ranges], book: Any,
        num_edges: Mapping[CanonicalType, int],
    ) -> GraphShardManager:  # fmt: skip
        """This graph, once it has been told what it is a share of: see the attributes."""
        self.node_ranges, self.type_ranges = node_ranges, type_ranges
        self._partition_book, self._num_edges = book, num_edges
        return self

    @property
    def input_nodes(self) -> Any:
        """The source nodes as rows of this rank's part, int64; a dict by type where there are several types."""
        return _of_one_type(self._rows_of(self._sources))

    @property
    def seeds(self) -> Any:
        """The destination nodes as rows of this rank's part, int64; a dict by type where there are several types."""
        return _of_one_type(self._rows_of(self._destinations))

    def _rows_of(self, side: dict[str, Nodes]) -> dict[str, Tensor]:
        return {kind: nodes.ids - self.type_ranges[kind][self.comm.rank][0] for kind, nodes in side.items()}

    @property
    def nodes(self) -> NodeIds:
        """``nodes["type"].data`` and ``nodes("type")``."""
        return NodeIds(**vars(super().nodes), rows=self._rows_of({**self._destinations, **self._sources}))

    @property
    def srcnodes(self) -> NodeIds:
        """``srcnodes["type"].data`` and ``srcnodes("type")``."""
        return NodeIds(**vars(super().srcnodes), rows=self._rows_of(self._sources))

    @property
    def dstnodes(self) -> NodeIds:
        """``dstnodes["type"].data`` and ``dstnodes("type")``."""
        return NodeIds(**vars(super().dstnodes), rows=self._rows_of(self._destinations))

    # ---- counts

    def num_nodes(self, ntype: str | None = None) -> int:
        """How many nodes of a type this rank has; `None` means the sum over `ntypes`.

        A type on both sides of a block counts its sources. A block of one type counts both sides for `None`, as in DGL.
        """
        if ntype is None and len(self.ntypes) > 1:
            return self._count({**self._destinations, **self._sources}, None, "Node")
        return super().num_nodes(ntype)

    number_of_nodes = num_nodes

    @property
    def ntypes(self) -> list[str]:
        """The node types, each once, also those of a block."""
        return list(dict.fromkeys(super().ntypes))

    def ntypes_global(self) -> list[str]:
        """The node types of the whole graph."""
        return list(self.type_ranges)

    def etypes_global(self) -> list[str]:
        """The edge types of the whole graph."""
        return [kind[1] for kind in self._num_edges]

    def canonical_etypes_global(self) -> list[CanonicalType]:
        """The canonical edge types of the whole graph."""
        return list(self._num_edges)

    def num_nodes_global(self, ntype: str | None = None) -> int:
        """How many nodes of a type the whole graph has; `None` means all types."""
        return _total({kind: sum(end - start for start, end in ends) for kind, ends in self.type_ranges.items()}, ntype)

    def num_edges_global(self, etype: Any = None) -> int:
        """How many edges of a type the whole graph has; `None` means all types."""
        return _total(self._num_edges, None if etype is None else self.to_canonical_etype(etype))

    number_of_nodes_global, number_of_edges_global = num_nodes_global, num_edges_global

    def in_degrees(self, vertices: Any = ALL, etype: Any = None) -> Tensor:
        return super().in_degrees(vertices, etype)

    def out_degrees(self, vertices: Any = ALL, etype: Any = None) -> Tensor:
        return super().out_degrees(vertices, etype)

    def apply_edges(self, message_func: Any, edges: Any = ALL, etype: Any = None, inplace: bool = False) -> None:
        """See `ShardedDGLGraph.apply_edges`; `inplace` is ignored, as in DGL."""
        super().apply_edges(message_func, edges, etype)

    # ---- the partition

    @property
    def tgt_node_range(self) -> tuple[int, int]:
        """(First id, end) of this rank's nodes."""
        return self.node_ranges[self.comm.rank]

    local_src_node_range = tgt_node_range

    def partition_book(self) -> Any:
        """DGL's partition book."""
        return self._partition_book

    @property
    def graph_shard_managers(self) -> dict[CanonicalType, GraphShardManager]:
        """The graph of the edges of each type, ``graph[etype]``."""
        return {kind: self[kind] for kind in self.canonical_etypes}

    @property
    def sampling_graph(self) -> dgl.DGLGraph:
        """A DGLGraph of all nodes, with the edges into this rank's nodes and their fields. Collective.

        Nodes have the ids of `node_ranges`, so that ``dgl.sampling.sample_neighbors`` takes ids of own nodes.

        Raises:
            DGLError: there are several edge types; ask ``graph[etype]``.
        """
        kind = self.to_canonical_etype(None)
        edges = self._edges[kind]
        with torch.no_grad():
            ids = halo_fetch(self._sources[kind[0]].ids, edges.plan, f"ids of the sources of {kind}")
        ends = ids[edges.src_rows], self._destinations[kind[2]].ids[edges.dst_rows]
        graph = dgl.graph(ends, num_nodes=self.node_ranges[-1][1], device=self.device)
        graph.edata.update(dict(self._edge_frames[kind]))
        return graph

    def to(self, device: Any, **kwargs: Any) -> GraphShardManager:
        """This graph, if it is on `device`; else a `RefusedError`."""
        if not is_on(self.device, device):
            raise RefusedError(
                f"rank {self.comm.rank}: the graph is on {self.device} and cannot move to {device}: pass the device to "
                f"load_dgl_partition_data, and construct the graph from that"
            )
        return self

    def get_full_partition_graph(self, delete_shard_data: bool = True) -> DistributedBlock:
        """The same graph, but its halo rows are fetched all at once and kept for backward. Collective.

        It has the stored features, but not those that were set on this graph. Its edges are in another order.
        `delete_shard_data` is ignored: what this graph holds is freed when the last reference to it goes.
        """
        edges = {}
        for kind in self.canonical_etypes:
            own, plan = self._edges[kind], self._edges[kind].plan
            sources, wanted = (torch.arange(num, device=self.device) for num in (plan.num_own_src, plan.num_dst))
            owned = Ownership.from_counts(self.comm.all_gather_object(sources.numel(), f"sources of {kind}"))
            options = replace(plan.options, mode="halo")
            edges[kind] = edges_between(self, kind, own.fields, sources, wanted, owned, options)
        block = DistributedBlock(self.comm, self._sources, self._destinations, edges, self.is_block)
        block.share_of(self.node_ranges, self.type_ranges, self._partition_book, self._num_edges)
        return block

    def mfgs(self, nodes: Any, num_layers: int, keep_seeds: bool = True) -> list[Any]:
        """See `ShardedDGLGraph.mfgs`. The blocks are of this class, and follow `Config`."""
        blocks = [block.copied_as(GraphShardManager) for block in super().mfgs(nodes, num_layers, keep_seeds)]
        for block in blocks:
            block.share_of(self.node_ranges, self.type_ranges, self._partition_book, self._num_edges)
            block._edges = {kind: ConfiguredEdges.like(edges) for kind, edges in block._edges.items()}
        return blocks


HeteroGraphShardManager = GraphShardManager
"""Graphs of one and of several types are of one class."""


class DistributedBlock(GraphShardManager):
    """A `GraphShardManager` that fetches all halo rows at once (``Options(mode="halo")``)."""


def _of_one_type(rows: dict[str, Tensor]) -> Any:
    return next(iter(rows.values())) if len(rows) == 1 else rows


def _total(counts: Mapping[Any, int], kind: Any) -> int:
    if kind is not None and kind not in counts:
        raise KeyError(f"no type {kind!r}; there are: {list(counts)}")
    return sum(counts.values()) if kind is None else counts[kind]
