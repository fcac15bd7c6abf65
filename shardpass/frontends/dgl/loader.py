"""`DataLoader`: DGL's mini-batches of blocks, drawn from a sharded graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import MultiLayerFullNeighborSampler, NeighborSampler
from torch import Tensor

from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import takes_followed
from shardpass.core.sampling import (
    IDS,
    EpochLoader,
    Sample,
    SampledSource,
    Sampler,
    Seeds,
    Settings,
    in_edges,
    is_short,
    share_structure,
)
from shardpass.core.sharding import Ownership
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.blocks import rows_of
from shardpass.frontends.dgl.convert import graph as to_dgl
from shardpass.frontends.dgl.frames import PlainFields
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.structure import CanonicalType, NodeType

Array = np.ndarray[Any, Any]


class DataLoader(EpochLoader):
    """Mini-batches of blocks, as `dgl.dataloading.DataLoader` yields them. Collective.

    Every rank makes the same loader and iterates over it in step. All ranks take the same number of batches,
    ``len(loader)``.

    It yields ``(input_nodes, output_nodes, blocks)``: the original ids of the nodes that the first block reads and of
    those that the last block computes (dicts by type if there are several types), and ordinary DGL blocks, for a model
    that is not wrapped. ``dgl.NID`` and ``dgl.EID`` are original ids. The sources of the first block and the
    destinations of the last one have the graph's node fields, and every block its edge fields. If the sampler
    prefetches fields, they have those only.

    The seeds of a step, over all ranks, and the neighbours that are drawn in each layer depend on `seed`, the epoch and
    the step, not on the ranks.

    Args:
        graph: what `shardpass.load` returned, or `shardpass.dgl.graph` made of it.
        indices: the seeds among own nodes, as a mask, bool ``[num_own]``, as own rows, or as a dict of these by type.
        graph_sampler: a `dgl.dataloading.NeighborSampler` with its fanouts, `replace`, `prob` or `mask`, and names to
            prefetch.
        batch_size: the most seeds of a rank in a step. A step of all ranks takes ``batch_size * comm.size``.
        shuffle: whether the seeds of all ranks have a new random order in every epoch. Otherwise they are in the order
            of their original ids.
        drop_last: whether to leave out a last step that is not full.
        seed: decides everything that is random.
        prefetch: how many batches a thread makes ahead. With 0 there is no thread.

    Raises:
        ValueError: an argument is not allowed (on the rank that has it), or some rank would have no seed in the last
            step (on every rank).
        RefusedError: the sampler is of another class.
        DivergenceError: ranks make different loaders (on every rank).
    """

    @takes_followed("number")
    def __init__(
        self,
        graph: ShardedGraph | ShardedDGLGraph,
        indices: Any,
        graph_sampler: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        prefetch: int = 2,
        **kwargs: Any,
    ) -> None:
        whole = graph if isinstance(graph, ShardedDGLGraph) else to_dgl(graph)
        _refuse(kwargs, graph_sampler, whole.comm.device)
        rows = {kind: chosen.cpu().numpy() for kind, chosen in rows_of(whole, indices).items()}
        settings = settings_of(whole, graph_sampler, batch_size, shuffle, drop_last, seed, prefetch)
        self._types, sampler = whole.ntypes, sampler_of(whole, settings)
        self._source_names, self._label_names = _fields_of(whole, graph_sampler)
        source, types = sampler.source, self._types
        largest = max(owned.num_total for owned in source.ownership.values()) if source.ownership else 0
        ids = [source.node_ids[kind][rows[kind]] + place * (largest + 1) for place, kind in enumerate(types)]
        place = [np.full(len(rows[kind]), place) for place, kind in enumerate(types)]
        owned = [rows[kind] + source.ownership[kind].offsets[whole.comm.rank] for kind in types]
        columns = [np.concatenate(place), np.concatenate(owned)]
        self._begin(sampler, np.concatenate(ids), columns)
        if is_short(self._total, batch_size, whole.comm.size, drop_last):
            raise ValueError(
                f"{self._total} seeds in batches of {batch_size} on {whole.comm.size} ranks leave some ranks "
                f"without a seed in the last step, and DGL has no blocks without nodes: use drop_last=True, or larger "
                f"batches"
            )

    def _make(self, seeds: Seeds, seed: int) -> tuple[Any, Any, list[Any]]:
        place, ids = seeds.columns
        by_type = {kind: ids[place == i] for i, kind in enumerate(self._types)}
        return draw_blocks(self._sampler, by_type, seed, self._source_names, self._label_names)


def settings_of(
    graph: ShardedDGLGraph, sampler: Any, batch_size: int, shuffle: bool, drop_last: bool, seed: int, prefetch: int
) -> Settings:
    """The settings that a sampler of DGL and the arguments of a loader stand for."""
    sources, labels = _fields_of(graph, sampler)
    nodes = {kind: sorted({*sources[kind], *labels[kind]}) for kind in graph.ntypes}
    wanted = _names(getattr(sampler, "prefetch_edge_feats", None), graph.canonical_etypes, graph.to_canonical_etype)
    edges = {kind: list(wanted[kind]) for kind in graph.canonical_etypes} if wanted else _stored(graph.frames.edges)
    options = [graph.edges_of(kind).plan.options for kind in graph.canonical_etypes]
    return Settings(
        _fanouts(graph, sampler.fanouts), batch_size, shuffle, drop_last, sampler.replace, sampler.prob, seed,
        prefetch, nodes, edges, every_layer=True, wire=options[0].wire_dtype if options else None,
    )  # fmt: skip


def sampler_of(graph: ShardedDGLGraph, settings: Settings) -> Sampler:
    """What draws neighbourhoods from `graph`. Collective."""
    return Sampler(graph.comm, settings, "", lambda weight: _source_of(graph, weight))


def draw_blocks(
    sampler: Sampler,
    seeds: Mapping[NodeType, Array],
    seed: int,
    source_names: Mapping[NodeType, Sequence[str]],
    label_names: Mapping[NodeType, Sequence[str]],
) -> tuple[Any, Any, list[Any]]:
    """``(input_nodes, output_nodes, blocks)`` for `seeds`, global ids by type. Collective.

    Args:
        source_names: fields of the source nodes of the first block, by type.
        label_names: fields of the destinations of the last one.
    """
    found, _, rows = sampler.draw(seeds, seed)
    ids = {kind: held[IDS] for kind, held in rows.items()}
    blocks = [_block(sampler, found, layer, ids) for layer in reversed(range(len(found.hops)))]
    for kind, held in rows.items():
        num_seeds = found.num_nodes[kind][0]
        if blocks and kind in blocks[0].srctypes:
            blocks[0].srcnodes[kind].data.update({name: held[name] for name in source_names[kind]})
        if blocks and kind in blocks[-1].dsttypes:
            blocks[-1].dstnodes[kind].data.update({name: held[name][:num_seeds] for name in label_names[kind]})
    outputs = {kind: ids[kind][: found.num_nodes[kind][0]] for kind in ids}
    if len(ids) == 1:
        return next(iter(ids.values())), next(iter(outputs.values())), blocks
    return ids, outputs, blocks


def _block(sampler: Sampler, found: Sample, layer: int, ids: Mapping[NodeType, Tensor]) -> Any:
    source, device = sampler.source, sampler.source.comm.device
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    drawn = found.hops[layer]
    ends = dict.fromkeys(source.edges, (nothing, nothing))
    for kind, edges in drawn.items():
        ends[kind] = torch.from_numpy(edges.src).to(device), torch.from_numpy(edges.dst).to(device)
    num_dst = {kind: counts[layer] for kind, counts in found.num_nodes.items()}
    num_src = {kind: counts[layer + 1] for kind, counts in found.num_nodes.items()}
    block = dgl.create_block(ends, num_src_nodes=num_src, num_dst_nodes=num_dst, device=device)
    for ntype, held in ids.items():
        block.srcnodes[ntype].data[dgl.NID] = held[: num_src[ntype]]
        block.dstnodes[ntype].data[dgl.NID] = held[: num_dst[ntype]]
    for kind in source.edges:
        data, fields = block.edges[kind].data, source.edges[kind].fields
        if kind in drawn:
            data[dgl.EID] = torch.from_numpy(drawn[kind].edge_ids).to(device)
            data.update(drawn[kind].fields)
        else:
            data[dgl.EID] = nothing
            data.update({name: fields[name].detach()[:0] for name in sampler.drawer.edge_fields[kind]})
    return block


def _source_of(graph: ShardedDGLGraph, weight: str | None) -> SampledSource:
    """`graph` as sampling reads it. Collective."""
    comm, frames = graph.comm, graph.frames
    counts = comm.all_gather_object([graph.nodes_of(kind).num for kind in graph.ntypes], "sampling: nodes")
    ownership = {
        kind: Ownership.from_counts([theirs[place] for theirs in counts]) for place, kind in enumerate(graph.ntypes)
    }
    edges = {}
    for kind in graph.canonical_etypes:
        own = graph.edges_of(kind)
        lists = own.plan, own.src_rows, own.dst_rows, own.ids
        edges[kind] = in_edges(ownership[kind[0]], *lists, PlainFields(frames.edges[kind]), weight)
    ids = {kind: graph.nodes_of(kind).ids.cpu().numpy() for kind in graph.ntypes}
    source = SampledSource(
        comm, ownership, ids, {kind: PlainFields(frames.nodes[kind]) for kind in graph.ntypes}, edges
    )
    options = [graph.edges_of(kind).plan.options for kind in graph.canonical_etypes]
    return share_structure(source, all(given.share_memory for given in options))


def _stored(frames: Mapping[Any, Mapping[str, Tensor]]) -> dict[Any, list[str]]:
    return {kind: sorted(name for name in frame if name not in (dgl.NID, dgl.EID)) for kind, frame in frames.items()}


def _fields_of(graph: ShardedDGLGraph, sampler: Any) -> tuple[dict[NodeType, list[str]], dict[NodeType, list[str]]]:
    """Names of the fields of the first block's sources and of the last one's destinations, by type."""
    stored = _stored(graph.frames.nodes)
    sources = _names(getattr(sampler, "prefetch_node_feats", None), graph.ntypes, str)
    labels = _names(getattr(sampler, "prefetch_labels", None), graph.ntypes, str)
    if not sources and not labels:
        return stored, stored
    return {kind: list(sources.get(kind, ())) for kind in stored}, {kind: list(labels.get(kind, ())) for kind in stored}


def _names(given: Any, kinds: Sequence[Any], canonical: Any) -> dict[Any, Sequence[str]]:
    if not given:
        return {}
    if isinstance(given, Mapping):
        found = {canonical(kind): names for kind, names in given.items()}
        return {kind: found.get(kind, ()) for kind in kinds}
    return dict.fromkeys(kinds, given)


def _fanouts(graph: ShardedDGLGraph, fanouts: Any) -> list[dict[CanonicalType, int]]:
    """The fanout of each hop by edge type, beginning with the seeds' hop. DGL begins with the first layer's."""
    if not isinstance(fanouts, (list, tuple)) or not fanouts:
        raise ValueError(f"fanouts of the sampler is {fanouts!r}; expected a list of one number per layer")
    found = []
    for fanout in reversed(fanouts):
        given = fanout if isinstance(fanout, Mapping) else dict.fromkeys(graph.canonical_etypes, fanout)
        by_type: dict[CanonicalType, Any] = {graph.to_canonical_etype(kind): n for kind, n in given.items()}
        missing = [kind for kind in graph.canonical_etypes if kind not in by_type]
        whole = all(isinstance(number, (int, np.integer)) for number in by_type.values())
        if missing or not whole or any(number < -1 for number in by_type.values()):
            raise ValueError(
                f"fanouts holds {fanout}; expected an integer, -1 or more, for each edge type of "
                f"{graph.canonical_etypes}"
            )
        found.append({kind: int(number) for kind, number in by_type.items()})
    return found


def _refuse(kwargs: Mapping[str, Any], sampler: Any, device: torch.device) -> None:
    for name, value in kwargs.items():
        is_ours = name == "device" and value and torch.device(value) in (device, torch.device(device.type))
        if not value or name == "use_ddp" or is_ours:
            continue
        raise TypeError(
            f"DataLoader got {name}={value!r}, which is not supported on a sharded graph: a thread of this process "
            f"makes `prefetch` batches ahead, on the device of the communicator. Leave it out"
        )
    if type(sampler) not in (NeighborSampler, MultiLayerFullNeighborSampler):
        raise RefusedError(
            f"{type(sampler).__name__} is not supported on a sharded graph: the ranks that own nodes draw their "
            f"neighbours. Use dgl.dataloading.NeighborSampler"
        )
    if sampler.edge_dir != "in":
        raise RefusedError(
            "NeighborSampler(edge_dir='out') is not supported, since a rank owns the in-edges of its nodes: use 'in'"
        )
