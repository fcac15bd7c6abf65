"""`negative_sampling`: pairs of nodes that are not edges of the whole graph.

[Note: one shuffled list of all pairs]
A seed puts all pairs of nodes into one random order, by a bijection of their numbers. The negatives are the first pairs
in that order that are not edges, so they do not depend on the number of ranks, none comes twice, and if there are
too few, all are found. Each rank asks the owners of destinations about its share of the next pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import ask, exchange_arrays, halo_fetch
from shardpass.core.graphs import ShardedGraph, directory_of, graph_of
from shardpass.core.ranks import Ranks, agree
from shardpass.core.sampling.permutation import agreed_seed, shuffled
from shardpass.core.sharding import EdgeType

Array = np.ndarray[Any, Any]

_LABEL = "negative sampling"


def negative_sampling(
    graph: ShardedGraph,
    num_samples: int | float | None = None,
    edge_type: EdgeType | None = None,
    seed: int | None = None,
) -> Tensor:
    """This rank's share of random pairs of nodes that are not edges of the whole graph, ``[2, n]`` int64. Collective.

    Pairs hold ids of the whole graph, sources first, for `shardpass.rows` and `shardpass.node_ids`. All pairs that are
    not edges are equally likely, and no pair comes twice. As in `torch_geometric.utils.negative_sampling`, self-loops
    are left out where both ends have the same type, and you get fewer pairs if there are not so many. The shares of
    the ranks, one after the other, depend on nothing but the graph, the number and the seed; they differ by at most one
    pair in size. Edges that you left out of the graph, to test on them, may be among the pairs.

    The first call takes 8 bytes per own edge and 8 per own node, which are kept.

    Args:
        graph: this rank's share, or what stands for it inside a wrapped model.
        num_samples: how many pairs all ranks get together; `None` for as many as there are edges, and a float for a
            ratio of that. The same on every rank.
        edge_type: of the pairs, in a graph of several types.
        seed: the same on every rank. `None` draws one from rank 0's random numbers.

    Raises:
        ValueError: bad arguments.
        DivergenceError: on every rank, if ranks pass different arguments.
    """
    graph = graph_of(graph)
    comm, kind = graph.comm, _type_of(graph, edge_type)
    if num_samples is None:
        num_samples = graph.total_edges_of(kind)
    elif isinstance(num_samples, float):
        num_samples = int(num_samples * graph.total_edges_of(kind))
    if num_samples < 0:
        raise ValueError(f"negative_sampling: num_samples is {num_samples}; expected 0 or more")
    with comm.unfollowed():
        seed = agreed_seed(comm, _LABEL, f"{num_samples} negatives of {kind}", seed)
        src, dst = _even_shares(comm, _drawn(graph, _Pairs.of(graph, kind), num_samples, seed))
        return torch.from_numpy(np.stack([src, dst])).to(comm.device)


def _type_of(graph: ShardedGraph, edge_type: EdgeType | None) -> EdgeType:
    if edge_type is None and len(graph.edge_types) == 1:
        return graph.edge_types[0]
    if edge_type not in graph.edge_types:
        raise ValueError(f"negative_sampling: edge_type={edge_type!r}; expected one of {graph.edge_types}")
    return edge_type


class _Edges(NamedTuple):
    """The different own edges of one type, without self-loops where these are no pairs.

    Args:
        keys: ``source id * own destinations + own destination row``, sorted, int64.
        total: how many there are on all ranks.
    """

    keys: Array
    total: int


class _KnownEdges:
    """The edges of one graph, by type."""

    def __init__(self) -> None:
        self.by_type: dict[EdgeType, _Edges] = {}


@dataclass(frozen=True)
class _Pairs:
    """All pairs of nodes of two types, numbered from 0.

    Args:
        kind: the edge type.
        num_src, num_dst: nodes of the whole graph.
        edges: the pairs that are edges.
    """

    kind: EdgeType
    num_src: int
    num_dst: int
    edges: _Edges

    @classmethod
    def of(cls, graph: ShardedGraph, kind: EdgeType) -> _Pairs:
        """Those of an edge type. Collective."""
        known = graph.comm.caches.of(_KnownEdges, graph).by_type
        if kind not in known:
            known[kind] = _edges_of(graph, kind)
        num_src, num_dst = (graph.ownership[end].num_total for end in kind[::2])
        pairs = cls(kind, num_src, num_dst, known[kind])
        if pairs.count >= 2**62:
            raise ValueError(f"negative_sampling: {pairs.count} pairs of nodes are more than can be numbered")
        return pairs

    @property
    def has_loops(self) -> bool:
        """Whether a node with itself is a pair."""
        return self.kind[0] != self.kind[2]

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return self.num_src * (self.num_dst if self.has_loops else max(0, self.num_dst - 1))

    def at(self, numbers: Array) -> tuple[Array, Array]:
        """Sources and destinations of the pairs with these numbers, original ids."""
        src, dst = np.divmod(numbers, self.num_dst if self.has_loops else self.num_dst - 1)
        return src, dst if self.has_loops else dst + (dst >= src)


def _edges_of(graph: ShardedGraph, kind: EdgeType) -> _Edges:
    comm, relation, ids = graph.comm, graph.relations[kind], graph.node_ids_dict
    with torch.no_grad():
        src_ids = halo_fetch(ids[kind[0]].to(comm.device), relation.plan, f"{_LABEL}: ids of halo rows").cpu().numpy()
    src_rows, dst_rows = relation.edge_index.sources_first.cpu().numpy()
    src, own_dst = src_ids[src_rows], ids[kind[2]].cpu().numpy()
    if kind[0] == kind[2]:
        differ = src != own_dst[dst_rows]
        src, dst_rows = src[differ], dst_rows[differ]
    keys = np.unique(src * len(own_dst) + dst_rows)
    return _Edges(keys, sum(count for (count,) in agree(comm, f"{_LABEL}: edges", [len(keys)])))


def _drawn(graph: ShardedGraph, pairs: _Pairs, wanted: int, seed: int) -> list[Array]:
    """Places in the list of all negatives, sources and destinations of those that this rank found. Collective."""
    comm, possible = graph.comm, pairs.count - pairs.edges.total
    wanted = min(wanted, possible)
    found, position, columns = 0, 0, [np.empty((3, 0), dtype=np.int64)]
    while found < wanted:
        count = min(pairs.count - position, int(1.1 * (wanted - found) * pairs.count / possible) + 16)
        first, last = (position + count * rank // comm.size for rank in (comm.rank, comm.rank + 1))
        src, dst = pairs.at(shuffled(np.arange(first, last), pairs.count, seed))
        is_negative = ~_are_edges(graph, pairs, src, dst)
        counts = [own for (own,) in agree(comm, f"{_LABEL}: found", [int(is_negative.sum())])]
        places = found + sum(counts[: comm.rank]) + np.arange(counts[comm.rank])
        columns.append(np.stack([places, src[is_negative], dst[is_negative]])[:, places < wanted])
        found, position = found + sum(counts), position + count
    return list(np.concatenate(columns, axis=1))


def _are_edges(graph: ShardedGraph, pairs: _Pairs, src: Array, dst: Array) -> Array:
    """Whether pairs of original ids are edges, bool. Collective: the owners of the destinations answer."""
    comm, owned = graph.comm, graph.ownership[pairs.kind[2]]
    ids = directory_of(graph, pairs.kind[2]).global_ids(dst)
    owners = np.searchsorted(np.array(owned.offsets[1:]), ids, side="right")
    rows, keys = ids - np.array(owned.offsets)[owners], pairs.edges.keys
    num_own = owned.num_own(comm.rank)

    def answer(src_ids: Array, dst_rows: Array) -> Array:
        wanted = src_ids * num_own + dst_rows
        places = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
        return keys[places] == wanted if len(keys) else np.zeros(len(wanted), dtype=bool)

    return ask(comm, owners, [src, rows], answer, f"{_LABEL}: edges").astype(bool)


def _even_shares(comm: Ranks, columns: list[Array]) -> tuple[Array, Array]:
    """The pairs at this rank's share of the places. Collective. `columns` hold places, sources and destinations."""
    total = sum(count for (count,) in agree(comm, f"{_LABEL}: shares", [len(columns[0])]))
    owners = columns[0] * comm.size // max(1, total)
    parts = [[column[owners == rank] for column in columns] for rank in range(comm.size)]
    places, src, dst = (np.concatenate(got) for got in zip(*exchange_arrays(comm, parts, f"{_LABEL}: shares")))
    order = np.argsort(places)
    return src[order], dst[order]
