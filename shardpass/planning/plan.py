"""`plan`: the memory of every mode and number of ranks, estimated before anything runs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardpass.core.dryrun import TERMS, Estimate, Training, estimate, fastest
from shardpass.core.graphs import ShardedGraph
from shardpass.core.memory import Checkpoint
from shardpass.core.ranks import MODES, Mode, Options, Ranks, bytes_text, parse_bytes
from shardpass.core.training import cross_entropy
from shardpass.errors import NeedsHaloError
from shardpass.planning.sizes import GraphCounts, sizes_of

_MOST_DOUBLINGS = 5
_LATER_MODE: Mode = "sar"


@dataclass(frozen=True)
class Plan:
    """The estimates of a plan; ``str(plan)`` is a table.

    Args:
        rows: one estimate per number of ranks and mode.
        budget: bytes per rank; None: no bound.
        left_out: modes that the model cannot run in, with the reason.
        larger: where nothing fits: the smallest number of ranks tried on which sar mode does, if one was found.
    """

    rows: list[Estimate]
    budget: int | None = None
    left_out: dict[Mode, str] = field(default_factory=dict)
    larger: Estimate | None = None

    @property
    def best(self) -> Estimate | None:
        """The fastest estimate that fits the budget; None where none does."""
        return fastest(self.rows, self.budget)

    def on(self, ranks: int, mode: Mode) -> Estimate:
        """The estimate for a number of ranks and a mode.

        Raises:
            KeyError: it was not planned.
        """
        for row in self.rows:
            if (row.ranks, row.mode) == (ranks, mode):
                return row
        raise KeyError(f"{ranks} ranks in mode {mode!r} were not planned")

    @property
    def verdict(self) -> str:
        """What to take, or that nothing fits and what would, in a sentence or two."""
        smallest = min(self.rows, key=lambda row: row.peak, default=None)
        if smallest is None:
            return "The model runs in none of the modes: " + "; ".join(self.left_out.values())
        if self.best is not None:
            best = self.best
            within = f" of {bytes_text(self.budget)}" if self.budget is not None else ""
            return f"Take {best.ranks} ranks in mode {best.mode}: {bytes_text(best.peak)}{within} per rank."
        assert self.budget is not None
        text = (
            f"Nothing fits {bytes_text(self.budget)} per rank. The smallest is {bytes_text(smallest.peak)}, on "
            f"{smallest.ranks} ranks in mode {smallest.mode}. "
        )
        if self.larger is not None:
            return text + (
                f"{self.larger.ranks} ranks in mode {self.larger.mode} would fit, with {bytes_text(self.larger.peak)}."
            )
        return text + "More ranks, checkpoint='activations', fewer channels or layers make it smaller."

    def __str__(self) -> str:
        head = ["ranks", "mode", *TERMS, "process", "loading", "peak", ""]
        lines = [head]
        for row in self.rows:
            mark = "<- take" if row is self.best else ("" if self.budget is None or row.peak <= self.budget else "no")
            numbers = (*row.terms.values(), row.loading, row.peak)
            lines.append([str(row.ranks), row.mode, *(bytes_text(number) for number in numbers), mark])
        widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*table, self.verdict, *(f"{mode}: {reason}" for mode, reason in self.left_out.items())])


def plan(
    model: nn.Module,
    graph: str | os.PathLike[str] | GraphCounts,
    ranks: Sequence[int] = (1, 2, 4, 8),
    modes: Iterable[Mode] = MODES,
    *,
    budget: str | float | None = None,
    options: Options | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
    call: Callable[[nn.Module, ShardedGraph], Any] | None = None,
    loss: Callable[[Any, ShardedGraph], Tensor] | None = None,
    frontend: Literal["pyg", "dgl"] = "pyg",
    checkpoint: Checkpoint = None,
    ranks_per_host: int = 1,
) -> Plan:
    """The estimated peak memory per rank of training `model`, by term, for every mode and number of ranks.

    For each, copies of the model are trained for two epochs on a made-up rank, in this process, without communication.
    See ``docs/memory.md`` for what is counted.

    Args:
        model: as built, not wrapped; it is not changed.
        graph: a store that `partition` wrote, or counts.
        ranks: numbers of ranks.
        modes: of ``"sar"``, ``"keep"``, ``"halo"``.
        budget: bytes per rank, as a number or as ``"6GiB"``.
        options: all but the mode.
        optimizer: makes the optimizer of parameters.
        call: calls the model on a graph; None: ``model(graph.x, graph)``, for DGL ``model(graph, graph.x)``.
        loss: of what the model returned, 0-dim; None: cross entropy with ``graph.y`` over ``graph.train_mask``.
        frontend: whose layers the model is made of.
        checkpoint: as in ``wrap``: None or ``"activations"``.
        ranks_per_host: processes on one host, which share memory (unless ``options.share_memory`` is False); the
            memory that a rank shares counts at the rank that owns it.

    Raises:
        ValueError: a store of several types or without features, an unknown mode, a budget that is no size, or fewer
            than one rank per host.
        RefusedError: the model cannot be run on a sharded graph.
    """
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host is at least 1, got {ranks_per_host}")
    limit = None if budget is None else parse_bytes(budget)
    options = options or Options()
    training = _training(model, optimizer, call, loss, frontend, checkpoint)
    rows: list[Estimate] = []
    left_out: dict[Mode, str] = {}
    for size in ranks:
        sizes = replace(sizes_of(graph, size), per_host=ranks_per_host)
        for mode in modes:
            try:
                found = estimate(training, sizes, replace(options, mode=mode))
            except NeedsHaloError as reason:
                left_out[mode] = str(reason)
                continue
            rows.append(Estimate.of(found, size, mode))
    planned = Plan(rows, limit, left_out)
    if limit is None or planned.best is not None or _LATER_MODE in left_out or not rows:
        return planned
    return replace(planned, larger=_larger(training, graph, options, max(ranks), limit, ranks_per_host))


def _larger(
    training: Training,
    graph: str | os.PathLike[str] | GraphCounts,
    options: Options,
    ranks: int,
    limit: int,
    per_host: int,
) -> Estimate | None:
    """The first estimate in sar mode that fits, on twice, four times ... as many ranks; None if none does."""
    for _ in range(_MOST_DOUBLINGS):
        ranks *= 2
        sizes = replace(sizes_of(graph, ranks, beyond_parts=True), per_host=per_host)
        found = Estimate.of(estimate(training, sizes, replace(options, mode=_LATER_MODE)), ranks, _LATER_MODE)
        if found.peak <= limit:
            return found
        if sizes.nodes <= 1:
            break
    return None


def _training(
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    call: Callable[[nn.Module, ShardedGraph], Any] | None,
    loss: Callable[[Any, ShardedGraph], Tensor] | None,
    frontend: Literal["pyg", "dgl"] = "pyg",
    checkpoint: Checkpoint = None,
) -> Training:
    call, loss = call or _CALLS[frontend], loss or _cross_entropy

    def build(comm: Ranks, graph: ShardedGraph) -> nn.Module:
        if frontend == "pyg":
            from shardpass.frontends.pyg import wrap
        else:
            from shardpass.frontends.dgl import wrap  # type: ignore[assignment]
        return wrap(copy.deepcopy(model).train(), comm, check=False, checkpoint=checkpoint)

    def run(model: nn.Module, graph: ShardedGraph) -> Tensor:
        return loss(call(model, graph), graph)

    return Training(build, lambda graph: graph, run, optimizer)


_CALLS: dict[str, Callable[[nn.Module, ShardedGraph], Any]] = {
    "pyg": lambda model, graph: model(graph.x, graph),
    "dgl": lambda model, graph: model(graph, graph.x),
}


def _cross_entropy(out: Tensor, graph: ShardedGraph) -> Tensor:
    return cross_entropy(out, graph.y.long(), graph.train_mask, graph.comm)
