"""What DGL's blocks are made of: for each layer, only the nodes that the wanted outputs need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import dgl
import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import halo_fetch, scatter_to_owners
from shardpass.core.graphs import build_relation
from shardpass.core.ranks import Options, plain_of
from shardpass.core.sharding import Ownership
from shardpass.frontends.dgl.frames import Frames, LazyFields
from shardpass.frontends.dgl.structure import CanonicalType, Edges, Nodes, NodeType
from shardpass.frontends.dgl.typed_graph import TypedGraph

Rows = dict[NodeType, Tensor]


class BlockParts(NamedTuple):
    """What a block is made of: its source and destination nodes by type, and its edges by canonical type."""

    sources: dict[NodeType, Nodes]
    destinations: dict[NodeType, Nodes]
    edges: dict[CanonicalType, Edges]


def parts_of_blocks(
    graph: TypedGraph, frames: Frames, nodes: Any, num_layers: int, keep_seeds: bool
) -> list[BlockParts]:
    """The block of each layer, the first layer's first. Collective; see `ShardedDGLGraph.mfgs`.

    Args:
        frames: the data of `graph`.
    """
    wanted = rows_of(graph, nodes)
    blocks: list[BlockParts] = []
    for _ in range(num_layers):
        sources = _sources(graph, wanted, keep_seeds)
        blocks.insert(0, _block(graph, frames, sources, wanted))
        wanted = sources
    return blocks


def rows_of(graph: TypedGraph, nodes: Any) -> Rows:
    """Own nodes as rows, int64, by type. They may be given as masks or as rows."""
    given = nodes if isinstance(nodes, Mapping) else {graph.nodes_type(None): nodes}
    unknown = [kind for kind in given if kind not in graph.ntypes]
    if unknown:
        raise ValueError(f"no node type {unknown[0]!r}; there are: {graph.ntypes}")
    rows = {}
    for kind in graph.ntypes:
        num = graph.nodes_of(kind).num
        held = given.get(kind, torch.zeros(0, dtype=torch.int64))
        if not isinstance(held, (Tensor, Sequence, np.ndarray)) or isinstance(held, str):
            raise ValueError(f"nodes of {kind!r}: expected a mask or own rows, got {held!r}")
        chosen = torch.as_tensor(held, device=graph.device)
        if chosen.numel() and chosen.dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
            raise ValueError(f"nodes of {kind!r}: expected a bool mask or own rows, int64 [n], got {chosen.dtype}")
        if chosen.dtype == torch.bool:
            if chosen.shape != (num,):
                raise ValueError(f"nodes of {kind!r}: a mask is bool [{num}] (own nodes), got {list(chosen.shape)}")
            chosen = chosen.nonzero().view(-1)
        chosen = chosen.to(torch.int64)
        outside = chosen.numel() and bool(((chosen < 0) | (chosen >= num)).any())
        if outside or torch.unique(chosen).numel() != chosen.numel():
            raise ValueError(
                f"nodes of {kind!r} on rank {graph.comm.rank}: expected own rows in [0, {num}), each once. Ids of the "
                f"whole graph are in graph.ndata[dgl.NID]"
            )
        rows[kind] = chosen
    return rows


def _kept(edges: Edges, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """``(positions, places)``: of the edges that end in `wanted`, and of the node in `wanted` where each ends."""
    places = torch.full((edges.plan.num_dst,), -1, device=wanted.device)
    places[wanted] = torch.arange(wanted.numel(), device=wanted.device)
    places = places[edges.dst_rows]
    kept = (places >= 0).nonzero().view(-1)
    return kept, places[kept]


def _sources(graph: TypedGraph, wanted: Rows, keep_seeds: bool) -> Rows:
    """The own nodes that some rank reads to compute `wanted`. Collective."""
    read = {kind: torch.zeros(graph.num_nodes(kind), device=graph.device) for kind in graph.ntypes}
    with torch.no_grad():
        for kind in graph.canonical_etypes:
            edges = graph.edges_of(kind)
            marks = torch.zeros(edges.plan.num_src, device=graph.device)
            marks[edges.src_rows[_kept(edges, wanted[kind[2]])[0]]] = 1
            read[kind[0]] += scatter_to_owners(marks, edges.plan, f"nodes that {kind} reads")
    sources = {}
    for ntype, marks in read.items():
        seeds = wanted.get(ntype, marks.new_zeros(0, dtype=torch.int64))
        first = seeds if keep_seeds else seeds[marks[seeds] > 0]
        marks[seeds] = 0
        sources[ntype] = torch.cat([first, marks.nonzero().view(-1)])
    return sources


def _block(graph: TypedGraph, frames: Frames, sources: Rows, wanted: Rows) -> BlockParts:
    comm = graph.comm
    mine = [[rows.numel() for rows in side.values()] for side in (sources, wanted)]
    counts = comm.all_gather_object(mine, "nodes of a block")
    owned = {kind: Ownership.from_counts([theirs[0][place] for theirs in counts]) for place, kind in enumerate(sources)}
    totals = {kind: sum(theirs[1][place] for theirs in counts) for place, kind in enumerate(wanted)}
    edges = {}
    for kind in graph.canonical_etypes:
        ends = sources[kind[0]], wanted[kind[2]], owned[kind[0]]
        options = graph.edges_of(kind).plan.options
        if options.backward == "auto":  # a block is short-lived: collecting the out-edges of pulling does not pay
            options = replace(options, backward="push")
        edges[kind] = edges_between(graph, kind, frames.edges[kind], *ends, options)
    return BlockParts(
        {kind: _nodes(rows, owned[kind].num_total, frames.nodes[kind]) for kind, rows in sources.items()},
        {kind: _nodes(rows, totals[kind], frames.nodes[kind]) for kind, rows in wanted.items()},
        edges,
    )


def _nodes(rows: Tensor, total: int, frame: Mapping[str, Tensor]) -> Nodes:
    fields = LazyFields(frame, lambda field: plain_of(field).index_select(0, rows))
    return Nodes(rows.numel(), total, fields[dgl.NID], fields)


def edges_between(
    graph: TypedGraph, kind: CanonicalType, stored: Mapping[str, Tensor], sources: Tensor, wanted: Tensor,
    owned: Ownership, options: Options,
) -> Edges:  # fmt: skip
    """The edges into the own rows `wanted`, whose sources are the `sources` of all ranks. Collective.

    Args:
        stored: the fields of all edges of the type.
        owned: how many `sources` each rank has.
    """
    edges, comm = graph.edges_of(kind), graph.comm
    kept, dst_rows = _kept(edges, wanted)
    numbers = torch.full((edges.plan.num_own_src,), -1, device=graph.device)
    numbers[sources] = owned.to_global(torch.arange(sources.numel(), device=graph.device), comm.rank)
    with torch.no_grad():
        numbers = halo_fetch(numbers, edges.plan, f"numbers of the sources of {kind}")
    picked = slice(None) if kept.numel() == edges.num else kept
    fields = LazyFields(stored, lambda field: plain_of(field)[picked])
    relation = build_relation(
        comm, owned, numbers[edges.src_rows[kept]], dst_rows, wanted.numel(), edges.ids[kept], fields,
        options, edges.plan.ends,
    )  # fmt: skip
    total = sum(comm.all_gather_object(kept.numel(), f"edges of a block: {kind}"))
    return Edges.of(kind, relation, total)
