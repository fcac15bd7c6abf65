"""Who owns the node with a given original id: a directory of which every rank keeps a share."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardpass.core.exchange import ask, exchange_arrays
from shardpass.core.graphs.graph import ShardedGraph
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import NodeType, Ownership

Array = np.ndarray[Any, Any]


class NodeDirectory:
    """Finds global ids of nodes by their original ids. Making one is collective, and so is each look-up.

    Rank r keeps the global ids of a range of original ids, 8 bytes each, and answers what falls into it.

    Args:
        comm: the ranks.
        owned: who owns which global ids.
        own_ids: original id of each own node, int64.
    """

    def __init__(self, comm: Ranks, owned: Ownership, own_ids: Array) -> None:
        self.comm, self.owned = comm, owned
        self._share = -(-max(owned.num_total, 1) // comm.size)
        homes = own_ids // self._share
        parts = [[own_ids[homes == rank], np.flatnonzero(homes == rank)] for rank in range(comm.size)]
        self._global = np.full(self._share, -1, dtype=np.int64)
        for rank, (ids, rows) in enumerate(exchange_arrays(comm, parts, "directory of nodes")):
            self._global[ids - comm.rank * self._share] = rows + owned.offsets[rank]

    def global_ids(self, ids: Array) -> Array:
        """The global id of each original id, int64, or -1 if there is no such node. Collective.

        Args:
            ids: int64. Each rank may ask for any number of them.
        """
        known = (ids >= 0) & (ids < self.owned.num_total)
        homes = np.where(known, ids // self._share, self.comm.rank)
        first = self.comm.rank * self._share
        places = np.where(known, ids, first)  # what is asked of this rank itself for unknown ids does not count

        def answer(asked: Array) -> Array:
            return self._global[asked - first]

        return np.where(known, ask(self.comm, homes, [places], answer, "look-up of nodes"), -1)


class _Directories:
    """The directories of one graph, by node type."""

    def __init__(self) -> None:
        self.by_type: dict[NodeType, NodeDirectory] = {}


def directory_of(graph: ShardedGraph, kind: NodeType) -> NodeDirectory:
    """The directory of the nodes of a type. It is made when it is first asked for. Collective."""
    known = graph.comm.caches.of(_Directories, graph).by_type
    if kind not in known:
        known[kind] = NodeDirectory(graph.comm, graph.ownership[kind], graph.node_ids_dict[kind].cpu().numpy())
    return known[kind]
