"""`NeighborLoader`: PyG's mini-batches of sampled neighbourhoods, drawn from a sharded graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import takes_followed
from shardpass.core.sampling import IDS, EpochLoader, Sample, Sampler, Seeds, Settings, source_of
from shardpass.core.sharding import EdgeType, NodeType
from shardpass.frontends.pyg.loader_arguments import own_rows, settings_of

Array = np.ndarray[Any, Any]


class BatchLoader(EpochLoader):
    """What both loaders do: draw the neighbourhoods of seeds, and make a `Data` or `HeteroData` of them. Collective."""

    _graph: ShardedGraph
    _transform: Callable[[Any], Any] | None

    def _prepare(
        self, graph: ShardedGraph, settings: Settings, transform: Callable[[Any], Any] | None, words: str
    ) -> Sampler:
        """What draws the batches. `words` describe this loader, and every rank must give the same. Collective."""
        self._graph, self._transform = graph, transform
        return Sampler(graph.comm, settings, f"{words}, ", lambda weight: source_of(graph, weight))

    def _make(self, seeds: Seeds, seed: int) -> Any:
        batch = self._batch(seeds, seed)
        return batch if self._transform is None else self._transform(batch)

    def _batch(self, seeds: Seeds, seed: int) -> Data | HeteroData:
        """The batch of the seeds of one step. Collective."""
        raise NotImplementedError

    def _drawn(self, seeds: Mapping[NodeType, Array], seed: int) -> tuple[Any, dict[NodeType, Array]]:
        """The neighbourhoods of `seeds`, global ids by type, and the number of each seed in them. Collective."""
        source, found = self._sampler.source, self._sampler.draw(seeds, seed)
        batch: Any = Data() if self._graph.is_homogeneous else HeteroData()
        for kind in self._graph.node_types:
            _fill_nodes(self._store(batch, kind), found.sample, found.rows[kind], kind)
        for edge_type in self._graph.edge_types:
            wanted = self._sampler.drawer.edge_fields[edge_type]
            fields = {name: source.edges[edge_type].fields[name] for name in wanted}
            _fill_edges(self._store(batch, edge_type), found.sample, edge_type, fields, source.comm.device)
        return batch, found.numbers

    def _store(self, batch: Any, kind: NodeType | EdgeType) -> Any:
        """Where a batch holds what belongs to a node or edge type."""
        return batch if self._graph.is_homogeneous else batch[kind]


class NeighborLoader(BatchLoader):
    """Mini-batches of sampled neighbourhoods, as `torch_geometric.loader.NeighborLoader` yields them. Collective.

    Every rank makes the same loader and iterates over it in step: all take the same number of batches, ``len(loader)``.
    A batch is a `Data` or `HeteroData` of ordinary tensors, for an ordinary model that is not wrapped. The seeds of a
    step, over all ranks, and the neighbours that are drawn for them follow from `seed`, the epoch and the step, for any
    number of ranks.

    A batch has the stored node and edge fields; ``edge_index``; ``n_id`` and ``e_id``, the original ids of nodes and
    edges; ``batch_size``, the number of seeds, which are its first nodes; ``input_id``, the original ids of the seeds;
    ``num_sampled_nodes`` and ``num_sampled_edges`` of each hop. In the last step of an epoch a rank may have no seed.
    Its ``batch_size`` is then 0, and its nodes are those of another rank's seed, so that models run.

    Args:
        graph: what `shardpass.load` returned.
        num_neighbors: how many in-neighbours are drawn in each hop, -1 for all: a list, or a list by edge type.
        input_nodes: the seeds among own nodes: a mask ``[num_own]``, own rows, or `None` for all. For a heterogeneous
            graph a node type, or a pair of a node type and one of these. Ranks may have different numbers of seeds.
        transform: applied to each batch.
        batch_size: seeds per rank and step, at most; a step of all ranks takes ``batch_size * comm.size``. Default: 1.
        shuffle: put the seeds of all ranks into a new random order every epoch. Otherwise they come in the order of
            their original ids.
        drop_last: skip the last step if it is not full.
        replace: draw neighbours with replacement.
        weight_attr: the edge field in proportion to which neighbours are drawn. Edges of weight 0 are never drawn.
        seed: everything random follows from it; 0 by default.
        prefetch: how many batches a background thread makes ahead, 2 by default. With 0 there is no thread.
        node_attrs, edge_attrs: names of the fields that come with a batch; `None` for all stored fields.

    Raises:
        ValueError: bad arguments, on the rank that has them.
        DivergenceError: on every rank, if ranks make different loaders.
    """

    @takes_followed("number")
    def __init__(
        self,
        graph: ShardedGraph,
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        input_nodes: Any = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = settings_of("NeighborLoader", graph, num_neighbors, **kwargs)
        self._type, rows = own_rows(graph, input_nodes)
        sampler = self._prepare(graph, settings, transform, f"seeds of type {self._type!r}")
        ids = graph.node_ids_dict[self._type].cpu().numpy()[rows]
        owned = graph.ownership[self._type].to_global(torch.from_numpy(rows), graph.comm.rank).numpy()
        self._begin(sampler, ids, [owned])

    def _batch(self, seeds: Seeds, seed: int) -> Data | HeteroData:
        batch, _ = self._drawn({self._type: seeds.columns[0]}, seed)
        store = self._store(batch, self._type)
        store.batch_size = seeds.counted
        store.input_id = store.n_id[: seeds.counted]
        return batch  # type: ignore[no-any-return]


def _fill_nodes(store: Any, found: Sample, rows: dict[str, Tensor], kind: NodeType) -> None:
    for name, tensor in rows.items():
        if name != IDS:
            store[name] = tensor
    store.n_id = rows[IDS]
    store.num_nodes = len(found.ids[kind])
    store.num_sampled_nodes = np.diff(found.num_nodes[kind], prepend=0).tolist()


def _fill_edges(store: Any, found: Sample, kind: EdgeType, fields: Mapping[str, Tensor], device: torch.device) -> None:
    hops = [hop[kind] for hop in found.hops if kind in hop]
    nothing = np.empty(0, dtype=np.int64)
    src, dst, edge_ids = (
        torch.from_numpy(np.concatenate([nothing, *parts])).to(device)
        for parts in ([hop.src for hop in hops], [hop.dst for hop in hops], [hop.edge_ids for hop in hops])
    )
    store.edge_index = torch.stack([src, dst])
    for name, tensor in fields.items():
        store[name] = torch.cat([tensor[:0].detach().to(device), *(hop.fields[name] for hop in hops)])
    store.e_id = edge_ids
    store.num_sampled_edges = [len(hop[kind].src) if kind in hop else 0 for hop in found.hops]
