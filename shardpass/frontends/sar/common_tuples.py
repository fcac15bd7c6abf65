"""What a rank has of a partition, as plain data."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

CanonicalType = tuple[str, str, str]
Ranges = list[tuple[int, int]]


class ShardEdgesAndFeatures(NamedTuple):
    """The edges from the nodes of one part into this rank's nodes.

    Attributes:
        edges: (source ids, destination ids), int64 [num_edges] each, in the numbering of `PartitionData.node_ranges`.
            Several edge types are sorted by type.
        edge_features: tensors with a row per edge. ``_ID`` (``dgl.EID``) is the number of the edge within its type,
            which DGL gave it when it partitioned the graph. ``_TYPE`` (``dgl.ETYPE``) is the index of its type in
            `PartitionData.edge_type_names`. A stored feature is called
            ``<source type>:<edge type>:<destination type>/<name>`` and has a row for each edge of that type.
    """

    edges: tuple[Tensor, Tensor]
    edge_features: dict[str, Tensor]


class PartitionData(NamedTuple):
    """This rank's part of a graph.

    Ids here number the nodes part by part, and within a part type by type. All node ids of this frontend are these.

    Attributes:
        all_shard_edges: for each part, the edges from its nodes into this rank's nodes.
        node_ranges: (first id, end) of each part's nodes.
        node_features: by ``<node type>/<name>``, with a row for each of this rank's nodes of the type. ``_TYPE``
            (``dgl.NTYPE``) is the index in `node_type_names` of each of its nodes.
        node_type_names: the node types, in the order of their nodes within a part.
        edge_type_names: (source type, edge type, destination type) of each edge type.
        partition_book: DGL's ``GraphPartitionBook``, which says how many nodes of each type a part has. `None` is
            allowed if all nodes have one type.
    """

    all_shard_edges: list[ShardEdgesAndFeatures]
    node_ranges: Ranges
    node_features: dict[str, Tensor]
    node_type_names: list[str]
    edge_type_names: list[CanonicalType]
    partition_book: Any = None


class SocketInfo(NamedTuple):
    """A network interface of this host."""

    name: str
    ip_addr: str
