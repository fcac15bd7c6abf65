"""What sampling reads of a sharded graph: who owns which nodes, their fields, and in-edges as CSR.

Where all ranks are processes of one host, `share_structure` puts the structure of every rank into memory that they
share, and neighbours are drawn without messages. Each rank then draws what it owns from its own memory, and what
others own from theirs. Draws depend on the seed and original ids alone, so they are the same as those that owners make
and send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, WindowPool, halo_fetch
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import EdgeType, NodeType, Ownership

Array = np.ndarray[Any, Any]
Layout = list[tuple[str, int]]  # dtype and length of each array

_ALIGNMENT = 64  # bytes
_EDGE_ARRAYS = ("indptr", "src_ids", "edge_ids", "rows", "weights")


@dataclass(frozen=True)
class InEdges:
    """The edges of one type into this rank's nodes, ordered by destination and then by original edge id.

    So the n-th in-edge of a node is the same for any number of ranks.

    Args:
        indptr: where the in-edges of each own node begin, ``[num_own + 1]`` int64.
        src_ids: global source id of each edge.
        edge_ids: original id of each edge.
        rows: the row of each edge in the rank's edge tensors.
        fields: edge tensors of the rank, in the rank's order.
        weights: weight of each edge, float64, in the order of `edge_ids`. Empty if no weights were asked for.
    """

    indptr: Array
    src_ids: Array
    edge_ids: Array
    rows: Array
    fields: Mapping[str, Tensor]
    weights: Array = field(default_factory=lambda: np.empty(0))

    def ids(self, places: Array, dtype: Any) -> tuple[Array, Array]:
        """Source ids and edge ids of the edges at some places, as `dtype`."""
        return self.src_ids[places].astype(dtype, copy=False), self.edge_ids[places].astype(dtype, copy=False)


@dataclass(frozen=True)
class Structure:
    """What is read of one rank's share to draw neighbours.

    Args:
        node_ids: original id of each of its nodes, by type, int64.
        edges: its in-edges, by type.
    """

    node_ids: dict[NodeType, Array]
    edges: dict[EdgeType, InEdges]


@dataclass(frozen=True)
class SampledSource:
    """One rank's share of a graph, as sampling needs it. Every rank has the same types in the same order.

    Args:
        comm: the ranks.
        ownership: who owns the nodes of each type.
        node_ids: original id of each own node, by type, int64.
        node_fields: own rows, by type and name.
        edges: own in-edges, by type.
        parts: the structure of every rank if ranks share memory. If `None`, owners are asked for neighbours.
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


class _Sources:
    """The sources made of one graph, by the name of the weights."""

    def __init__(self) -> None:
        self.by_weight: dict[str | None, SampledSource] = {}


def source_of(graph: ShardedGraph, weight: str | None = None) -> SampledSource:
    """What sampling reads of `graph`. Collective. It is made once for each graph and takes 12 to 24 bytes per own edge.

    Args:
        weight: name of the edge field that holds weights, on every edge type.

    Raises:
        ValueError: on every rank, if an edge type has no such field or the field does not hold weights.
    """
    known = graph.comm.caches.of(_Sources, graph).by_weight
    if weight not in known:
        known[weight] = _source_of(graph, weight)
    return known[weight]


def _source_of(graph: ShardedGraph, weight: str | None) -> SampledSource:
    ownership = graph.ownership
    ids = graph.node_ids_dict
    edges = {}
    for kind, relation in graph.relations.items():
        src_rows, dst_rows = relation.edge_index.sources_first
        lists = relation.plan, src_rows, dst_rows, relation.edge_ids
        edges[kind] = in_edges(ownership[kind[0]], *lists, relation.fields, weight)
    source = SampledSource(
        graph.comm,
        ownership,
        {kind: ids[kind].cpu().numpy() for kind in ownership},
        {kind: graph.fields_of(kind) for kind in ownership},
        edges,
    )
    return share_structure(source, graph.options.share_memory)


def in_edges(
    sources: Ownership,
    plan: HaloPlan,
    src_rows: Tensor,
    dst_rows: Tensor,
    edge_ids: Tensor,
    fields: Mapping[str, Tensor],
    weight: str | None = None,
) -> InEdges:
    """The edges of one type, ordered by destination. Collective, since the ids of halo rows are fetched.

    Args:
        sources: who owns the source nodes.
        plan: the halo of the sources.
        src_rows: row of each edge's source, own rows first and halo rows behind them, ``[num_edges]``.
        dst_rows: own row of each edge's destination, ``[num_edges]``.
        edge_ids: original id of each edge, ``[num_edges]``.
        fields: edge tensors by name.
        weight: name of the field that holds weights.
    """
    weights = None if weight is None else _weights(plan.comm, fields, weight)
    own = sources.to_global(torch.arange(plan.num_own_src, device=plan.comm.device), plan.comm.rank)
    with torch.no_grad():
        global_ids = halo_fetch(own, plan, "ids of halo rows").cpu().numpy()
    dst, ids = dst_rows.cpu().numpy(), edge_ids.cpu().numpy()
    order = np.lexsort((ids, dst))
    indptr = np.zeros(plan.num_dst + 1, dtype=np.int64)
    np.cumsum(np.bincount(dst, minlength=plan.num_dst), out=indptr[1:])
    small = np.int32 if max(sources.num_total, len(order)) < 2**31 else np.int64
    src_ids = global_ids.astype(small)[src_rows.cpu().numpy()[order]]
    largest = int(ids.max()) if len(ids) else 0
    kept = ids[order].astype(np.int32 if largest < 2**31 else np.int64)
    sorted_weights = np.empty(0) if weights is None else weights[order]
    return InEdges(indptr, src_ids, kept, order.astype(small), fields, sorted_weights)


def _weights(comm: Ranks, fields: Mapping[str, Tensor], name: str) -> Array:
    """The weights of own edges, float64, in the rank's order. Collective: every rank raises the problem of one."""
    problem, values = None, np.empty(0)
    if name not in fields:
        known = ", ".join(sorted(fields)) or "none"
        problem = f"there is no edge field {name!r} to draw neighbours by; there are: {known}"
    else:
        found = fields[name].detach().cpu()
        values = found.to(torch.float64).numpy() if not found.is_complex() else values
        if found.dim() != 1 or found.is_complex():
            problem = f"edge field {name!r} is {found.dtype} {list(found.shape)}; expected one weight per edge, [edges]"
        elif not np.isfinite(values).all() or (values < 0).any():
            bad = values[~((values >= 0) & np.isfinite(values))][0]
            problem = f"edge field {name!r} holds {bad}; expected finite weights that are not negative"
    problems = comm.all_gather_object(problem, "sampling: weights")
    rank = next((rank for rank, text in enumerate(problems) if text), None)
    if rank is not None:
        raise ValueError(f"{problems[rank]} (found on rank {rank})")
    return values


def share_structure(source: SampledSource, allowed: bool = True) -> SampledSource:
    """`source` with the structure of every rank if all ranks are on one host and can share memory. Collective.

    Its own arrays are then in shared memory too, and you can free those of the source that you gave.

    Args:
        allowed: `Options.share_memory`, the same on every rank.

    Returns:
        `source` itself if ranks are threads, are on several hosts, or cannot share memory.
    """
    comm = source.comm
    pool = comm.caches.of(WindowPool)
    if not allowed or not comm.shares_memory or pool.refused or comm.size == 1 or len(comm.local_ranks) < comm.size:
        return source
    found = placed(source)
    pool.refused = found is None
    return source if found is None else found


def placed(source: SampledSource) -> SampledSource | None:
    """`source` with the arrays of all ranks in memory of `Communicator.share`, or `None` without it. Collective."""
    comm, arrays = source.comm, _arrays(source)
    layout = [(array.dtype.str, len(array)) for array in arrays]
    memory = comm.share(sum(_aligned(array.nbytes) for array in arrays), "sampling: structure")
    if memory is None:
        return None
    for view, array in zip(_views(memory[comm.rank], layout), arrays):
        view[:] = array
    layouts = comm.all_gather_object(layout, "sampling: layout of the structure")  # from here on all may read
    parts = [_structure(source, _views(memory[rank], layouts[rank])) for rank in range(comm.size)]
    own = parts[comm.rank]
    edges = {kind: replaced(held, fields=source.edges[kind].fields) for kind, held in own.edges.items()}
    return replaced(source, node_ids=own.node_ids, edges=edges, parts=parts)


def _arrays(source: SampledSource) -> list[Array]:
    edges = [getattr(held, name) for held in source.edges.values() for name in _EDGE_ARRAYS]
    return edges + list(source.node_ids.values())


def _structure(source: SampledSource, arrays: list[Array]) -> Structure:
    """The structure that is made of the arrays of one rank, which are in the order of `_arrays`."""
    left = iter(arrays)
    edges = {kind: InEdges(fields={}, **{name: next(left) for name in _EDGE_ARRAYS}) for kind in source.edges}
    return Structure({kind: next(left) for kind in source.node_ids}, edges)


def _views(memory: Tensor, layout: Layout) -> list[Array]:
    found, at = [], 0
    for dtype, length in layout:
        size = length * np.dtype(dtype).itemsize
        found.append(memory.numpy()[at : at + size].view(dtype))
        at += _aligned(size)
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
