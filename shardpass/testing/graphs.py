"""Small awkward graphs, and sharding one in memory without a store: for parity tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, NODE
from shardpass.testing.hetero import WholeHeteroGraph, sharded


@dataclass
class WholeGraph:
    """A graph in one piece. ``edge_index`` ``[2, E]``; `node` and `edge` hold fields with one row per node or edge."""

    num_nodes: int
    edge_index: Tensor
    node: dict[str, Tensor] = field(default_factory=dict)
    edge: dict[str, Tensor] = field(default_factory=dict)

    def by_type(self) -> WholeHeteroGraph:
        """The same graph, with its only node type and edge type named as `ShardedGraph` names them."""
        return WholeHeteroGraph({NODE: self.num_nodes}, {EDGE: self.edge_index}, {NODE: self.node}, {EDGE: self.edge})


def awkward_graph(channels: int = 5, edge_channels: int = 3, seed: int = 0) -> WholeGraph:
    """About 40 nodes and 220 edges in float64: self-loops, duplicate edges, isolated nodes, hubs, ties in ``x``."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes, num_edges = 41, 220
    ends = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    ends[1, ends[1] >= num_nodes - 4] = 0  # nodes without in-edges, and a hub
    ends[0, ends[0] >= num_nodes - 2] = 1  # the last two nodes have no out-edges either: isolated
    ends[:, :6] = torch.arange(6)  # self-loops
    ends[:, 6:9] = ends[:, 9:12]  # duplicates
    x = torch.randn(num_nodes, channels, generator=generator, dtype=torch.float64)
    x[3:20] = x[3:20].round()  # ties between messages
    return WholeGraph(
        num_nodes,
        ends,
        {"x": x},
        {
            "edge_attr": torch.randn(num_edges, edge_channels, generator=generator, dtype=torch.float64),
            "edge_weight": torch.rand(num_edges, generator=generator, dtype=torch.float64) + 0.1,
        },
    )


def assignments(num_nodes: int, ranks: int, edge_index: Tensor) -> dict[str, Tensor]:
    """Owners of nodes, ``[num_nodes]`` each: random; with an empty rank; with a rank that has nodes but no edges."""
    generator = torch.Generator().manual_seed(ranks)
    found = {"random": torch.randint(0, ranks, (num_nodes,), generator=generator)}
    if ranks > 1:
        found["empty part"] = torch.randint(0, ranks - 1, (num_nodes,), generator=generator)
        without = torch.randint(0, ranks - 1, (num_nodes,), generator=generator)
        lonely = torch.bincount(edge_index[1], minlength=num_nodes) == 0
        found["no edges"] = torch.where(lonely, ranks - 1, without)
    return found


def shard_in_memory(graph: WholeGraph, owners: Tensor, comm: Ranks, options: Options | None = None) -> ShardedGraph:
    """This rank's share of `graph`, node i owned by rank ``owners[i]``. Collective, with the same arguments."""
    return sharded(graph.by_type(), {NODE: owners}, comm, options)
