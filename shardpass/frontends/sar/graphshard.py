"""The graph that SAR's scripts use: a `ShardedDGLGraph` with the few names that SAR adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardpass.core.exchange import halo_fetch
from shardpass.core.graphs import build_relation
from shardpass.core.sharding import Ownership
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.structure import Edges
from shardpass.frontends.sar.common_tuples import CanonicalType

_ROW = "row in the part"


class GraphShardManager(ShardedDGLGraph):
    """One rank's share of a graph, made by `construct_full_graph`, `construct_mfgs` or `convert_dist_graph`.

    Pass it to a layer of ``dgl.nn`` as its DGLGraph or block; see `ShardedDGLGraph`. The `input_nodes` and `seeds` of a
    block from `construct_mfgs` say which nodes it takes and gives.
    """

    _inputs: dict[str, Tensor] | None = None
    _seeds: dict[str, Tensor] | None = None

    @property
    def input_nodes(self) -> Any:
        """The source nodes as rows of this rank's part, int64; a dict by type where there are several types."""
        return self._rows(self._inputs, {kind: nodes.num for kind, nodes in self._sources.items()})

    @property
    def seeds(self) -> Any:
        """The destination nodes as rows of this rank's part, int64; a dict by type where there are several types."""
        return self._rows(self._seeds, {kind: nodes.num for kind, nodes in self._destinations.items()})

    def _rows(self, rows: dict[str, Tensor] | None, counts: dict[str, int]) -> Any:
        found = rows or {kind: torch.arange(count, device=self.device) for kind, count in counts.items()}
        return next(iter(found.values())) if len(found) == 1 else found

    def to(self, device: Any, **kwargs: Any) -> GraphShardManager:
        """This graph, if it is on `device`.

        Raises:
            RefusedError: it is on another device.
        """
        wanted = torch.device(device)
        same = wanted.type == self.device.type and wanted.index in (None, self.device.index)
        if not same and wanted.type == "cuda" and self.device.type == "cuda":
            same = torch.cuda.current_device() == (self.device.index or 0) and wanted.index is None
        if not same:
            raise RefusedError(
                f"rank {self.comm.rank}: the graph is on {self.device} and cannot move to {wanted}: pass the device to "
                f"load_dgl_partition_data, and construct the graph from that"
            )
        return self

    def get_full_partition_graph(self, delete_shard_data: bool = True) -> DistributedBlock:
        """The same graph, but its halo rows are fetched all at once and kept for backward. Collective.

        It has the stored features, but not those that were set on this graph. Its edges are in another order.

        Args:
            delete_shard_data: ignored. What this graph holds is freed when the last reference to it goes.
        """
        edges = {kind: self._at_once(kind) for kind in self.canonical_etypes}
        block = DistributedBlock(self.comm, self._sources, self._destinations, edges, self.is_block)
        block._inputs, block._seeds = self._inputs, self._seeds
        return block

    def _at_once(self, kind: CanonicalType) -> Edges:
        edges, comm = self._edges[kind], self.comm
        plan = edges.plan
        counts = comm.all_gather_object(plan.num_own_src, f"sources of {kind}")
        owned = Ownership.from_counts(counts)
        numbers = owned.to_global(torch.arange(plan.num_own_src, device=self.device), comm.rank)
        with torch.no_grad():
            numbers = halo_fetch(numbers, plan, f"numbers of the sources of {kind}")
        relation = build_relation(
            comm, owned, numbers[edges.src_rows], edges.dst_rows, plan.num_dst, edges.ids, edges.fields,
            replace(plan.options, mode="halo"), plan.ends,
        )  # fmt: skip
        return Edges.of(kind, relation, edges.total)


class DistributedBlock(GraphShardManager):
    """A `GraphShardManager` that fetches all halo rows at once (``Options(mode="halo")``)."""


def blocks_of(graph: GraphShardManager, seeds: Any, num_layers: int, keep_seed_nodes: bool) -> list[GraphShardManager]:
    """A block for each layer, the first layer's first. Collective; args as `ShardedDGLGraph.mfgs`."""
    with graph.local_scope():
        for kind in graph.ntypes:
            graph.nodes[kind].data[_ROW] = torch.arange(graph.nodes_of(kind).num, device=graph.device)
        found = graph.mfgs(seeds, num_layers, keep_seed_nodes)
        blocks = [block.copied_as(GraphShardManager) for block in found]
        for block in blocks:
            block._inputs = {kind: block.srcnodes[kind].data[_ROW] for kind in block.srctypes}
            block._seeds = {kind: block.dstnodes[kind].data[_ROW] for kind in block.dsttypes}
            for views, kinds in ((block.srcnodes, block.srctypes), (block.dstnodes, block.dsttypes)):
                for kind in kinds:
                    del views[kind].data[_ROW]
    return blocks
