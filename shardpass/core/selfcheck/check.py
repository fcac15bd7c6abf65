"""The self-check of `wrap`: the model on a small random graph, whole and sharded, before it runs on the real one.

[Note: what the check can see]
Reductions over all nodes or edges outside message passing give other numbers on a sharded graph, silently. So at the
first forward in each training mode, copies of the model run in float64, without dropout, on a graph of some twenty
nodes: the unmodified model on the whole of it, and wrapped ones on three in-process ranks. Outputs, gradients and
buffers must agree. Node and edge tensors of the call are told by their number of rows and replaced by rows drawn from
the real ones, so that values and categories are such as the model expects. A random graph cannot prove that there is
no difference; it finds those that every graph shows.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardpass.core.graphs import OwnRows, ShardedEdgeIndex, ShardedGraph, node_embeddings
from shardpass.core.ranks import Options, Ranks, torch_private
from shardpass.core.selfcheck.compare import Trial, difference, kind_of
from shardpass.core.selfcheck.frontend import Frontend
from shardpass.core.selfcheck.small import CannotCheckError, SmallCall
from shardpass.core.tracing import DROPOUTS, RANDOM_FILLS
from shardpass.errors import NeedsHaloError, RefusedError

RANKS = 3
_LARGEST = 1 << 30  # bytes of parameters of all copies
_MOST_ROWS = 2000  # more than a small graph has nodes of a type


def copy_for_check(model: nn.Module) -> nn.Module | None:
    """A copy of `model` for `check_model`, without its node embeddings' rows; None, with a warning, if it fails."""
    without = {
        id(table.weight): OwnRows(table.weight.detach()[:1].clone()) for table in node_embeddings(model).values()
    }
    try:
        return copy.deepcopy(model, without)
    except Exception as error:  # whatever its own __deepcopy__ raises
        warnings.warn(
            f"{type(model).__name__} runs without the self-check, it cannot be copied: {type(error).__name__}: {error}",
            stacklevel=3,
        )
        return None


def check_model(
    frontend: Frontend,
    pristine: nn.Module,
    model: nn.Module,
    comm: Ranks,
    args: Any,
    kwargs: Any,
    method: str = "forward",
) -> None:
    """Refuse `model` if it gives other numbers on a sharded graph. Collective; one rank does the work.

    Args:
        frontend: that wrapped it.
        pristine: a copy of the model from before it was wrapped; its training flags are set.
        model: the wrapped model, whose training flags are taken over.
        args, kwargs: of its first call on a sharded graph.
        method: the method that is called first.

    Raises:
        RefusedError: on every rank, naming the first submodule whose output differs.
    """
    leaves = [frontend.core_of(leaf) or leaf for leaf in torch_private.tree_leaves((args, kwargs))]
    graphs = [leaf for leaf in leaves if isinstance(leaf, (ShardedGraph, ShardedEdgeIndex))]
    own = sum(g.num_nodes if isinstance(g, ShardedGraph) else g.plan.num_dst for g in graphs)
    sizes = comm.all_gather_object(own, "self-check: own nodes")
    chosen = sizes.index(max(sizes))
    options = graphs[0].options if isinstance(graphs[0], ShardedGraph) else graphs[0].plan.options
    verdict = ["", ""]
    if comm.rank == chosen:
        flags = {name: module.training for name, module in model.named_modules()}
        for name, module in pristine.named_modules():
            module.training = flags.get(name, module.training)
        # In a thread of its own no autocast, no_grad, checkpointing or function mode is on.
        with comm.silent(), ThreadPoolExecutor(1) as clean:
            verdict = clean.submit(_verdict, frontend, pristine, comm, args, kwargs, options, method).result()
        gc.collect()  # copies of modules hang together in cycles, with all their parameters and gradients
    refusal, warning = comm.all_gather_object(verdict, "self-check: verdict")[chosen]
    if refusal:
        raise RefusedError(refusal)
    if warning and comm.rank == 0:
        warnings.warn(f"{type(model).__name__} runs without the self-check: {warning}", stacklevel=5)


def _verdict(
    frontend: Frontend, pristine: nn.Module, comm: Ranks, args: Any, kwargs: Any, options: Options, method: str
) -> list[str]:
    """``[why it is refused, why it could not be checked]``; empty where that is not so."""
    if 8 * (RANKS + 1) * sum(p.numel() for p in pristine.parameters()) > _LARGEST:
        return ["", "its parameters are too many to be copied four times"]
    with torch.random.fork_rng(devices=[]):
        problem = ""
        for dtype in (torch.float64, torch.float32):  # code of the model may insist on the one it is made for
            try:
                small = SmallCall(frontend, args, kwargs, method, dtype)
                model = _quietened(pristine, dtype)
                whole, grads = _run_whole(model, small, comm)
                break
            except CannotCheckError as reason:
                return ["", str(reason)]
            except Exception as error:
                problem = problem or f"it does not run on a small random graph ({type(error).__name__}: {error})"
        else:
            return ["", problem]
        try:
            ranks = _run_ranks(model, small, comm, options, grads, whole)
        except NeedsHaloError:
            return ["", ""]  # the call itself will say so
        except RefusedError as error:
            return [str(error), ""]
        except Exception as error:
            return [_breaks(type(pristine).__name__, error), ""]
    if not any(out.is_floating_point() for out in whole.outputs):
        return ["", "it returns no floating point tensor, or one inside an object; return a tensor, tuple or dict"]
    return [difference(type(pristine).__name__, whole, ranks, small), ""]


def _breaks(name: str, error: Exception) -> str:
    return (
        f"{name} runs on a small random graph, but not on the same graph in pieces: {type(error).__name__}: {error}. "
        f"Likely causes: node ids of the whole graph used as rows, a step whose length or number depends on how many "
        f"nodes or edges a rank has, or communication that not every rank takes part in. On the real graph this could "
        f"go unnoticed and give wrong numbers; wrap(..., check=False) skips this check"
    )


def _quietened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of `model` on the CPU, with dropout probabilities 0."""
    model = copy.deepcopy(model).cpu().to(dtype)
    for module in model.modules():
        if isinstance(module, torch_private.AnyDropout):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return model


class _Quiet(TorchFunctionMode):
    """No dropout; random fills are constant, but those from a generator, which are the same in every run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "rrelu":
            args, kwargs = args[:3], {**kwargs, "training": False}
        if name == "gumbel_softmax":  # draws inside, where nothing is seen
            return torch.softmax(args[0] if args else kwargs["logits"], -1)
        out = func(*args, **kwargs)
        filled = name in RANDOM_FILLS and kwargs.get("generator") is None
        return out.fill_(0.5) if filled and isinstance(out, Tensor) else out


def _with_tables(model: nn.Module, ids: dict[Any, Tensor], real: Ranks, comm: Ranks) -> nn.Module:
    """A copy of `model` whose node embeddings hold the rows `ids`, with `comm` wherever it holds the `real` one."""
    model = copy.deepcopy(model, {id(real): comm})
    for position, table in enumerate(node_embeddings(model).values()):
        generator = torch.Generator().manual_seed(position)
        rows = torch.randn(_MOST_ROWS, table.weight.size(1), generator=generator, dtype=torch.float64)
        table.weight = OwnRows(rows[ids[table.node_type]].to(table.weight.dtype))
    return model


def _run_whole(model: nn.Module, small: SmallCall, real: Ranks) -> tuple[Trial, bool]:
    """The trial on the whole graph, and whether the model could run on inputs that require grad."""

    def work(comm: Ranks) -> tuple[Trial, bool]:
        for grads in (True, False):
            try:
                args, kwargs, inputs = small.whole(grads)
                ids = {kind: torch.arange(count) for kind, count in small.counts.items()}
                mine = _with_tables(model, ids, real, comm)
                return _trial(mine, args, kwargs, inputs, ids, small, None, 1), grads
            except RuntimeError:
                if not grads:
                    raise
        raise AssertionError("unreachable")

    found: tuple[Trial, bool] = small.frontend.run(work, 1)[0]
    return found


def _run_ranks(
    model: nn.Module, small: SmallCall, real: Ranks, options: Options, grads: bool, whole: Trial
) -> list[Trial]:
    quick = replace(options, chunk_bytes=1 << 10, wire_dtype=None)

    def work(comm: Ranks) -> Trial:
        comm.drops_in_messages = False
        args, kwargs, inputs, ids = small.sharded(comm, quick, grads)
        mine = small.frontend.wrap(_with_tables(model, ids, real, comm), comm)
        return _trial(mine, args, kwargs, inputs, ids, small, whole, comm.size)

    return small.frontend.run(work, RANKS)


def _trial(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    inputs: list[Tensor],
    ids: dict[Any, Tensor],
    small: SmallCall,
    whole: Trial | None,
    size: int,
) -> Trial:
    called, counts = model if small.method == "forward" else getattr(model, small.method), small.counts
    with _Quiet(), _recorded(model) as modules:
        outputs = [t for t in torch_private.tree_leaves(called(*args, **kwargs)) if isinstance(t, Tensor)]
        total = torch.zeros((), dtype=torch.float64)
        for position, out in enumerate(outputs):
            like = out if whole is None else whole.outputs[position]
            kind = kind_of(like, counts)
            if not out.is_floating_point() or not out.requires_grad:
                continue
            generator = torch.Generator().manual_seed(position)
            weights = torch.rand(like.shape if kind is not None else like.shape[1:], generator=generator)
            finite = torch.where(out.isfinite(), out, 0)
            if kind is not None and out.size(0) == len(ids[kind]):
                total = total + (finite * weights[ids[kind]]).sum()
            elif out.shape == like.shape:  # the same on every rank
                total = total + (finite * weights).tanh().sum() / size
            elif out.shape[1:] == like.shape[1:]:  # some rows: their sum alone would not tell them apart
                total = total + (finite * weights).tanh().sum()
        if total.requires_grad:
            total.backward()
    return Trial(
        [out.detach() for out in outputs],
        [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs],
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()},
        dict(model.named_buffers()),
        modules,
        ids,
        {f"{name}.weight".lstrip(".") for name in node_embeddings(model)},
    )


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The tensors that submodules return while the model runs, by name, in the order in which they first return."""
    found: dict[str, list[Tensor]] = defaultdict(list)

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            found[name] += [t.detach() for t in torch_private.tree_leaves(out) if type(t) in (Tensor, nn.Parameter)]

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
