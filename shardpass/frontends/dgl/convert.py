"""From the engine's graph to what stands for a DGLGraph."""

from __future__ import annotations

from collections.abc import Iterable

from shardpass.core.graphs import ShardedGraph
from shardpass.core.sharding import EDGE, NODE, NodeType
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.structure import CanonicalType, Edges, Nodes

DGL_NODE = "_N"
DGL_EDGE: CanonicalType = ("_N", "_E", "_N")


def graph(sharded: ShardedGraph) -> ShardedDGLGraph:
    """A graph from `shardpass.load` as what stands for a DGLGraph. Collective, since out-degrees are counted.

    Its data hold the stored node and edge fields under their names, and original ids under ``dgl.NID`` and ``dgl.EID``.

    Raises:
        TypeError: `sharded` is not such a graph.
        ValueError: it was loaded with ``Options(stream_structure=True)``, which is for PyG's layers.
    """
    if not isinstance(sharded, ShardedGraph):
        raise TypeError(f"expected the graph that shardpass.load or shard returned, found a {type(sharded).__name__}")
    if sharded.options.stream_structure:
        raise ValueError("dgl.graph of a graph loaded with Options(stream_structure=True): load it without that option")
    node_types, edge_types = ({NODE: DGL_NODE}, {EDGE: DGL_EDGE}) if sharded.is_homogeneous else ({}, {})
    nodes = {
        node_types.get(kind, kind): Nodes(
            owned.num_own(sharded.comm.rank),
            owned.num_total,
            sharded.node_ids_dict[kind].to(sharded.comm.device),
            sharded.fields_of(kind),
        )
        for kind, owned in sharded.ownership.items()
    }
    edges = {}
    for kind, relation in sharded.relations.items():
        canonical = edge_types.get(kind, kind)
        edges[canonical] = Edges.of(canonical, relation, sharded.total_edges_of(kind))
    made = ShardedDGLGraph(sharded.comm, *_sides(nodes, edges), edges, ntypes=list(nodes))
    made.core = sharded
    return made


def _sides(
    nodes: dict[NodeType, Nodes], edges: Iterable[CanonicalType]
) -> tuple[dict[NodeType, Nodes], dict[NodeType, Nodes]]:
    """Sources and destinations: all nodes, unless every edge goes from one set of types to another, as DGL has it."""
    ends = {kind[2] for kind in edges}
    if ends & {kind[0] for kind in edges}:
        return nodes, nodes
    return {kind: n for kind, n in nodes.items() if kind not in ends}, {
        kind: nodes[kind] for kind in nodes if kind in ends
    }
