"""``Options(mode="auto")``: the mode is chosen before the first training forward, by a dry run of the very model."""

from __future__ import annotations

import copy
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardpass.core.dryrun.estimate import Estimate, fastest
from shardpass.core.dryrun.rank import Field, RankSizes, made_up_rows
from shardpass.core.dryrun.trial import Training, estimate
from shardpass.core.exchange import shares_rows
from shardpass.core.graphs import BatchIndex, OwnRows, ShardedEdgeIndex, ShardedGraph, node_embeddings
from shardpass.core.ranks import MODES, Options, Ranks, bytes_text, parse_bytes
from shardpass.core.selfcheck import Frontend
from shardpass.core.sharding import EDGE, NODE
from shardpass.errors import NeedsHaloError, RefusedError, ShardpassError


def undecided(graph: Any) -> Options | None:
    """The options of a sharded graph (or ``edge_index``) whose mode is still to be chosen; None for all else."""
    if isinstance(graph, ShardedGraph):
        options = graph.options
    elif isinstance(graph, ShardedEdgeIndex):
        options = graph.plan.options
    else:
        return None
    return options if options.mode == "auto" and options.chosen.mode is None else None


def choose_mode(
    frontend: Frontend,
    pristine: nn.Module | None,
    model: nn.Module,
    comm: Ranks,
    args: Any,
    kwargs: Any,
    method: str = "forward",
) -> None:
    """Choose the mode of the graph among the arguments that was loaded with ``mode="auto"``. Collective.

    Rank 0 runs a copy of the model dry, on a made-up rank as large as the largest, in every mode; all ranks take the
    fastest that fits the budget.

    Args:
        frontend: that wrapped the model.
        pristine: a copy of the model from before it was wrapped.
        model: the wrapped model.
        args, kwargs: of its call.
        method: that is called.

    Raises:
        RefusedError: on every rank, if nothing fits, or the model cannot be run dry.
    """
    graphs = [frontend.core_of(leaf) or leaf for leaf in tree_leaves((args, kwargs))]
    options = next(found for graph in graphs if (found := undecided(graph)) is not None)
    mine = _sizes(frontend, comm, args, kwargs)
    every = comm.all_gather_object(mine, "mode='auto': sizes")
    answer: dict[str, Any] = {"refusal": "", "estimates": []}
    if comm.rank == 0:
        if pristine is None:
            answer["refusal"] = _NO_COPY
        elif None in every:
            answer["refusal"] = _SEVERAL_TYPES
        else:
            nodes, edges, cut, halo, per_host = (max(column) for column in zip(*every))
            largest = RankSizes(comm.size, nodes, edges, cut, halo, per_host=per_host)
            training = _training(frontend, pristine, model, comm, args, kwargs, method)
            # In a thread of its own no autocast, checkpointing or function mode is on.
            with comm.silent(), ThreadPoolExecutor(1) as clean:
                answer = clean.submit(_estimates, training, largest, options, comm).result()
    answer = comm.all_gather_object(answer, "mode='auto': estimates")[0]
    if answer["refusal"]:
        raise RefusedError(answer["refusal"])
    _take([Estimate(**fields) for fields in answer["estimates"]], options, comm)


_NO_COPY = (
    "mode='auto' runs a copy of the model from before it was wrapped, and there is none: wrap the model anew with "
    "check=True and train it on this graph first, or choose a mode with the help of shardpass.plan"
)
_SEVERAL_TYPES = (
    "mode='auto' is for models that are called with one graph of one node and one edge type: choose mode='sar', "
    "'keep' or 'halo'"
)


def _take(estimates: list[Estimate], options: Options, comm: Ranks) -> None:
    assert options.memory_budget is not None
    budget = parse_bytes(options.memory_budget)
    best = fastest(estimates, budget)
    if best is None:
        smallest = min(estimates, key=lambda row: row.peak)
        raise RefusedError(
            f"nothing fits the memory budget of {bytes_text(budget)} per rank: the smallest estimate on {comm.size} "
            f"ranks is {bytes_text(smallest.peak)}, in mode {smallest.mode!r} ({_in_words(smallest)}). "
            f"wrap(checkpoint='activations'), more ranks, or a smaller model need less: shardpass.plan tells how much"
        )
    options.chosen.mode, options.chosen.estimate = best.mode, best
    if comm.rank == 0:
        found = ", ".join(f"{row.mode} {bytes_text(row.peak)}" for row in estimates)
        logging.getLogger("shardpass").warning(
            "mode='auto' is %s from here on: the fastest within %s per rank (estimated: %s)",
            best.mode, bytes_text(budget), found,
        )  # fmt: skip


def _in_words(row: Estimate) -> str:
    return ", ".join(f"{term} {bytes_text(count)}" for term, count in row.terms.items() if count)


def _is_index(leaf: Any) -> bool:
    return isinstance(leaf, ShardedEdgeIndex)


def _relation(frontend: Frontend, args: Any, kwargs: Any) -> ShardedEdgeIndex | None:
    """The one relation that the model is called with; None where there is another number."""
    found: dict[int, ShardedEdgeIndex] = {}
    for leaf in tree_leaves((args, kwargs)):
        graph = frontend.core_of(leaf)
        if graph is not None and not graph.is_homogeneous:
            return None
        if graph is not None or _is_index(leaf):
            index = leaf if graph is None else graph.edge_index
            found[id(index.plan)] = index
    return next(iter(found.values())) if len(found) == 1 else None


def _sizes(frontend: Frontend, comm: Ranks, args: Any, kwargs: Any) -> list[int] | None:
    """Own nodes, edges, cut edges, halo rows, ranks that share memory; None where not of one relation of one type."""
    index = _relation(frontend, args, kwargs)
    if index is None or index.plan.num_own_src != index.plan.num_dst:
        return None
    cut = int((index[0].as_subclass(Tensor) >= index.plan.num_own_src).sum())
    per_host = len(comm.local_ranks) if shares_rows(comm) else 1
    return [index.plan.num_dst, index.size(1), cut, index.plan.num_halo, per_host]


def _estimates(training: Training, sizes: RankSizes, options: Options, comm: Ranks) -> dict[str, Any]:
    """Estimates of all modes the model can run in, as plain data; or why there are none."""
    found, refusal = [], ""
    with comm.random_lock():  # ranks that are threads share torch's generator, which a dry run puts back
        for mode in MODES:
            try:
                measured = estimate(training, sizes, replace(options, mode=mode, memory_budget=None))
            except NeedsHaloError as error:
                refusal = f"mode='auto' does not take models that see whole neighbourhoods: {error}"
                break
            except (RefusedError, ShardpassError) as error:
                refusal = str(error)
                break
            except Exception as error:
                refusal = (
                    f"mode='auto' could not run the model on a made-up rank: {type(error).__name__}: {error}. Choose "
                    f"mode='sar', 'keep' or 'halo'"
                )
                break
            row = Estimate.of(measured, sizes.ranks, mode)
            found.append(asdict(replace(row, loading=0)))  # it is loaded
    return {"refusal": refusal, "estimates": found}


def _training(
    frontend: Frontend,
    pristine: nn.Module,
    model: nn.Module,
    comm: Ranks,
    args: Any,
    kwargs: Any,
    method: str,
) -> Training:
    """The training of copies of the model with made-up arguments like the real ones, and with Adam."""
    index = _relation(frontend, args, kwargs)
    assert index is not None
    flags = {name: module.training for name, module in model.named_modules()}
    num_nodes, num_edges = index.plan.num_dst, index.size(1)

    def build(dry: Ranks, graph: ShardedGraph) -> nn.Module:
        made = copy.deepcopy(pristine, {id(comm): dry})
        for name, module in made.named_modules():
            module.training = flags.get(name, module.training)
        for table in node_embeddings(made).values():
            table.weight = OwnRows(table.weight.new_zeros((graph.num_nodes, table.weight.size(1))))
        return frontend.wrap(made, dry)

    def inputs(graph: ShardedGraph) -> Any:
        made: dict[int, Any] = {}

        def argument(leaf: Any) -> Any:
            if id(leaf) not in made:
                made[id(leaf)] = _made_up(frontend, leaf, graph, num_nodes, num_edges)
            return made[id(leaf)]

        return tree_map(argument, (args, kwargs))

    def loss(made: nn.Module, given: Any) -> Tensor:
        called = made if method == "forward" else getattr(made, method)
        leaves = [t for t in tree_leaves(called(*given[0], **given[1])) if isinstance(t, Tensor) and t.requires_grad]
        return torch.stack([_loss_of(t) for t in leaves]).sum()

    return Training(build, inputs, loss, torch.optim.Adam)


def _loss_of(out: Tensor) -> Tensor:
    """As large in memory as a cross entropy."""
    return F.log_softmax(out.flatten(1), -1).mean() if out.dim() > 1 else out.mean()


def _made_up(frontend: Frontend, leaf: Any, graph: ShardedGraph, num_nodes: int, num_edges: int) -> Any:
    """An argument of the call, as large in relation to `graph` as the real one to the real graph."""
    if frontend.core_of(leaf) is not None:
        fields = {
            kind: {name: _rows_like(rows, _count(graph, kind)) for name, rows in named.items()}
            for kind, named in frontend.fields_of(leaf).items()
        }
        return frontend.sharded(graph, fields)
    if _is_index(leaf):
        return graph.edge_index
    if isinstance(leaf, BatchIndex):
        return graph.batch
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() and leaf.size(0) in (num_nodes, num_edges):
        return _rows_like(leaf, graph.num_nodes if leaf.size(0) == num_nodes else graph.num_edges)
    return leaf.detach().clone()


def _count(graph: ShardedGraph, kind: Any) -> int:
    return {NODE: graph.num_nodes, EDGE: graph.num_edges}[kind]


def _rows_like(real: Tensor, count: int) -> Tensor:
    """`count` rows of the kind of the real ones; numbers of classes stay in range."""
    largest = int(real.max()) + 1 if real.numel() and not real.is_floating_point() else 1
    made = made_up_rows(Field(tuple(real.shape[1:]), real.dtype), count, max(1, largest))
    return made.requires_grad_(real.requires_grad)
