"""`plan`: the memory of every mode and number of ranks, estimated before anything runs."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardpass.core.dryrun import TERMS, Estimate, Training, estimate
from shardpass.core.exchange import shares_rows
from shardpass.core.graphs import ShardedGraph
from shardpass.core.memory import Checkpoint
from shardpass.core.ranks import (
    MODES,
    Mode,
    Options,
    Ranks,
    bytes_text,
    parse_bytes,
    require_callable,
    require_count,
    require_model,
    require_options,
    require_ranks,
)
from shardpass.core.training import cross_entropy
from shardpass.errors import NeedsHaloError, PeerFailure, RefusedError
from shardpass.planning.sizes import GraphCounts, rows_spared, sizes_of

GraphSource = str | os.PathLike[str] | GraphCounts
ModelCall = Callable[[nn.Module, ShardedGraph], Any]
Loss = Callable[[Any, ShardedGraph], Tensor]

_CALL = "plan(model, graph, ranks, modes)"
_LEAST_SPARED = 0.05  # of the rows
_MOST_DOUBLINGS = 5
_MOST_RANKS = 4096  # a dry run has some edges for each
_LEAST: Mode = "sar"  # the mode that needs the least memory


@dataclass(frozen=True)
class Plan:
    """The estimates of a plan; ``str(plan)`` is a table.

    Args:
        rows: one estimate per number of ranks and mode.
        budget: bytes per rank; `None` if there is no bound.
        left_out: modes that the model cannot run in, with the reason.
        larger: if nothing fits, the smallest number of ranks tried on which the mode ``"sar"`` does, if one was found.
        given: the options that the plan was made with.
        per_host: how many ranks share the memory of a host.
        at_random: whether some estimate is of random parts of random edges, since no store or fractions say better.
        spared: the share of the rows of a layer that partial sums spare on the ranks of the best estimate, if known.
    """

    rows: list[Estimate]
    budget: int | None = None
    left_out: dict[Mode, str] = field(default_factory=dict)
    larger: Estimate | None = None
    given: Options = field(default_factory=Options)
    per_host: int = 1
    at_random: bool = False
    spared: float = 0.0

    @property
    def best(self) -> Estimate | None:
        """The fastest estimate that fits the budget, and of equals the smallest; `None` if none fits."""
        fitting = [row for row in self.rows if self.budget is None or row.peak <= self.budget]
        return min(fitting, key=lambda row: (row.seconds, row.peak, MODES.index(row.mode)), default=None)

    @property
    def options(self) -> Options:
        """The options that the plan was made with, in the mode of the best estimate: pass them to `load`.

        Partial sums are taken between hosts if they spare some of the rows, and what they copy fits the budget: own
        rows of each layer, at most as much as the activations.

        Raises:
            RefusedError: nothing fits the budget.
        """
        if self.best is None:
            raise RefusedError(self.verdict)
        partial_sums = self.given.partial_sums or self._sends_sums
        return replace(self.given, mode=self.best.mode, memory_budget=None, partial_sums=partial_sums)

    @property
    def _sends_sums(self) -> bool:
        if self.best is None or self.spared < _LEAST_SPARED or self.per_host >= self.best.ranks:
            return False
        return self.budget is None or self.best.peak + self.best.terms["activations"] <= self.budget

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
            taken = f"Take {_ranks(best.ranks)} in mode {best.mode}: {bytes_text(best.peak)}{within} per rank."
            if self._sends_sums:
                taken += (
                    f" With partial sums, which plan.options takes, layers that sum fetch {self.spared:.0%} fewer rows "
                    f"between hosts, and hold up to {bytes_text(best.terms['activations'])} more."
                )
            return taken
        assert self.budget is not None
        text = (
            f"Nothing fits {bytes_text(self.budget)} per rank. The smallest is {bytes_text(smallest.peak)}, on "
            f"{_ranks(smallest.ranks)} in mode {smallest.mode}. "
        )
        if self.larger is not None:
            return text + (
                f"{self.larger.ranks} ranks in mode {self.larger.mode} would fit, with {bytes_text(self.larger.peak)}."
            )
        return text + "More ranks, checkpoint='activations', fewer channels or layers make it smaller."

    @property
    def assumed(self) -> str:
        """What the estimates take for granted, in sentences."""
        random = ""
        if self.at_random and (self.larger is not None or any(row.ranks > 1 for row in self.rows)):
            random = (
                "Edges between random nodes in random parts are assumed, which fetch the most rows: most graphs, cut "
                "by KaMinPar or METIS, need fewer ranks. Plan a store, or pass their fractions (--cut, --halo)."
            )
        return "\n".join(line for line in (random, self._hosts) if line)

    @property
    def _hosts(self) -> str:
        """On how many hosts the ranks are taken to be. A single rank has a host of its own anyway."""
        if all(row.ranks == 1 for row in self.rows):
            return ""
        if self.per_host == 1:
            return "Each rank has a host of its own here; if several share one, pass ranks_per_host (--ranks-per-host)."
        return f"{self.per_host} ranks share each host here, and its memory."

    def __str__(self) -> str:
        head = ["ranks", "mode", *TERMS, "process", "loading", "peak", "fetched/epoch", ""]
        lines = [head]
        for row in self.rows:
            fits = self.budget is None or row.peak <= self.budget
            mark = "<- take" if row is self.best else ("" if fits else "too large")
            numbers = (*row.terms.values(), row.loading, row.peak, row.fetched)
            lines.append([str(row.ranks), row.mode, *(bytes_text(number) for number in numbers), mark])
        widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        told = [self.verdict, self.assumed, *(f"{mode}: {reason}" for mode, reason in self.left_out.items())]
        return "\n".join([*table, *(line for line in told if line)])

    __repr__ = __str__  # what an interpreter and a notebook show


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def plan(
    model: nn.Module, graph: GraphSource, ranks: Sequence[int] = (1, 2, 4, 8), modes: Iterable[Mode] = MODES, *,
    budget: str | float | None = None, options: Options | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam, call: ModelCall | None = None,
    loss: Loss | None = None, frontend: Literal["pyg", "dgl"] = "pyg", checkpoint: Checkpoint = None,
    ranks_per_host: int = 1, comm: Ranks | None = None, progress: Callable[[int, int], None] | None = None,
) -> Plan:  # fmt: skip
    """The estimated peak memory per rank of training `model`, by term, for every mode and number of ranks.

    Copies of the model are trained for two epochs on a made-up rank, in this process. ``docs/memory.md`` says
    what is counted.

    Args:
        model: as built, not wrapped. It is not changed.
        graph: a store that `partition` wrote, or counts.
        ranks: numbers of ranks.
        modes: of ``"sar"``, ``"keep"``, ``"halo"``.
        budget: bytes per rank, as a number or as ``"6GiB"``; by default the `memory_budget` of `options`.
        options: of the run. The mode is not read.
        optimizer: makes the optimizer of parameters.
        call: calls the model on a graph, by default ``model(graph.x, graph)``, for DGL ``model(graph, graph.x)``; with
            ``graph.x_dict`` for a graph of several types.
        loss: of the output, 0-dim; by default cross entropy with ``graph.y`` over ``graph.train_mask``, of the one node
            type that has labels.
        frontend: whose layers the model is made of.
        checkpoint: as in ``wrap``.
        ranks_per_host: processes of one host. They share memory unless ``options.share_memory`` is False, and shared
            memory counts at the rank that owns it.
        comm: plan for its ranks and hosts, in place of `ranks` and `ranks_per_host`. Then the call is collective: rank
            0 makes the plan, and every rank returns it.
        progress: called as ``progress(done, total)`` after each estimate.

    Raises:
        ValueError: a store without features, or with several types of which not exactly one has labels (pass `loss`);
            an unknown mode, or a budget that is no size.
        RefusedError: the model cannot be run on a sharded graph.
    """
    options = Options() if options is None else options
    _check_arguments(model, ranks, modes, options, frontend, comm)
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host is at least 1, got {ranks_per_host}")
    for name, function in {"optimizer": optimizer, "call": call, "loss": loss, "progress": progress}.items():
        if function is not None:
            require_callable(function, name, _CALL)
    training = _training(model, optimizer, call, loss, frontend, checkpoint)
    budget = options.memory_budget if budget is None else budget
    limit = None if budget is None else parse_bytes(budget)
    if comm is None:
        return _Planner(training, graph, options, ranks_per_host, progress).plan(ranks, modes, limit)
    return _plan_on_first_rank(comm, _Planner(training, graph, options, _ranks_per_host(comm), progress), modes, limit)


def _check_arguments(model: Any, ranks: Any, modes: Any, options: Any, frontend: str, comm: Ranks | None) -> None:
    if getattr(model, "_shardpass_wrapped", False):
        raise RefusedError(
            f"plan: {type(model).__name__} is wrapped already: pass the model as built, since a plan wraps copies of it"
        )
    require_model(model, _CALL)
    if frontend not in _CALLS:
        raise ValueError(f"plan: `frontend` is {frontend!r}, but it must be 'pyg' or 'dgl'")
    if not isinstance(ranks, Iterable) or not isinstance(modes, Iterable):
        raise TypeError("plan: `ranks` and `modes` must be lists, such as ranks=[1, 4] and modes=['sar']")
    require_options(options, _CALL)
    if comm is not None:
        require_ranks(comm, "plan(model, graph, comm=)")


@contextmanager
def _older_objects_left_alone() -> Iterator[None]:
    """A block in which Python's collector looks at new objects only. Each dry run calls it, and modules are many."""
    gc.collect()
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@dataclass(frozen=True)
class _Planner:
    """Makes the estimates of one plan."""

    training: Training
    graph: GraphSource
    options: Options
    per_host: int
    progress: Callable[[int, int], None] | None = None

    @_older_objects_left_alone()
    def plan(self, ranks: Sequence[int], modes: Iterable[Mode], budget: int | None) -> Plan:
        """The plan for these numbers of ranks and modes."""
        modes, rows = tuple(modes), list[Estimate]()
        left_out: dict[Mode, str] = {}
        for index, count in enumerate(ranks):
            count = require_count(count, "ranks", "plan(model, graph, ranks)", 1, _MOST_RANKS)
            sizes = replace(sizes_of(self.graph, count), per_host=self.per_host)
            for done, mode in enumerate(modes, index * len(modes) + 1):
                try:
                    rows.append(estimate(self.training, sizes, mode, self.options))
                except NeedsHaloError as reason:
                    left_out[mode] = str(reason)
                if self.progress is not None:
                    self.progress(done, len(ranks) * len(modes))
        is_guess = isinstance(self.graph, GraphCounts) and None in (self.graph.cut_fraction, self.graph.halo_fraction)
        planned = Plan(rows, budget, left_out, given=self.options, per_host=self.per_host, at_random=is_guess)
        if planned.best is not None and self.per_host < planned.best.ranks:
            planned = replace(planned, spared=rows_spared(self.graph, planned.best.ranks))
        if budget is None or planned.best is not None or _LEAST in left_out or not rows:
            return planned
        larger = self._first_that_fits(max(ranks), budget)
        is_guess = is_guess or (larger is not None and not isinstance(self.graph, GraphCounts))
        return replace(planned, larger=larger, at_random=is_guess)

    def _first_that_fits(self, ranks: int, budget: int) -> Estimate | None:
        """The first estimate that fits on twice, four times ... as many ranks; `None` if none does."""
        for _ in range(_MOST_DOUBLINGS):
            ranks *= 2
            sizes = replace(sizes_of(self.graph, ranks, beyond_parts=True), per_host=self.per_host)
            found = estimate(self.training, sizes, _LEAST, self.options)
            if found.peak <= budget:
                return found
            if sizes.num_nodes <= len(sizes.nodes):
                break
        return None


def _ranks_per_host(comm: Ranks) -> int:
    """How many ranks share memory on the host that has most of them. Collective."""
    here = len(comm.local_ranks) if shares_rows(comm) else 1
    return max(comm.all_gather_object(here, "plan: ranks per host"))


def _plan_on_first_rank(comm: Ranks, planner: _Planner, modes: Iterable[Mode], budget: int | None) -> Plan:
    """The plan for the ranks of `comm`, which rank 0 makes for all. Collective."""
    mine: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            made = planner.plan([comm.size], modes, budget)
            larger = None if made.larger is None else asdict(made.larger)
            mine = {"rows": [asdict(row) for row in made.rows], "left_out": made.left_out, "larger": larger}
            mine["spared"] = made.spared
        except Exception as error:  # whatever the model raises: the other ranks are waiting
            comm.all_gather_object({"problem": f"{type(error).__name__}: {error}"}, "plan: estimates")
            raise
    found = comm.all_gather_object(mine, "plan: estimates")[0]
    if "problem" in found:
        raise PeerFailure(f"rank 0 could not make the plan: {found['problem']}")
    rows, fits = [Estimate(**row) for row in found["rows"]], found["larger"] and Estimate(**found["larger"])
    return Plan(rows, budget, found["left_out"], fits, planner.options, planner.per_host, bool(fits), found["spared"])


def _training(
    model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], call: ModelCall | None, loss: Loss | None,
    frontend: Literal["pyg", "dgl"] = "pyg", checkpoint: Checkpoint = None,
) -> Training:  # fmt: skip
    call, loss = call or _CALLS[frontend], loss or _cross_entropy

    def build(comm: Ranks) -> nn.Module:
        if frontend == "pyg":
            from shardpass.frontends.pyg import wrap
        else:
            from shardpass.frontends.dgl import wrap  # type: ignore[assignment]
        return wrap(copy.deepcopy(model).train(), comm, check=False, checkpoint=checkpoint)

    def run(model: nn.Module, graph: ShardedGraph) -> Tensor:
        return loss(call(model, graph), graph)

    return Training(build, optimizer, run)


def _features(graph: ShardedGraph) -> Any:
    return graph.x if graph.is_homogeneous else graph.x_dict


_CALLS: dict[str, ModelCall] = {
    "pyg": lambda model, graph: model(_features(graph), graph),
    "dgl": lambda model, graph: model(graph, _features(graph)),
}


def _cross_entropy(out: Any, graph: ShardedGraph) -> Tensor:
    labelled = [kind for kind in graph.node_types if "y" in graph.fields_of(kind)]
    if len(labelled) != 1:
        raise ValueError(
            f"plan trains with cross entropy on the one node type that has labels 'y', and this graph has "
            f"{', '.join(map(repr, labelled)) or 'none'}: pass loss=..., a function of the model's output and the graph"
        )
    fields = graph.fields_of(labelled[0])
    rows = out[labelled[0]] if isinstance(out, dict) else out
    return cross_entropy(rows, fields["y"].long(), fields["train_mask"], graph.comm)
