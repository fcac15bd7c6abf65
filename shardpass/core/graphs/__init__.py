"""What a model is given: the sharded graph, its stand-ins for ``edge_index`` and ``batch``, graphs of several types.

This room describes a graph and the edge lists that are derived from it. It does not aggregate messages.
"""

from shardpass.core.graphs.any_rows import rows
from shardpass.core.graphs.as_data import GraphArgument, graph_of
from shardpass.core.graphs.batch_index import BatchIndex
from shardpass.core.graphs.device import is_on, require_device
from shardpass.core.graphs.directory import NodeDirectory, directory_of
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.embedding import NodeEmbedding, OwnRows, node_embeddings
from shardpass.core.graphs.gather import gather
from shardpass.core.graphs.given import LoadedGraphs, as_given, mark_fields
from shardpass.core.graphs.graph import ShardedGraph, one_type, require_graph
from shardpass.core.graphs.hetero_graph import ShardedHeteroGraph
from shardpass.core.graphs.last_node import row_of_last
from shardpass.core.graphs.node_ids import NodeIds, node_ids
from shardpass.core.graphs.original_order import refuse_original_order, refuse_two_numberings
from shardpass.core.graphs.readout import all_rows, reduce_rows
from shardpass.core.graphs.relation import OwnFields, Relation, build_relation, relation_of
from shardpass.core.graphs.reverse import ReversedEdges, reversed_edges
from shardpass.core.graphs.union import Piece, union

__all__ = [
    "BatchIndex",
    "GraphArgument",
    "LoadedGraphs",
    "NodeDirectory",
    "NodeEmbedding",
    "NodeIds",
    "OwnFields",
    "OwnRows",
    "Piece",
    "Relation",
    "ReversedEdges",
    "ShardedEdgeIndex",
    "ShardedGraph",
    "ShardedHeteroGraph",
    "all_rows",
    "as_given",
    "build_relation",
    "directory_of",
    "gather",
    "graph_of",
    "is_on",
    "mark_fields",
    "node_embeddings",
    "node_ids",
    "one_type",
    "reduce_rows",
    "refuse_original_order",
    "refuse_two_numberings",
    "relation_of",
    "require_device",
    "require_graph",
    "reversed_edges",
    "row_of_last",
    "rows",
    "union",
]
