"""What the loaders of all frontends share: epochs of balanced steps over a sharded graph, made in the background."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardpass.core.ranks import Ranks, derive_seed
from shardpass.core.sampling.prefetch import BatchIterator, Work
from shardpass.core.sampling.seeds import Seeds, deal, number_of_steps, order_of
from shardpass.core.sampling.structure import SampledSource
from shardpass.core.sharding import EdgeType, NodeType
from shardpass.errors import DivergenceError

Array = Any


@dataclass(frozen=True)
class Settings:
    """What all ranks must agree on.

    Args:
        fanouts: of each hop by edge type; -1 takes all in-edges, 0 none.
        batch_size: seeds per rank and step, at most.
        shuffle: seeds in a new random order every epoch; otherwise in the order of their original ids.
        drop_last: leave out a last step that is not full.
        replace: draw with replacement.
        weight: name of the edge field that neighbours are drawn in proportion to.
        seed: of everything random.
        prefetch: batches made ahead in the background; 0: none, and no thread.
        node_fields, edge_fields: what comes with a batch, by type.
        every_layer: see `sample`.
        wire: the dtype in which rows of float32 travel; None: their own.
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


class Epochs:
    """Iterates over epochs of seeds: each time it is iterated over, the next epoch. Collective.

    Args:
        source: this rank's share of the graph.
        settings: the same on every rank.
        ids: of own seeds, int64, by which they are ordered; no two alike on all ranks.
        columns: int64 arrays that belong to the seeds.
        make: a batch of the seeds of a step and the seed of its draws; collective over the communicator of `source`.

    Attributes:
        total: seeds of all ranks.
    """

    def __init__(
        self,
        source: SampledSource,
        settings: Settings,
        ids: Array,
        columns: list[Array],
        make: Callable[[Seeds, int], Any],
    ) -> None:
        self.source, self.settings = source, settings
        self._ids, self._columns, self._make = ids, columns, make
        self._epoch = 0
        self._dealt: list[Seeds] | None = None
        self._work: Work | None = None
        comm = source.comm
        self.total = int(comm.all_reduce(torch.tensor([len(ids)], device=comm.device), "sum", "sampling: seeds"))
        if not self.total and comm.rank == 0:
            warnings.warn("this loader has no seeds on any rank, so its epochs have no steps", stacklevel=4)
        self._num_steps = number_of_steps(self.total, settings.batch_size, comm.size, settings.drop_last)

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self._num_steps

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one, as when training is resumed. The same on every rank."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        dealt: list[Seeds] = []

        def make(step: int) -> Any:
            if not dealt:
                dealt.extend(self._deal(epoch))
            return self._make(dealt[step], derive_seed(self.settings.seed, epoch, step))

        if self._work is not None:
            self._work.stop(wait=True)
        self._work = Work(self.source.comm, make, self._num_steps, self.settings.prefetch, epoch)
        return BatchIterator(self._work)

    def _deal(self, epoch: int) -> list[Seeds]:
        shuffle, settings = self.settings.shuffle, self.settings
        if self._dealt is not None:
            return self._dealt
        keys = order_of(self._ids, derive_seed(settings.seed, epoch, "order") if shuffle else None)
        found = deal(self.source.comm, keys, self._columns, settings.batch_size, settings.drop_last)
        if not shuffle:
            self._dealt = found
        return found


def own_communicator(comm: Ranks, prefetch: int) -> tuple[Ranks, int]:
    """``(communicator, prefetch)`` for a loader: one of its own, unless threads cannot be used here. Collective."""
    allowed = torch.tensor([prefetch if comm.serves_threads else 0], device=comm.device)
    ahead = int(comm.all_reduce(allowed, "min", "sampling: prefetch"))
    return (comm.duplicate("sampling"), ahead) if ahead else (comm, 0)


def agree_on(comm: Ranks, words: str) -> None:
    """Go on only if every rank makes the same loader. Collective.

    Raises:
        DivergenceError: they differ; in the words of two ranks.
    """
    found = comm.all_gather_object(words, "sampling: settings")
    other = next((rank for rank, text in enumerate(found) if text != found[0]), None)
    if other is not None:
        raise DivergenceError(
            f"every rank must make the same loader: rank 0 has {found[0]}, rank {other} has {found[other]}"
        )


class EpochLoader:
    """What loaders of all frontends have in common: each iteration over one is an epoch of `_epochs`."""

    _epochs: Epochs

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._epochs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._epochs)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch`, counted from 0, the next one, as when training is resumed. The same on every rank."""
        self._epochs.set_epoch(epoch)
