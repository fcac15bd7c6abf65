"""Message-flow graphs: each layer computes only the nodes that the wanted ones need. They are also called blocks.

The last layer computes the wanted nodes, the layer before it these and their in-neighbours, and so on. A layer still
sees the whole edge list of the rank, so that degrees and normalisation are those of the graph. Only `propagate` does
less: it leaves out edges into other nodes and does not fetch their halo rows. The rows of other nodes have no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardpass.core.exchange import HaloPlan, build_halo_plan, halo_fetch, halo_push
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import EdgeShards, KnownLists, Ownership, build_shards
from shardpass.errors import RefusedError

Content = tuple[StorageWeakRef, int, int]


@dataclass(frozen=True)
class LayerFlow:
    """What one layer computes.

    Args:
        needed: the own destination rows it computes, ``[num_dst]`` bool.
        plan: the halo of the edges into them.
        new_rows: for each source row of the whole plan its row in `plan`, or -1, ``[num_src]`` int64.
        number: of the layer, from 0.
        progress: the last layer of each forward, shared by the layers.
    """

    needed: Tensor
    plan: HaloPlan
    new_rows: Tensor
    number: int
    progress: dict[int, int]
    _known: KnownLists[EdgeShards] = field(default_factory=KnownLists, compare=False, repr=False)
    _used: dict[int, set[Content]] = field(default_factory=dict, compare=False, repr=False)

    def note(self, name: str, comm: Ranks, sources: dict[str, Tensor]) -> None:
        """Note that `name` sends messages from `sources` over this layer.

        Raises:
            RefusedError: an earlier message of this forward had other sources, so these may have been made from its
                result, of which only the needed rows are computed; or a later layer came before this one.
        """
        last = self.progress.get(comm.forwards, -1)
        if self.number < last:
            raise RefusedError(
                f"{name} was given number {self.number} of graph.layers after number {last}: a layer computes "
                f"only what the layers after it need. Use them in their order, the first layer's first"
            )
        self.progress.clear()
        self.progress[comm.forwards] = self.number
        mine = {_content(t) for t in sources.values() if t.numel()}
        known = self._used.get(comm.forwards)
        if known is None:
            self._used.clear()
            self._used[comm.forwards] = mine
        elif not mine <= known:
            raise RefusedError(
                f"{name}: a second message over one edge_index of graph.layers may read rows that the first left out "
                f"(several hops in one layer, or one edge_index for several layers). Ask for as many layers as there "
                f"are hops and give each its own, or call the model with the graph"
            )

    def note_indexing(self, comm: Ranks, table: Tensor) -> None:
        """Note that rows of `table` are taken by source.

        Raises:
            RefusedError: a message has gone over this layer in this forward, and `table` is not one of its sources. It
                may have been made from the result, of which only the needed rows are computed.
        """
        known = self._used.get(comm.forwards)
        if known is None or table.dim() < 2 or not table.numel():  # degrees and the like are whole
            return
        if _content(table) not in known:
            raise RefusedError(
                "a node tensor is indexed by row 0 of an edge_index of graph.layers after a message over it: rows that "
                "the message left out may be read. Index with the next layer's edge_index, or use the graph"
            )

    def shards_of(self, edge_index: ShardedEdgeIndex) -> EdgeShards:
        """The edges of a list that end in needed nodes. Edge tensors keep the rows of the whole list."""
        known = self._known.find(edge_index.edges)
        if known is not None:
            return known
        src_rows, dst_rows = edge_index.sources_first
        kept = self.needed[dst_rows].nonzero().view(-1)
        found = build_shards(self.new_rows[src_rows[kept]], dst_rows[kept], self.plan.blocks, self.plan.num_dst)
        shards = tuple(replace(shard, rows=kept[shard.edge_rows]) for shard in found.shards)
        largest = int(torch.bincount(dst_rows).max()) if dst_rows.numel() else 0
        return self._known.keep(edge_index.edges, EdgeShards(shards, found.num_dst, edge_index.size(1), largest))


def _content(tensor: Tensor) -> Content:
    """What identifies the content of a tensor: its memory, which is not reused while this reference exists."""
    return StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def message_flow(edge_index: ShardedEdgeIndex, sources: Ownership, wanted: Tensor, num_layers: int) -> list[LayerFlow]:
    """What each of `num_layers` layers has to compute, the first one first. Collective.

    Args:
        edge_index: of a graph whose sources and destinations are the same nodes.
        sources: their ownership.
        wanted: the own rows that the last layer must compute, ``[num_nodes]`` bool.
        num_layers: the same on every rank.
    """
    plan = edge_index.plan
    src_rows, dst_rows = edge_index.sources_first
    own_ids = sources.to_global(torch.arange(plan.num_own_src, device=wanted.device), plan.comm.rank)
    ids = halo_fetch(own_ids, plan, "layers: ids")
    flows: list[LayerFlow] = []
    progress: dict[int, int] = {}
    for number in reversed(range(num_layers)):
        kept = wanted[dst_rows]
        smaller, rows = build_halo_plan(plan.comm, sources, ids[src_rows[kept]], plan.num_dst, plan.options)
        new_rows = torch.full((plan.num_src,), -1, device=wanted.device)
        new_rows[: plan.num_own_src] = torch.arange(plan.num_own_src, device=wanted.device)
        new_rows[src_rows[kept]] = rows
        flows.insert(0, LayerFlow(wanted, smaller, new_rows, number, progress))
        read = torch.zeros(plan.num_src, device=wanted.device)
        read[src_rows[kept]] = 1
        wanted = wanted | (halo_push(read, plan, "layers: nodes that are read") > 0)
    return flows
