"""Sampling under SAR's names: blocks of neighbours drawn from the graph that ranks share."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from typing import Any

import numpy as np
import torch
from dgl.dataloading import NeighborSampler
from torch import Tensor

from shardpass.core.ranks import Ranks, derive_seed, gather_or_fail
from shardpass.core.sampling import EpochLoader, Sampler, Seeds
from shardpass.frontends.dgl.loader import draw_blocks, sampler_of, settings_of
from shardpass.frontends.sar.core.graphshard import GraphShardManager
from shardpass.frontends.sar.own_part import numbers_within

_INPUT, _OUTPUT = "input: ", "output: "


class DistNeighborSampler:
    """How many neighbours are drawn, and which features come with the blocks.

    Args:
        fanouts: in-neighbours per layer, the first layer's first; -1 for all.
        prob: name of the edge feature that neighbours are drawn in proportion to.
        replace: draw with replacement.
        copy_edata: whether the blocks get the edge features of the graph.
        input_node_features: features of this rank's nodes that the source nodes of the first block get, by name,
            ``[num_nodes of the part, ...]``. The same names on every rank.
        output_node_features: those that the destinations of the last block get.
        output_device: where the blocks are; by default, on the device of the graph.
    """

    def __init__(
        self, fanouts: Sequence[int], prob: str | None = None, replace: bool = False, copy_edata: bool = True,
        input_node_features: Mapping[str, Tensor] | None = None,
        output_node_features: Mapping[str, Tensor] | None = None, output_device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(prob, (str, type(None))) or not isinstance(replace, (bool, type(None))):
            raise TypeError(
                f"DistNeighborSampler: prob={prob!r} and replace={replace!r}; expected the name of an edge feature or "
                f"None, and True or False, in this order"
            )
        self.fanouts, self.prob, self.replace, self.copy_edata = list(fanouts), prob, bool(replace), copy_edata
        self.features = {_INPUT + name: rows for name, rows in (input_node_features or {}).items()}
        self.features |= {_OUTPUT + name: rows for name, rows in (output_node_features or {}).items()}
        self.output_device = output_device

    def sample(self, full_graph_manager: GraphShardManager, seeds: Tensor) -> list[Any]:
        """Blocks of DGL for `seeds`, the first layer's first. Collective; the seeds are as in `DataLoader`."""
        ids = _checked(full_graph_manager, seeds, "DistNeighborSampler.sample")
        comm = full_graph_manager.comm
        seed = comm.all_gather_object(int(torch.randint(1 << 53, ())), "sampling: seed")[0]
        return self.blocks(full_graph_manager, self.sampler_over(full_graph_manager, 1, 0, prefetch=0), ids, seed)

    def sampler_over(self, graph: GraphShardManager, batch_size: int, seed: int, prefetch: int) -> Sampler:
        """What draws from `graph`. Collective."""
        held = graph.local_var()
        for name, rows in self.features.items():
            held.ndata[name] = rows
        drawn = NeighborSampler(self.fanouts, replace=self.replace, prob=self.prob)
        settings = settings_of(held, drawn, batch_size, False, False, seed, prefetch)
        edges = settings.edge_fields if self.copy_edata else dict.fromkeys(held.canonical_etypes, ())
        nodes = {kind: sorted(self.features) for kind in held.ntypes}
        return sampler_of(held, replaced(settings, node_fields=nodes, edge_fields=edges))

    def blocks(self, graph: GraphShardManager, sampler: Sampler, ids: Tensor, seed: int) -> list[Any]:
        """The blocks of one batch. Collective over the ranks of `sampler`."""
        names = [[name for name in self.features if name.startswith(side)] for side in (_INPUT, _OUTPUT)]
        sources, labels = (dict.fromkeys(graph.ntypes, given) for given in names)
        seeds = {kind: numbers_within(ranges, ids).numpy() for kind, ranges in graph.type_ranges.items()}
        *_, blocks = draw_blocks(sampler, seeds, seed, sources, labels)
        for side, views in ((_INPUT, blocks[0].srcnodes), (_OUTPUT, blocks[-1].dstnodes)):
            for kind in graph.ntypes:
                data = views[kind].data
                for name in [name for name in data if name.startswith(side)]:
                    data[name.removeprefix(side)] = data.pop(name)
        return [block if self.output_device is None else block.to(self.output_device) for block in blocks]


class DataLoader(EpochLoader):
    """Mini-batches: yields a list of DGL blocks, the first layer's first. Collective.

    The batches of a rank are made of its own `seed_nodes`. All ranks take as many steps as the rank with the most
    seeds needs. A rank with too few for that spreads them evenly over the steps.

    Args:
        full_graph_manager, graph_sampler: what is drawn from, and what is drawn.
        seed_nodes: this rank's seeds, int64, each once. They are node ids in the numbering of ``node_ranges``, as
            ``dgl.NID`` of the blocks: rows of the part plus ``node_ranges[rank][0]``.
        batch_size: the most seeds of a rank in a step.
        drop_last: leave out a last step for which no rank has `batch_size` seeds.
        shuffle: put this rank's seeds into a new random order every epoch. Otherwise they keep the given order.
        precompute_optimized_batches, optimized_batches_cache, num_workers: ignored; a thread makes batches ahead.
        seed: decides everything that is random. The same on every rank.

    Raises:
        ValueError: seeds are no node ids or come twice (on the rank that has them; the others name it), or some rank
            has fewer seeds than there are steps (on every rank).
    """

    def __init__(
        self, full_graph_manager: GraphShardManager, seed_nodes: Tensor, graph_sampler: DistNeighborSampler,
        batch_size: int = 1, drop_last: bool = False, shuffle: bool = False, precompute_optimized_batches: bool = True,
        optimized_batches_cache: str | None = None, num_workers: int = 0, *, seed: int = 0,
    ) -> None:  # fmt: skip
        ids, comm = _checked(full_graph_manager, seed_nodes, "DataLoader"), full_graph_manager.comm
        start, end = full_graph_manager.tgt_node_range
        num_foreign = int(((ids < start) | (ids >= end)).sum())
        if num_foreign:
            warnings.warn(
                f"DataLoader on rank {comm.rank}: {num_foreign} of {len(ids)} seed nodes are nodes of other ranks. "
                f"Seeds are node ids of the whole graph: own nodes have the ids from {start} to {end - 1}, which are "
                f"rows of this part plus node_ranges[{comm.rank}][0]",
                stacklevel=2,
            )
        self._graph, self._drawn, self._shuffle = full_graph_manager, graph_sampler, shuffle
        self._begin(graph_sampler.sampler_over(full_graph_manager, batch_size, seed, prefetch=2), ids.numpy(), [])
        self._num_steps = _number_of_steps(comm, len(ids), batch_size, drop_last)

    def _deal(self, epoch: int) -> list[Seeds]:
        settings, ids, steps = self._sampler.settings, self._ids, self._num_steps
        if self._shuffle:
            seed = derive_seed(settings.seed, epoch, f"order on rank {self._graph.comm.rank}")
            ids = np.random.default_rng(seed).permutation(ids)
        ids = ids[: steps * settings.batch_size]
        full = len(ids) > (steps - 1) * settings.batch_size
        cuts: Any = np.arange(1, steps) * settings.batch_size if full else steps
        return [Seeds([part], len(part)) for part in (np.split if full else np.array_split)(ids, cuts)]

    def _make(self, seeds: Seeds, seed: int) -> list[Any]:
        return self._drawn.blocks(self._graph, self._sampler, torch.from_numpy(seeds.columns[0]), seed)


def _number_of_steps(comm: Ranks, count: int, batch_size: int, drop_last: bool) -> int:
    """The steps of an epoch. Collective."""
    counts = comm.all_gather_object(count, "sampling: seeds of each rank")
    most, least = max(counts), min(counts)
    steps = most // batch_size if drop_last else -(-most // batch_size)
    if least < steps:
        enough = -(-most // max(least, 1))
        raise ValueError(
            f"rank {counts.index(least)} has {least} seed nodes for {steps} steps, and DGL has no blocks without "
            f"nodes. Rank {counts.index(most)} has {most}. Use batch_size={enough} or more, or give every rank seeds"
        )
    return steps


def _checked(graph: GraphShardManager, seeds: Any, who: str) -> Tensor:
    """The seeds, if they are node ids. Collective."""
    ids, end, told = torch.as_tensor(seeds).cpu(), graph.node_ranges[-1][1], ""
    if ids.dim() != 1 or ids.dtype in (torch.bool, torch.uint8) or ids.is_floating_point():
        told = f"found {ids.dtype} {list(ids.shape)}; expected node ids, int64 [n]"
    elif ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < end:
        told = f"found ids from {int(ids.min())} to {int(ids.max())}; expected node ids in [0, {end})"
    elif ids.unique().numel() < ids.numel():
        told = "some come twice; expected each once"
    problem = ValueError(
        f"{who} on rank {graph.comm.rank}: seed nodes are ids in the numbering of node_ranges, which are rows of "
        f"this part plus {graph.tgt_node_range[0]}: {told}"
    )
    gather_or_fail(graph.comm, f"{who}: seeds", None, problem if told else None, f"passed wrong seed nodes to {who}")
    return ids.to(torch.int64)
