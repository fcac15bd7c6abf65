"""Message-flow graphs: per layer, only the nodes that the wanted ones need, as DGL's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dgl
import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import halo_fetch, halo_push
from shardpass.core.graphs import build_relation
from shardpass.core.sharding import Ownership
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.structure import CanonicalType, Edges, Nodes, NodeType

Rows = dict[NodeType, Tensor]


class SomeRows(Mapping[str, Tensor]):
    """Some rows of the fields of a frame, each selected when it is asked for."""

    def __init__(self, fields: Mapping[str, Tensor], rows: Tensor) -> None:
        self._fields, self._rows = fields, rows
        self._selected: dict[str, Tensor] = {}  # so that what is written into a field stays there

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._selected:
            self._selected[name] = self._fields[name].index_select(0, self._rows)
        return self._selected[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def mfgs(graph: ShardedDGLGraph, nodes: Any, num_layers: int, keep_seeds: bool = True) -> list[ShardedDGLGraph]:
    """A block for each layer of a model that is asked for the outputs of `nodes` only, the first layer's first.

    Collective. The destinations of a block come first among its sources, as in DGL; its data are rows of the graph's.
    The destinations of the last block are `nodes`, in their order on this rank.

    Args:
        graph: homogeneous or typed.
        nodes: own rows, bool ``[num_own]`` or int64; a dict by type where there are several. May be empty on a rank.
        num_layers: the same on every rank.
        keep_seeds: whether destinations are sources also where no edge begins in them; layers that read their own row
            need that.
    """
    wanted = rows_of(graph, nodes)
    blocks: list[ShardedDGLGraph] = []
    for _ in range(num_layers):
        sources = _sources(graph, wanted, keep_seeds)
        blocks.insert(0, _block(graph, sources, wanted))
        wanted = sources
    return blocks


def rows_of(graph: ShardedDGLGraph, nodes: Any) -> Rows:
    """Own nodes given as masks or rows, by type, as rows, int64."""
    given = nodes if isinstance(nodes, Mapping) else {graph.nodes_type(None): nodes}
    unknown = [kind for kind in given if kind not in graph.dsttypes]
    if unknown:
        raise ValueError(f"no node type {unknown[0]!r}; there are: {graph.dsttypes}")
    rows = {}
    for kind in graph.dsttypes:
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
            raise ValueError(f"nodes of {kind!r}: own rows in [0, {num}), each once, are expected on rank "
                             f"{graph.comm.rank}; ids of the whole graph are in graph.ndata[dgl.NID]")  # fmt: skip
        rows[kind] = chosen
    return rows


def _kept(edges: Edges, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the edges that end in `wanted`, and the place there of the node that each ends in."""
    places = torch.full((edges.plan.num_dst,), -1, device=wanted.device)
    places[wanted] = torch.arange(wanted.numel(), device=wanted.device)
    kept = (places[edges.dst_rows] >= 0).nonzero().view(-1)
    return kept, places[edges.dst_rows[kept]]


def _sources(graph: ShardedDGLGraph, wanted: Rows, keep_seeds: bool) -> Rows:
    """The own nodes that some rank reads to compute `wanted`. Collective."""
    read = {kind: torch.zeros(graph.num_src_nodes(kind), device=graph.device) for kind in graph.srctypes}
    with torch.no_grad():
        for kind in graph.canonical_etypes:
            edges = graph.edges_of(kind)
            marks = torch.zeros(edges.plan.num_src, device=graph.device)
            marks[edges.src_rows[_kept(edges, wanted[kind[2]])[0]]] = 1
            read[kind[0]] += halo_push(marks, edges.plan, f"nodes that {kind} reads")
    sources = {}
    for ntype, marks in read.items():
        seeds = wanted.get(ntype, marks.new_zeros(0, dtype=torch.int64))
        first = seeds if keep_seeds else seeds[marks[seeds] > 0]
        marks[seeds] = 0
        sources[ntype] = torch.cat([first, marks.nonzero().view(-1)])
    return sources


def _block(graph: ShardedDGLGraph, sources: Rows, wanted: Rows) -> ShardedDGLGraph:
    comm = graph.comm
    mine = [[rows.numel() for rows in side.values()] for side in (sources, wanted)]
    counts = comm.all_gather_object(mine, "nodes of a block")
    owned = {kind: Ownership.from_counts([theirs[0][place] for theirs in counts]) for place, kind in enumerate(sources)}
    totals = {kind: sum(theirs[1][place] for theirs in counts) for place, kind in enumerate(wanted)}
    edges = {}
    for kind in graph.canonical_etypes:
        edges[kind] = _block_edges(graph, kind, sources[kind[0]], wanted[kind[2]], owned[kind[0]])
    frames = graph.frames
    return ShardedDGLGraph(
        comm,
        {kind: _nodes(rows, owned[kind].num_total, frames.nodes[kind]) for kind, rows in sources.items()},
        {kind: _nodes(rows, totals[kind], frames.nodes[kind]) for kind, rows in wanted.items()},
        edges,
        is_block=True,
    )


def _nodes(rows: Tensor, total: int, frame: Mapping[str, Tensor]) -> Nodes:
    fields = SomeRows(frame, rows)
    return Nodes(rows.numel(), total, fields[dgl.NID], fields)


def _block_edges(
    graph: ShardedDGLGraph, kind: CanonicalType, sources: Tensor, wanted: Tensor, owned: Ownership
) -> Edges:
    edges, comm = graph.edges_of(kind), graph.comm
    kept, dst_rows = _kept(edges, wanted)
    numbers = torch.full((edges.plan.num_own_src,), -1, device=graph.device)
    numbers[sources] = owned.to_global(torch.arange(sources.numel(), device=graph.device), comm.rank)
    with torch.no_grad():
        numbers = halo_fetch(numbers, edges.plan, f"numbers of the sources of {kind}")
    fields = SomeRows(graph.frames.edges[kind], kept)
    options = edges.plan.options
    if options.backward == "auto":  # a block is gone before the out-edges that pulling needs have paid off
        options = replace(options, backward="push")
    relation = build_relation(
        comm, owned, numbers[edges.src_rows[kept]], dst_rows, wanted.numel(), edges.ids[kept], fields,
        options, edges.plan.ends,
    )  # fmt: skip
    total = sum(comm.all_gather_object(kept.numel(), f"edges of a block: {kind}"))
    return Edges.of(kind, relation, total)
