"""A sharded graph as sampling reads it: per edge type, a rank's in-edges as CSR in the order of original edge ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, halo_fetch
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Ranks
from shardpass.core.sampling.shared import share_structure
from shardpass.core.sampling.structure import InEdges, SampledSource
from shardpass.core.sharding import Ownership

Array = Any


def source_of(graph: ShardedGraph, weight: str | None = None) -> SampledSource:
    """`graph` as sampling reads it; made once, and kept with the graph. Collective. 12 to 24 bytes per own edge.

    Args:
        weight: name of the edge field of weights, on every edge type.

    Raises:
        ValueError: on every rank, if there is no such field, or it does not hold weights.
    """
    kept = vars(graph).setdefault("_sampled", {})
    if weight not in kept:
        kept[weight] = _source_of(graph, weight)
    found: SampledSource = kept[weight]
    return found


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
    """The edges of one type by destination. Collective: the ids of halo rows are fetched.

    Args:
        sources: who owns the source nodes.
        plan: the halo of the sources.
        src_rows, dst_rows, edge_ids: ``[num_edges]``: own-first source rows, own destination rows, original ids.
        fields, weight: edge tensors, and the name of the one that holds weights.
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
    """The weights of own edges, float64 in the rank's order. Collective: a problem of one rank is raised on all."""
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
