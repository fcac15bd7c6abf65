"""Sampling under SAR's names: blocks of neighbours drawn from the graph that ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgl.dataloading import NeighborSampler
from torch import Tensor

from shardpass.errors import RefusedError
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.loader import DataLoader as BlockLoader


class DistNeighborSampler:
    """How many neighbours are drawn, and which features come with the blocks. For `DataLoader`.

    Args:
        fanouts: in-neighbours per layer, the first layer's first; -1 for all.
        replace: draw with replacement.
        prob: name of the edge feature that neighbours are drawn in proportion to.
        input_node_features: features of this rank's nodes that the source nodes of the first block get, by name,
            ``[num_nodes of the part, ...]``.
        output_node_features: those that the destinations of the last block get.
    """

    def __init__(
        self,
        fanouts: Sequence[int],
        replace: bool = False,
        prob: str | None = None,
        input_node_features: Mapping[str, Tensor] | None = None,
        output_node_features: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.inputs, self.outputs = dict(input_node_features or {}), dict(output_node_features or {})
        self.sampler = NeighborSampler(
            list(fanouts),
            replace=replace,
            prob=prob,
            prefetch_node_feats=list(self.inputs),
            prefetch_labels=list(self.outputs),
        )


class DataLoader:
    """Mini-batches of blocks: yields a list of DGL blocks, the first layer's first. Collective.

    Every rank takes the same number of batches. Losses must be means over the seeds of all ranks, as
    ``shardpass.cross_entropy`` gives them; `gather_grads` then sums gradients over ranks.

    Args:
        graph: what `construct_full_graph` returned.
        indices: the seeds of this rank, rows of its part, or a mask over them.
        graph_sampler: what is drawn.
        batch_size: seeds per rank and step, at most.
        shuffle: a new random order of all ranks' seeds every epoch.
        precompute_optimized_batches, optimized_batches_cache: not supported.
        num_workers: ignored; a thread makes batches ahead.
        seed: decides everything that is random.
    """

    def __init__(
        self,
        graph: ShardedDGLGraph,
        indices: Any,
        graph_sampler: DistNeighborSampler,
        batch_size: int,
        shuffle: bool = False,
        precompute_optimized_batches: bool = False,
        optimized_batches_cache: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        if precompute_optimized_batches or optimized_batches_cache:
            raise RefusedError(
                "sar.DataLoader(precompute_optimized_batches=True) is not supported: every epoch shuffles "
                "the seeds of all ranks and deals them out evenly. Leave it out"
            )
        held = graph.local_var()
        for features in (graph_sampler.inputs, graph_sampler.outputs):
            for name, rows in features.items():
                held.ndata[name] = rows
        self._loader = BlockLoader(held, indices, graph_sampler.sampler, batch_size, shuffle, seed=seed)

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        return (blocks for _, _, blocks in self._loader)
