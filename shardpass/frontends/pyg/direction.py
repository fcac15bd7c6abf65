"""The edges of one call in the direction of its messages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from shardpass.core.exchange import HaloPlan
from shardpass.core.graphs import ReversedEdges, ShardedEdgeIndex, reversed_edges
from shardpass.core.ranks import Ranks, agree, unfollowed
from shardpass.core.sharding import DerivedShards, EdgeShards
from shardpass.errors import RefusedError


@dataclass(frozen=True)
class Direction:
    """The edges of one call: those of the list that a layer was given, or of the reversed list.

    Args:
        name: of the layer.
        plan, shards: of the edges in the direction of the messages.
        against: carries edge tensors between the two directions; `None` where messages follow the edges.
    """

    name: str
    plan: HaloPlan
    shards: EdgeShards
    against: ReversedEdges | None

    @classmethod
    def of(cls, conv: MessagePassing, name: str, edge_index: ShardedEdgeIndex) -> Direction:
        """The direction in which `conv` sends messages over `edge_index`. Collective where it is against the edges."""
        with edge_index.plan.comm.unfollowed():
            return cls._of(conv, name, edge_index)

    @classmethod
    def _of(cls, conv: MessagePassing, name: str, edge_index: ShardedEdgeIndex) -> Direction:
        follows = conv.flow == "source_to_target"
        flow = edge_index.flow
        if follows != edge_index.is_reversed:
            return cls(name, edge_index.plan if flow is None else flow.plan, _shards_of(edge_index), None)
        if flow is not None:
            raise RefusedError(
                f"{name}: messages against the direction of the edges do not work with graph.layers(). Call the model "
                f"with the graph"
            )
        against = reversed_edges(edge_index, name)
        return cls(name, against.edge_index.plan, _shards_of(against.edge_index), against)

    @property
    def comm(self) -> Ranks:
        """The ranks."""
        return self.plan.comm

    @unfollowed(0)
    def to_edges(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a call, in the order of `shards` if they have a row per edge on every rank. Collective."""
        against = self.against
        if against is None or not tensors:
            return tensors
        names = sorted(tensors)
        for tensor in tensors.values():
            self.comm.require_rows(tensor, self.plan.edge_set(against.num_old), is_table=True)
        mine = [int(tensors[n].size(0) == against.num_old) for n in names]
        answers = agree(self.plan.comm, f"{self.name}: edge tensors", [len(names), *mine])
        common = {n for n, *flags in zip(names, *(answer[1:] for answer in answers)) if all(flags)}
        found = {n: against.to_new(t, f"{self.name}: {n}") if n in common else t for n, t in sorted(tensors.items())}
        for name in common:
            self.comm.mark_rows(found[name], self.plan.edge_set(found[name].size(0)))
        return found

    @unfollowed(0)
    def from_edges(self, rows: Tensor) -> Tensor:
        """A result per edge in the order of the edge list that the layer was given."""
        if self.against is None:
            return rows
        rows = self.against.to_old(rows, f"{self.name}: edge result")
        self.comm.mark_rows(rows, self.plan.edge_set(rows.size(0)))
        return rows


def _shards_of(edge_index: ShardedEdgeIndex) -> EdgeShards:
    """The shards of an edge list. Those of a list that forward derived are found again in the next forward."""
    if edge_index.flow is not None:
        return edge_index.flow.shards_of(edge_index.edges)
    if edge_index.shards is not None:
        return edge_index.shards
    plan = edge_index.plan
    return plan.comm.caches.of(DerivedShards, plan).find(edge_index.edges, plan.blocks, plan.num_dst)
