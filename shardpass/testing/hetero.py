"""Small awkward graphs of several types, and sharding one in memory without a store: for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.core.graphs import ShardedGraph, ShardedHeteroGraph
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EdgeType, NodeType
from shardpass.data import EdgeArrays, RawGraph
from shardpass.data.in_memory import structure_of


@dataclass
class WholeHeteroGraph:
    """A graph of several types in one piece. `edges`: ``[2, E]`` each; `node` and `edge`: fields by type, then name."""

    num_nodes: dict[NodeType, int]
    edges: dict[EdgeType, Tensor]
    node: dict[NodeType, dict[str, Tensor]] = field(default_factory=dict)
    edge: dict[EdgeType, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def metadata(self) -> tuple[list[NodeType], list[EdgeType]]:
        return list(self.num_nodes), list(self.edges)


def awkward_hetero_graph(channels: int = 5, edge_channels: int = 3, seed: int = 0) -> WholeHeteroGraph:
    """Three node and six edge types in float64, every field on every type.

    A type with two nodes, an edge type without edges, self-loops, duplicate edges, hubs, isolated nodes, ties in ``x``.
    """
    generator = torch.Generator().manual_seed(seed)
    num_nodes = {"paper": 23, "author": 14, "venue": 2}
    counts: dict[EdgeType, int] = {
        ("paper", "cites", "paper"): 60,
        ("author", "writes", "paper"): 50,
        ("paper", "by", "author"): 40,
        ("venue", "prints", "paper"): 15,
        ("paper", "in", "venue"): 20,
        ("author", "knows", "author"): 0,
    }
    edges = {}
    for (src, _, dst), count in counts.items():
        ends = [torch.randint(0, num_nodes[kind], (count,), generator=generator) for kind in (src, dst)]
        for end, kind in zip(ends, (src, dst)):
            end[end >= num_nodes[kind] - 2] = 0  # the last two are isolated, the first one a hub
        edges[src, _, dst] = torch.stack(ends)
    edges["paper", "cites", "paper"][:, :6] = torch.arange(6)  # self-loops
    edges["author", "writes", "paper"][:, :5] = edges["author", "writes", "paper"][:, 5:10]  # duplicates
    edges["paper", "in", "venue"][1, 10:] = 1

    def made(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    node = {kind: {"x": made(count, channels)} for kind, count in num_nodes.items()}
    node["paper"]["x"][3:12] = node["paper"]["x"][3:12].round()
    edge = {k: {"edge_attr": made(n, edge_channels), "edge_weight": made(n, 1)[:, 0].abs()} for k, n in counts.items()}
    return WholeHeteroGraph(num_nodes, edges, node, edge)


def hetero_assignments(graph: WholeHeteroGraph, ranks: int) -> dict[str, dict[NodeType, Tensor]]:
    """Owners of the nodes by type: random; with an empty rank; each type on ranks of its own as far as they go."""
    generator = torch.Generator().manual_seed(ranks)

    def drawn(limit: int) -> dict[NodeType, Tensor]:
        return {kind: torch.randint(0, limit, (n,), generator=generator) for kind, n in graph.num_nodes.items()}

    found = {"random": drawn(ranks)}
    if ranks > 1:
        found["empty part"] = drawn(ranks - 1)
        found["types apart"] = {
            kind: torch.full((n,), i % ranks) for i, (kind, n) in enumerate(graph.num_nodes.items())
        }
    return found


def shard_hetero_in_memory(
    graph: WholeHeteroGraph, owners: dict[NodeType, Tensor], comm: Ranks, options: Options | None = None
) -> ShardedHeteroGraph:
    """This rank's share of `graph`, node i of a type owned by rank ``owners[type][i]``. Collective, same arguments."""
    found = sharded(graph, owners, comm, options)
    assert isinstance(found, ShardedHeteroGraph)
    return found


def sharded(
    graph: WholeHeteroGraph, owners: dict[NodeType, Tensor], comm: Ranks, options: Options | None
) -> ShardedGraph:
    """As `shard_hetero_in_memory`; a `ShardedGraph` where the types are `NODE` and `EDGE` alone."""
    edges = {kind: EdgeArrays(*ends) for kind, ends in graph.edges.items()}
    raw = RawGraph(graph.num_nodes, edges, graph.node, graph.edge).validate()
    options = options or Options()
    return structure_of(raw, owners, comm, options).graph(raw, comm, options)
