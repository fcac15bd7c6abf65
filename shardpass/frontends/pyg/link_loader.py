"""`LinkNeighborLoader`: mini-batches of links with the neighbourhoods of their ends, drawn from a sharded graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

from shardpass.core.graphs import NodeIds, ShardedGraph, directory_of
from shardpass.core.ranks import derive_seed, takes_followed, tensor_digest
from shardpass.core.sampling import SampledSource, Seeds, keys_of, uniforms
from shardpass.core.sharding import EdgeType
from shardpass.frontends.pyg.loader import BatchLoader
from shardpass.frontends.pyg.loader_arguments import settings_of

Array = np.ndarray[Any, Any]


class LinkNeighborLoader(BatchLoader):
    """Mini-batches of links, as `torch_geometric.loader.LinkNeighborLoader` yields them. Collective.

    This is a `NeighborLoader` with links as seeds. A batch has ``input_id`` and ``edge_label_index``, the numbers that
    the ends of its links have among its nodes. With labels or binary negatives it has ``edge_label``: negatives have
    label 0, and your labels are raised by one if they begin with 0. With triplets it has ``src_index``,
    ``dst_pos_index`` and ``dst_neg_index`` instead. As in PyG, negatives are drawn uniformly from all nodes and may
    happen to be edges, and the links themselves may be drawn as neighbours. In the last step of an epoch a rank may
    have no link; its labels are then empty.

    Args:
        graph: what `shardpass.load` returned.
        num_neighbors: as in `NeighborLoader`.
        edge_label_index: the links of this rank; each link belongs to one rank. `None` for all own edges, a bool mask
            over them, their positions, or original node ids ``[2, n]``. For a heterogeneous graph an edge type, or a
            pair of an edge type and one of these.
        edge_label: a number for each link, ``[n]``.
        neg_sampling: ``"binary"``, ``"triplet"`` or a `torch_geometric.sampler.NegativeSampling` without weights.
        neg_sampling_ratio: the same as ``NegativeSampling("binary", ratio)``.
        batch_size: the most links per rank and step; negatives do not count.
        shuffle, drop_last, replace, weight_attr, transform, seed, prefetch, node_attrs, edge_attrs: as in
            `NeighborLoader`.

    Raises:
        ValueError: bad arguments.
        DivergenceError: on every rank, if ranks make different loaders.
    """

    @takes_followed("number")
    def __init__(
        self,
        graph: ShardedGraph,
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = settings_of("LinkNeighborLoader", graph, num_neighbors, **kwargs)
        self._negatives = _negatives(neg_sampling, neg_sampling_ratio)
        self._type, given = _type_and_links(graph, edge_label_index)
        self._dtype = None if edge_label is None else edge_label.dtype
        words = f"links of {self._type}, labels {edge_label is not None and edge_label.dtype}, {self._negatives}"
        sampler = self._prepare(graph, settings, transform, words)
        ids, src, dst = _links(graph, sampler.source, self._type, given)
        self._begin(sampler, ids, [ids, src, dst, _label_column(graph, edge_label, len(ids), self._negatives)])

    def _batch(self, seeds: Seeds, seed: int) -> Data | HeteroData:
        ids, src, dst, label = seeds.columns
        count, negatives, device = seeds.counted, self._negatives, self._graph.comm.device
        src_neg, dst_neg = self._draw_negatives(ids[:count], seed)
        ends: dict[str, Array] = {}
        for kind, part in ((self._type[0], [src, src_neg]), (self._type[2], [dst, dst_neg])):
            ends[kind] = np.concatenate([ends.get(kind, ids[:0]), *part])
        batch, numbers = self._drawn(ends, seed)
        src_numbers = torch.from_numpy(numbers[self._type[0]]).to(device)
        dst_numbers = torch.from_numpy(numbers[self._type[2]]).to(device)[-(len(dst) + len(dst_neg)) :]
        store = self._store(batch, self._type)
        store.input_id = torch.from_numpy(ids[:count]).to(device)
        if negatives is not None and negatives.amount_is_triplets:
            self._store(batch, self._type[0]).src_index = src_numbers[:count]
            targets = self._store(batch, self._type[2])
            targets.dst_pos_index = dst_numbers[:count]
            targets.dst_neg_index = dst_numbers[len(dst) :].view(count, int(negatives.amount)).squeeze(-1)
            return batch  # type: ignore[no-any-return]
        kept = torch.ones(len(src) + len(src_neg), dtype=torch.bool, device=device)
        kept[count : len(src)] = False  # a link that does not count is left out
        store.edge_label_index = torch.stack([src_numbers[: len(kept)][kept], dst_numbers[kept]])
        if self._dtype is not None or negatives is not None:
            labels = torch.from_numpy(label[:count]).view(torch.float64).to(self._dtype or torch.float32)
            store.edge_label = torch.cat([labels, labels.new_zeros(len(src_neg))]).to(device)
        return batch  # type: ignore[no-any-return]

    def _draw_negatives(self, ids: Array, seed: int) -> tuple[Array, Array]:
        """Global ids of the ends of negatives: sources only where pairs are drawn."""
        if self._negatives is None:
            return ids[:0], ids[:0]
        owned = self._sampler.source.ownership
        num = math.ceil(len(ids) * self._negatives.amount)
        nth = np.arange(num)
        keys = keys_of(derive_seed(seed, "negatives"), ids)
        if self._negatives.amount_is_triplets:
            amount = int(self._negatives.amount)
            found = uniforms(keys[nth // amount], nth % amount) * owned[self._type[2]].num_total
            return ids[:0], found.astype(np.int64)
        link, nth = nth % max(1, len(ids)), nth // max(1, len(ids))
        src = uniforms(keys[link], 2 * nth) * owned[self._type[0]].num_total
        dst = uniforms(keys[link], 2 * nth + 1) * owned[self._type[2]].num_total
        return src.astype(np.int64), dst.astype(np.int64)


class _Negatives(NamedTuple):
    amount: float
    amount_is_triplets: bool


def _negatives(given: Any, ratio: float | None) -> _Negatives | None:
    if ratio:
        given = NegativeSampling("binary", ratio)
    cast = NegativeSampling.cast(given)
    if cast is None:
        return None
    if cast.src_weight is not None or cast.dst_weight is not None:
        raise ValueError("negatives drawn by weights are not supported on a sharded graph; leave out the weights")
    return _Negatives(float(cast.amount), cast.is_triplet())


def _type_and_links(graph: ShardedGraph, given: Any) -> tuple[EdgeType, Any]:
    if graph.is_homogeneous:
        return graph.edge_types[0], given
    kind, links = given, None
    if isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (tuple, list)):
        kind, links = given
    kind = tuple(kind) if isinstance(kind, (tuple, list)) else kind
    if kind not in graph.edge_types:
        raise ValueError(
            f"edge_label_index of a heterogeneous graph is an edge type, or a pair of it and links; found {kind!r}; "
            f"types: {graph.edge_types}"
        )
    return kind, links


def _links(graph: ShardedGraph, source: SampledSource, kind: EdgeType, given: Any) -> tuple[Array, Array, Array]:
    """``(ids, src, dst)`` of links: ids that differ over all ranks, global ids of their ends. Collective."""
    if isinstance(given, tuple) and all(isinstance(ids, NodeIds) for ids in given):
        given = torch.stack([ids.plain for ids in given])  # of a link between types, as a store has them
    links = None if given is None else torch.as_tensor(given).cpu()
    where = f"rank {graph.comm.rank}: edge_label_index"
    if links is not None and links.is_floating_point() and links.numel():
        raise ValueError(f"{where} is {links.dtype}; expected a bool mask, own edges or original ids as integers")
    if links is not None and links.dim() == 2 and links.size(0) == 2 and links.dtype != torch.bool:
        return _links_of_ids(graph, kind, links, where)
    edges = source.edges[kind]
    place = np.empty(len(edges.edge_ids), dtype=np.int64)  # of each own edge, in the order of the rank's edge tensors
    place[edges.rows] = np.arange(len(place))
    if links is not None:
        place = place[_chosen_edges(links, len(place), where)]
    owned = graph.ownership[kind[2]].offsets[graph.comm.rank]
    dst = np.searchsorted(edges.indptr, place, side="right") - 1 + owned
    return edges.edge_ids[place].astype(np.int64), edges.src_ids[place].astype(np.int64), dst.astype(np.int64)


def _links_of_ids(graph: ShardedGraph, kind: EdgeType, links: Tensor, where: str) -> tuple[Array, Array, Array]:
    """The links between nodes that are given by their original ids, ``[2, n]``. Collective."""
    comm, ids = graph.comm, links.to(torch.int64).numpy()
    src, dst = (directory_of(graph, end).global_ids(part) for end, part in zip(kind[::2], ids))
    if len(src) and min(src.min(), dst.min()) < 0:
        bad = links[:, torch.from_numpy((src < 0) | (dst < 0))][:, 0].tolist()
        raise ValueError(f"{where} has the link {bad}; expected original ids of nodes of {kind[0]!r} and {kind[2]!r}")
    found = comm.all_gather_object((len(src), tensor_digest(links)), "links")
    if comm.size > 1 and len(src) and all(one == found[0] for one in found):
        raise ValueError(
            f"{where}: every rank was given the same {len(src)} links; each link is given by one rank. Where all "
            f"have the whole list, let each take its share: links[:, rank::{comm.size}], and the labels' likewise"
        )
    return np.arange(len(src)) + sum(count for count, _ in found[: comm.rank]), src, dst


def _chosen_edges(links: Tensor, num: int, where: str) -> Array:
    """The own edges that a mask or their positions choose, int64."""
    shape = list(links.shape)
    if links.dtype == torch.bool:
        if shape != [num]:
            raise ValueError(f"{where} is a mask {shape}; expected one entry per own edge, [{num}]")
        return links.nonzero().view(-1).numpy()
    if links.dim() != 1:
        raise ValueError(f"{where} is {links.dtype} {shape}; expected a mask, own edges, or original ids [2, n]")
    chosen = links.to(torch.int64).numpy()
    if len(chosen) and not (0 <= chosen.min() <= chosen.max() < num and len(np.unique(chosen)) == len(chosen)):
        raise ValueError(f"{where} holds an edge twice, or one outside [0, {num}), the own edges")
    return chosen


def _label_column(graph: ShardedGraph, label: Tensor | None, num: int, negatives: _Negatives | None) -> Array:
    """The labels as the bits of float64, since columns that are dealt out are int64. Collective where there are any."""
    if label is None:
        return np.ones(num).view(np.int64)
    if label.shape != (num,):
        raise ValueError(
            f"rank {graph.comm.rank}: edge_label is {list(label.shape)}; expected one number per link, [{num}]"
        )
    if negatives is not None and negatives.amount_is_triplets:
        raise ValueError("edge_label does not go with triplets: the positive and negative ends are told by their names")
    values = label.detach().cpu().to(torch.float64)
    smallest = torch.cat([values, values.new_full((1,), float("inf"))]).min().to(graph.comm.device)
    least = float(graph.comm.all_reduce(smallest, "min", "labels of links"))
    return (values + 1 if negatives is not None and least == 0 else values).numpy().view(np.int64)
