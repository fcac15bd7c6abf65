"""What one layer of a message-flow graph computes, and the check that layers are used in their order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan
from shardpass.core.ranks import Ranks, torch_private
from shardpass.core.sharding import Derivation, EdgeShards, KnownLists, build_shards
from shardpass.errors import RefusedError

Content = tuple[torch_private.StorageWeakRef, int, int]


@dataclass
class FlowUse:
    """What one forward has done with the layers of a message flow; the layers share it.

    Attributes:
        forward: the number of the forward.
        last: the number of the last layer that was used, or -1.
        sources: what messages were made from, by the number of the layer.
    """

    forward: int = -1
    last: int = -1
    sources: dict[int, set[Content]] = field(default_factory=dict)

    def of(self, forward: int) -> FlowUse:
        """Itself, emptied if it speaks of another forward."""
        if self.forward != forward:
            self.forward, self.last, self.sources = forward, -1, {}
        return self


@dataclass(frozen=True, eq=False)
class LayerFlow:
    """What one layer computes.

    Args:
        needed: the own destination rows it computes, ``[num_dst]`` bool.
        plan: the halo of the edges into them.
        new_rows: for each source row of the whole plan its row in `plan`, or -1, ``[num_src]`` int64.
        number: of the layer, from 0.
        use: what the forward in progress has done with the layers.
    """

    needed: Tensor
    plan: HaloPlan
    new_rows: Tensor
    number: int
    use: FlowUse

    def note(self, name: str, comm: Ranks, sources: dict[str, Tensor]) -> None:
        """Note that `name` sends messages from `sources` over this layer.

        Raises:
            RefusedError: an earlier message of this forward had other sources, so these may have been made from its
                result, of which only the needed rows are computed; or a later layer came before this one.
        """
        use = self.use.of(comm.forwards)
        if self.number < use.last:
            raise RefusedError(
                f"{name} was given number {self.number} of graph.layers after number {use.last}: a layer computes "
                f"only what the layers after it need. Use them in their order, the first layer's first"
            )
        use.last = self.number
        mine = {_content(t) for t in sources.values() if t.numel()}
        if not mine <= use.sources.setdefault(self.number, mine):
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
        known = self.use.of(comm.forwards).sources.get(self.number)
        if known is None or table.dim() < 2 or not table.numel():  # degrees and the like are whole
            return
        if _content(table) not in known:
            raise RefusedError(
                "a node tensor is indexed by row 0 of an edge_index of graph.layers after a message over it: rows that "
                "the message left out may be read. Index with the next layer's edge_index, or use the graph"
            )

    def shards_of(self, edges: Tensor | Derivation) -> EdgeShards:
        """The edges of a list that end in needed nodes. Edge tensors keep the rows of the whole list.

        Args:
            edges: sources first, ``[2, num_edges]``, or what was done to another list.
        """
        kept_shards = self.plan.comm.caches.of(_FlowShards, self).lists
        known = kept_shards.find(edges)
        if known is not None:
            return known
        numbers = edges.whole() if isinstance(edges, Derivation) else edges
        src_rows, dst_rows = numbers
        kept = self.needed[dst_rows].nonzero().view(-1)
        found = build_shards(self.new_rows[src_rows[kept]], dst_rows[kept], self.plan.blocks, self.plan.num_dst)
        shards = tuple(replace(shard, rows=kept[shard.edge_rows]) for shard in found.shards)
        largest = int(torch.bincount(dst_rows).max()) if dst_rows.numel() else 0
        return kept_shards.keep(edges, EdgeShards(shards, found.num_dst, numbers.size(1), largest))


class _FlowShards:
    """The shards of the edge lists that went over one layer."""

    def __init__(self) -> None:
        self.lists: KnownLists[EdgeShards] = KnownLists()


def _content(tensor: Tensor) -> Content:
    """What identifies the content of a tensor: its memory, which is not reused while this reference exists."""
    return torch_private.StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), torch_private.version_of(tensor)
