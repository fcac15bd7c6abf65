"""Small awkward graphs of several types, and sharding one in memory without a store: for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.graphs import OwnFields, ShardedGraph, ShardedHeteroGraph, build_relation, row_of_last
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EdgeType, NodeType, Ownership

Graph = TypeVar("Graph", bound=ShardedGraph)


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
    return shard_as(ShardedHeteroGraph, graph, owners, comm, options or Options())


def shard_as(
    kind_of_graph: type[Graph],
    graph: WholeHeteroGraph,
    owners: dict[NodeType, Tensor],
    comm: Ranks,
    options: Options,
) -> Graph:
    """As `shard_hetero_in_memory`; a `ShardedGraph` is made of a graph with the types `NODE` and `EDGE` alone."""
    ownership, node_ids, new_ids, fields = {}, {}, {}, {}
    for kind, owner in owners.items():
        order = torch.argsort(owner, stable=True)
        ownership[kind] = Ownership.from_counts(torch.bincount(owner, minlength=comm.size).tolist())
        new_ids[kind] = torch.empty_like(order)
        new_ids[kind][order] = torch.arange(order.numel())
        first, last = ownership[kind].offsets[comm.rank : comm.rank + 2]
        node_ids[kind] = order[first:last]
        own = {name: t[node_ids[kind]] for name, t in graph.node.get(kind, {}).items()}
        fields[kind] = OwnFields(own, comm, node_set(kind, node_ids[kind].numel()), lambda rows: rows)
    relations = {}
    for edge_type, edges in graph.edges.items():
        src, _, dst = edge_type
        edge_ids = (owners[dst][edges[1]] == comm.rank).nonzero().view(-1)
        own = {name: t[edge_ids] for name, t in graph.edge.get(edge_type, {}).items()}
        dst_rows = new_ids[dst][edges[1, edge_ids]] - ownership[dst].offsets[comm.rank]
        num_dst = ownership[dst].num_own(comm.rank)
        ends = (src, dst) if issubclass(kind_of_graph, ShardedHeteroGraph) else None
        last_node = row_of_last(node_ids[src], len(owners[src])) if src == dst else None
        src_ids = new_ids[src][edges[0, edge_ids]]
        relations[edge_type] = build_relation(
            comm, ownership[src], src_ids, dst_rows, num_dst, edge_ids, own, options, ends, last_node
        )
    classes = {kind: int(own["y"].max()) + 1 for kind, own in graph.node.items() if "y" in own}
    totals = {kind: edges.size(1) for kind, edges in graph.edges.items()}
    return kind_of_graph(comm, options, ownership, node_ids, fields, relations, total_edges=totals, num_classes=classes)
