"""What the loaders of all frontends share: epochs of balanced steps over a sharded graph, made in the background."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, derive_seed, require_same
from shardpass.core.sampling.fetch import RowFetcher
from shardpass.core.sampling.neighbours import Drawer
from shardpass.core.sampling.prefetch import BatchIterator, Work
from shardpass.core.sampling.sample import Sample, sample
from shardpass.core.sampling.seeds import Seeds, deal, number_of_steps, order_of
from shardpass.core.sampling.source import Array, SampledSource
from shardpass.core.sharding import EdgeType, NodeType


@dataclass(frozen=True)
class Settings:
    """The settings of a loader, on which all ranks must agree.

    Args:
        fanouts: how many edges each hop draws, by edge type; -1 takes all in-edges.
        batch_size: the most seeds per rank and step.
        shuffle: whether every epoch takes the seeds in a new random order instead of the order of their original ids.
        drop_last: whether to leave out a last step that is not full.
        replace: whether to draw with replacement.
        weight: name of the edge field in proportion to which neighbours are drawn.
        seed: decides everything that is random.
        prefetch: how many batches a background thread makes ahead. With 0 there is no thread.
        node_fields, edge_fields: names of the fields that come with a batch, by type.
        every_layer: see `sample`.
        wire: the dtype in which float32 rows travel. `None` keeps float32.
    """

    fanouts: Sequence[Mapping[EdgeType, int]]
    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    replace: bool = False
    weight: str | None = None
    seed: int = 0
    prefetch: int = 2
    node_fields: Mapping[NodeType, Sequence[str]] = field(default_factory=dict)
    edge_fields: Mapping[EdgeType, Sequence[str]] = field(default_factory=dict)
    every_layer: bool = False
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("prefetch", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}; expected an integer, {least} or more")


class Drawn(NamedTuple):
    """What a batch is made of.

    Args:
        sample: the nodes and edges.
        numbers: the number of each seed among the nodes, by type.
        rows: the fields of the nodes by type and name, and their original ids under `IDS`.
    """

    sample: Sample
    numbers: dict[NodeType, Array]
    rows: dict[NodeType, dict[str, Tensor]]


class Sampler:
    """Draws the batches of one loader, over ranks of its own where a thread draws ahead. Making one is collective.

    Args:
        comm: the ranks.
        settings: the same on every rank.
        words: describe the loader, besides its settings. Every rank must give the same.
        source_of: makes what is sampled, given the name of the weights. Collective.

    Attributes:
        settings: those given, but with `prefetch` 0 if threads cannot be used here.
        source: this rank's share of the graph.

    Raises:
        DivergenceError: on every rank, if ranks make different loaders.
    """

    def __init__(
        self, comm: Ranks, settings: Settings, words: str, source_of: Callable[[str | None], SampledSource]
    ) -> None:
        every = comm.all_gather_object({"loader": f"{words}{settings}"}, "sampling: settings")
        require_same(every, ("loader",), "make")
        own, ahead = _own_ranks(comm, settings.prefetch)
        self.settings = replaced(settings, prefetch=ahead)
        self.source = replaced(source_of(settings.weight), comm=own)
        weighted = settings.weight is not None
        self.drawer = Drawer(self.source, settings.replace, weighted, settings.edge_fields, settings.wire)
        self._fetcher = RowFetcher(self.source, settings.node_fields, settings.wire)

    def draw(self, seeds: Mapping[NodeType, Array], seed: int) -> Drawn:
        """The neighbourhoods of `seeds`. Collective.

        Args:
            seeds: global ids by type; see `sample`.
            seed: of the batch, the same on every rank.
        """
        found, numbers = sample(self.drawer, seeds, self.settings.fanouts, seed, self.settings.every_layer)
        return Drawn(found, numbers, self._fetcher.fetch(found.ids))


class EpochLoader:
    """What the loaders of all frontends have in common. Each iteration over one is the next epoch. Collective."""

    def _begin(self, sampler: Sampler, ids: Array, columns: list[Array]) -> None:
        """Get ready to deal out the seeds. Collective.

        Args:
            ids: by which own seeds are ordered, int64. No two seeds of all ranks have the same.
            columns: int64 arrays with one entry per own seed, which `_make` needs.
        """
        self._sampler, self._ids, self._columns = sampler, ids, columns
        self._epoch = 0
        self._dealt: list[Seeds] | None = None
        self._work: Work | None = None
        comm, settings = sampler.source.comm, sampler.settings
        self._total = int(comm.all_reduce(torch.tensor([len(ids)], device=comm.device), "sum", "sampling: seeds"))
        if not self._total and comm.rank == 0:
            warnings.warn("this loader has no seeds on any rank, so its epochs have no steps", stacklevel=4)
        self._num_steps = number_of_steps(self._total, settings.batch_size, comm.size, settings.drop_last)

    def _make(self, seeds: Seeds, seed: int) -> Any:
        """The batch of the seeds of one step. Collective over the ranks of the sampler.

        Args:
            seed: of the batch, the same on every rank.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of batches of an epoch, the same on every rank."""
        return self._num_steps

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch`, counted from 0, the next one, as when you resume training. The same on every rank."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        settings, dealt = self._sampler.settings, list[Seeds]()

        def make(step: int) -> Any:
            if not dealt:
                dealt.extend(self._deal(epoch))
            return self._make(dealt[step], derive_seed(settings.seed, epoch, step))

        if self._work is not None:
            self._work.stop(wait=True)
        self._work = Work(self._sampler.source.comm, make, self._num_steps, settings.prefetch, epoch)
        return BatchIterator(self._work)

    def _deal(self, epoch: int) -> list[Seeds]:
        settings = self._sampler.settings
        if self._dealt is not None:
            return self._dealt
        keys = order_of(self._ids, derive_seed(settings.seed, epoch, "order") if settings.shuffle else None)
        found = deal(self._sampler.source.comm, keys, self._columns, settings.batch_size, settings.drop_last)
        if not settings.shuffle:
            self._dealt = found
        return found


def _own_ranks(comm: Ranks, prefetch: int) -> tuple[Ranks, int]:
    """``(ranks, prefetch)`` for a loader: ranks of its own, or the given ones and 0 without threads. Collective."""
    allowed = torch.tensor([prefetch if comm.serves_threads else 0], device=comm.device)
    ahead = int(comm.all_reduce(allowed, "min", "sampling: prefetch"))
    return (comm.duplicate("sampling"), ahead) if ahead else (comm, 0)
