"""What sampling reads of a sharded graph: who owns which nodes, their fields, and in-edges as CSR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from shardpass.core.ranks import Ranks
from shardpass.core.sharding import EdgeType, NodeType, Ownership

Array = Any


@dataclass
class InEdges:
    """The edges of one type into this rank's nodes, by destination and then original edge id.

    So the n-th in-edge of a node is the same for any number of ranks.

    Args:
        indptr: ``[num_own + 1]`` int64.
        src_ids: global source id of each edge.
        edge_ids: original id of each edge.
        rows: where each edge stands in the rank's edge tensors.
        fields: edge tensors of the rank, in the rank's order.
        weights: of the edges in the order here, float64; empty where no weights were asked for.
    """

    indptr: Array
    src_ids: Array
    edge_ids: Array
    rows: Array
    fields: Mapping[str, Tensor]
    weights: Array = field(default_factory=lambda: np.empty(0))


@dataclass
class Structure:
    """What draws read of one rank's share.

    Args:
        node_ids: original id of each of its nodes, by type, int64.
        edges: its in-edges by type.
    """

    node_ids: dict[NodeType, Array]
    edges: dict[EdgeType, InEdges]


@dataclass
class SampledSource:
    """One rank's share of a graph as sampling needs it; the same types in the same order on every rank.

    Args:
        comm: the ranks.
        ownership: of the nodes of each type.
        node_ids: original id of each own node, by type, int64.
        node_fields: own rows by type.
        edges: own in-edges by type.
        parts: the structure of every rank, where all can read it, see `shared`; None: neighbours are asked for.
    """

    comm: Ranks
    ownership: dict[NodeType, Ownership]
    node_ids: dict[NodeType, Array]
    node_fields: dict[NodeType, Mapping[str, Tensor]]
    edges: dict[EdgeType, InEdges]
    parts: Sequence[Structure] | None = None

    @property
    def own(self) -> Structure:
        """The structure of this rank."""
        return Structure(self.node_ids, self.edges)

    def into(self, node_type: NodeType) -> list[EdgeType]:
        """The edge types that end in a node type."""
        return [kind for kind in self.edges if kind[2] == node_type]
