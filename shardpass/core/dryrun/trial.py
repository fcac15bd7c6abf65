"""Run a model's epochs on a made-up rank, find the memory at the peak of each phase by term, and extrapolate it.

[Note: how the dry run is extrapolated]
At each moment a rank needs a constant (parameters, and temporaries, which `Options.chunk_bytes` bounds) and something
in proportion to its size (everything else). Two runs of different size give both, for each term in each phase. A phase
lasts from one step of communication to the next. The peak of the real rank is its largest phase after extrapolation,
which need not be the phase in which a small rank peaks.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.dryrun.communicator import DryCommunicator
from shardpass.core.dryrun.rank import RankSizes, made_up_edges, made_up_rank
from shardpass.core.dryrun.tracker import MemoryTracker
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Options, Ranks
from shardpass.core.training import sync_gradients

TERMS = ("store", "features", "parameters", "gradients", "optimizer", "activations", "halo", "temporaries")
_OF_PARAMETERS = ("parameters", "gradients", "optimizer")  # which do not grow with the rank
EPOCHS = 2  # sums of constant inputs are kept from the second on

Bytes = dict[str, float]
"""Bytes by term."""


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Args:
        build: a new model each time, wrapped for a communicator.
        optimizer: makes the optimizer of parameters.
        loss: calls the model on a graph and returns the loss, a 0-dim tensor.
    """

    build: Callable[[Ranks], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[nn.Module, ShardedGraph], Tensor]


@dataclass(frozen=True)
class Measured:
    """What a dry run found.

    Args:
        phases: per phase its label and, at its peak, the bytes of each term.
        loaded: bytes once the graph, its fields and the model are loaded, before the first epoch.
        loading: bytes at the peak of loading.
        sent: bytes that the last epoch sent.
        made: bytes of all results of operations of the last epoch.
        compiled: whether loops compiled by numba ran.
    """

    phases: list[tuple[str, Bytes]]
    loaded: float
    loading: float
    sent: float
    made: float
    compiled: bool


def dry_run(training: Training, sizes: RankSizes, options: Options) -> Measured:
    """What training on a made-up rank of these sizes needs. Leaves torch's random state as it was."""
    tracker = MemoryTracker()
    comm = Ranks(DryCommunicator(sizes.ranks, notify=tracker.phase, per_host=sizes.per_host))
    edges = made_up_edges(sizes)  # before the tracker is on, since loading a store does not make them
    gc.collect()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), tracker:
        graph = made_up_rank(sizes, comm, options, edges)
        fields = [graph.fields_of(kind) for kind in graph.node_types] + [one.fields for one in graph.relations.values()]
        features = tracker.numbers(tensor for one in fields for tensor in one.values())
        model = training.build(comm)
        parameters = tracker.numbers([*model.parameters(), *model.buffers()])
        loaded, first = tracker.live_bytes, len(tracker.events)
        optimizer = training.optimizer(model.parameters())
        made, sent = 0, 0
        forwards, gradients = [], set()
        for _ in range(EPOCHS):
            made, sent = len(tracker.storages), comm.bytes_sent
            tracker.phase("forward")
            begin = len(tracker.events)
            loss = training.loss(model, graph)
            forwards.append((begin, len(tracker.events)))
            optimizer.zero_grad()
            tracker.phase("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            tracker.phase("sync")
            sync_gradients(model, comm)
            tracker.phase("step")
            optimizer.step()
            gradients |= tracker.numbers(p.grad for p in model.parameters() if p.grad is not None)
            del loss
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        kinds = {
            **_kinds(tracker, forwards),
            **dict.fromkeys(tracker.numbers(states), "optimizer"),
            **dict.fromkeys(gradients, "gradients"),
            **dict.fromkeys(features, "features"),
            **dict.fromkeys(parameters, "parameters"),
        }
    volume = sum(storage.num_bytes for storage in tracker.storages[made:])
    phases, loading = _replay(tracker, kinds, first)
    return Measured(phases, loaded, loading, comm.bytes_sent - sent, volume, tracker.runs_compiled_loops)


def _kinds(tracker: MemoryTracker, forwards: list[tuple[int, int]]) -> dict[int, str]:
    """The term of each storage, as far as its lifetime tells; the model, optimizer and graph know theirs."""
    found = {}
    end = len(tracker.events)
    for number, storage in enumerate(tracker.storages):
        died = end if storage.died is None else storage.died
        in_forward = [stop for start, stop in forwards if start <= storage.born < stop]
        if storage.is_message:
            found[number] = "halo"
        elif died == end:
            found[number] = "store"  # including what is kept for the next epoch: derived shards, sums of constants
        elif in_forward and died >= in_forward[0]:
            found[number] = "activations"
        else:
            found[number] = "temporaries"
    return found


def _replay(tracker: MemoryTracker, kinds: dict[int, str], first: int) -> tuple[list[tuple[str, Bytes]], float]:
    """The terms at the peak of each phase that begins at event `first` or later, and the largest total before it."""
    now = dict.fromkeys(TERMS, 0.0)
    phases: list[tuple[str, Bytes]] = []
    total = loading = 0.0
    ends = [start for _, start in tracker.phases[1:]] + [len(tracker.events)]
    for (label, start), end in zip(tracker.phases, ends):
        top, at_top = total, dict(now)
        for event in tracker.events[start:end]:
            number = abs(event) - 1
            change = tracker.storages[number].num_bytes * (1 if event > 0 else -1)
            now[kinds[number]] += change
            total += change
            if total > top:
                top, at_top = total, dict(now)
        if start >= first:
            phases.append((label, at_top))
        else:
            loading = max(loading, top)
    return phases, loading


def extrapolate(small: Measured, large: Measured, scales: tuple[float, float]) -> Measured:
    """What a rank of scale 1 needs, from dry runs at two smaller scales in ascending order. See the note above."""

    def line(low: float, high: float) -> float:
        return max(0.0, high + (high - low) / (scales[1] - scales[0]) * (1 - scales[1]))

    before = _numbered(small.phases)
    phases = []
    for (label, count), high in _numbered(large.phases).items():
        low = before.get((label, count)) or {
            term: high[term] * (1 if term in _OF_PARAMETERS else scales[0] / scales[1]) for term in TERMS
        }
        phases.append((label, {term: line(low[term], high[term]) for term in TERMS}))
    numbers = {name: line(getattr(small, name), getattr(large, name)) for name in ("loaded", "loading", "sent", "made")}
    return Measured(phases, **numbers, compiled=large.compiled)


def _numbered(phases: list[tuple[str, Bytes]]) -> dict[tuple[str, int], Bytes]:
    """Phases by label and count of the label, since a choice that depends on sizes may add a step to one run."""
    counts: Counter[str] = Counter()
    found = {}
    for label, terms in phases:
        found[label, counts[label]] = terms
        counts[label] += 1
    return found
