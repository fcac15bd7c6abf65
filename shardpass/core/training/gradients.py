"""Parameters and gradients that are the same on all ranks.

[Note: how misuse is found]
Every trainable parameter of a model has one `_Watch`, which is attached as autograd hooks at the first forward or sync.
Hooks are neither pickled nor copied with a parameter, so what a watch knows is valid for as long as it exists.

* A gradient that was summed over ranks must not be summed again, nor may backward add to it. `sync_gradients` tags the
  gradient tensor. The tag is taken off when backward adds to a gradient that is all zeros, as after ``zero_grad``. A
  tagged gradient that is not all zeros is refused at the next sync.
* A parameter must be the same on every rank. `sync_gradients` compares sums of its values. Unlike processors may round
  differently, so a hundredth of its norm is allowed; what was drawn rank by rank differs by about the norm.
* A parameter must not change between backward and the sync. The watch records the parameter's version whenever a
  gradient arrives. The next sync compares it, and so does the next forward if there was no sync.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardpass.core.ranks import (
    Ranks,
    describe,
    dtype_name,
    refuse_shared_model,
    require_ranks,
    torch_private,
    warn_of_unwrapped,
)
from shardpass.core.training.buckets import BUCKET_BYTES, broadcast_tensors, sum_tensors
from shardpass.core.training.objective import warn_of_own_loss
from shardpass.errors import DivergenceError, RefusedError, ShardpassError

_ABSENT, _PRESENT, _SUMMED, _STEPPED, _SPARSE = range(5)
_UNLIKE = 0.01  # of the norm of a parameter; see the note
_PROBLEMS = {
    _SUMMED: "was already summed over ranks: call optimizer.zero_grad() before each backward that follows a sum, and "
    "sync_gradients once after it",
    _STEPPED: "belongs to parameter values that have changed since backward: call sync_gradients after the last "
    "backward and before optimizer.step()",
    _SPARSE: "is sparse: build the layer with sparse=False, or let ranks own its rows (NodeEmbedding)",
}


def sync_parameters(model: nn.Module, comm: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Give every rank the parameters and buffers of rank 0. Collective.

    Parameters marked ``shardpass_local`` (rows owned by ranks) are left alone, and tied parameters travel once. Records
    of the gradients of earlier backward passes are dropped.

    Args:
        model: the same architecture on every rank: names, shapes and dtypes of parameters and buffers are compared.
        comm: the ranks.
        bucket_bytes: tensors travel concatenated in buckets of about this size.

    Raises:
        ValueError: on every rank, if the models differ; it names the first difference.
    """
    named = [*alike(model), *model.named_buffers()]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"parameter {name!r} is not initialised yet: run the lazy module once before wrapping it")
    own = [
        f"{name}: {dtype_name(tensor.dtype)}, rows of own nodes of shape {[*tensor.shape[1:]]}"
        for name, tensor in model.named_parameters()
        if getattr(tensor, "shardpass_local", False)
    ]
    own += [f"{name}: {describe(tensor)}" for name, tensor in named]
    first, *others = [[*found, "nothing more"] for found in comm.all_gather_object(own, "sync_parameters")]
    for rank, other in enumerate(others, 1):
        for left, right in zip(first, other):
            if left != right:
                is_per_node = re.sub(r"\[\d+", "[", left) == re.sub(r"\[\d+", "[", right)
                hint = ", and take shardpass.NodeEmbedding(graph, width) for rows of own nodes" if is_per_node else ""
                raise ValueError(
                    f"the models differ: {left} on rank 0, {right} on rank {rank}; build the same model on every "
                    f"rank{hint}"
                )
    if comm.size > 1:
        broadcast_tensors([tensor for _, tensor in named], comm, "sync_parameters", bucket_bytes)
    forget_gradients(model)


def sync_gradients(
    model: nn.Module, comm: Ranks, bucket_bytes: int = BUCKET_BYTES, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Sum the gradients of the parameters over ranks, in place. Collective; once per step, after the last backward.

    A parameter that has a gradient on some rank gets one on every rank. One that has none anywhere keeps `None`.
    (Backward through a wrapped model gives zeros to parameters that the loss does not reach.) Parameters marked
    ``shardpass_local`` are left alone. Buckets are summed in a fixed order.

    If backward came through none of the losses of this package on more than one rank, a warning says so once: the mean
    of a rank's own rows is not the objective of the whole graph. Another one is for hooks of parameters, which see
    gradients before they are summed, and a third for a model that ran without being wrapped.

    Args:
        model: the same architecture on every rank.
        comm: the ranks.
        bucket_bytes: gradients travel concatenated, per dtype, in buckets of about this size.
        scaler: what has scaled the loss, if it was scaled. It skips a step if a gradient is not finite. If that is one
            of rows owned by a rank, every rank skips it.

    Raises:
        ShardpassError: on every rank, if a gradient was summed before, a parameter has changed since backward, or a
            gradient is sparse. See [Note: how misuse is found].
        DivergenceError: on every rank, if a parameter differs between ranks.
        RefusedError: DistributedDataParallel is around the model or within it, or ranks that are threads hold one
            model.
    """
    require_ranks(comm, "sync_gradients(model, comm)")
    _refuse_ddp_within(model)
    refuse_shared_model(model, comm, "sync_gradients")
    named = list(alike(model))
    warn_of_unwrapped(model, comm, stacklevel=2)
    found = _with_gradients(named, comm)
    if found:
        warn_of_own_loss(comm, stacklevel=2)
    _warn_of_hooks(named, comm, stacklevel=2)
    if comm.size > 1:
        gradients = [_gradient_or_zeros(parameter) for parameter in reversed(found)]  # as backward meets them
        sum_tensors(gradients, comm, "sync_gradients", bucket_bytes)
        if scaler is not None and scaler.is_enabled():
            _skip_together(model, comm)
    for _, parameter in named:
        _mark_summed(parameter)


def _skip_together(model: nn.Module, comm: Ranks) -> None:
    """Make a gradient infinite on every rank if one of rows owned by a rank is not finite there. Collective."""
    shared = [p.grad for p in model.parameters() if p.grad is not None and not getattr(p, "shardpass_local", False)]
    local = [p.grad for p in model.parameters() if p.grad is not None and getattr(p, "shardpass_local", False)]
    lost = torch.tensor([not all(bool(grad.isfinite().all()) for grad in local)])
    if comm.all_reduce(lost, "max", "sync_gradients: finite").item():
        for grad in [grad for grad in (*shared, *local) if grad.numel()][:1]:
            grad.detach().view(-1)[0] = float("inf")


def clip_grad_norm(model: nn.Module, max_norm: float, comm: Ranks) -> Tensor:
    """The 2-norm of all gradients, 0-dim float64; gradients are then scaled to at most `max_norm`. Collective.

    Call it after `sync_gradients`. Gradients of rows owned by ranks (`NodeEmbedding`) are those of all ranks, and every
    rank scales by the same factor, while `torch.nn.utils.clip_grad_norm_` would see each rank's own rows. Without such
    rows the two do the same.

    Args:
        model: the same architecture on every rank.
        max_norm: the largest norm that is left.
        comm: the ranks.

    Raises:
        ShardpassError: on every rank, if gradients were not summed over ranks yet on one.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=comm.device)  # squares of own rows; gradients not summed yet
    shared = torch.zeros((), dtype=torch.float64, device=comm.device)
    found = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    for parameter, gradient in found:
        square = torch.linalg.vector_norm(gradient.detach().double()).square().to(comm.device)
        if getattr(parameter, "shardpass_local", False):
            sums[0] += square
        else:
            shared += square
            watch = _watch_of(parameter)
            sums[1] += int(watch is not None and watch.version is not None)
    squares, unsummed = comm.all_reduce(sums, "sum", "clip_grad_norm").unbind()
    if unsummed:
        raise ShardpassError("clip_grad_norm: gradients are not summed over ranks yet; call sync_gradients before it")
    norm = (shared + squares).sqrt()
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch does
    for _, gradient in found:
        gradient.detach().mul_(factor)
    return norm


def note_forward(model: nn.Module) -> None:
    """Watch the gradients of the parameters from now on. The wrapper calls it at every outermost forward.

    Raises:
        ShardpassError: a parameter has changed since the last backward although its gradient was not summed.
        RefusedError: the forward runs inside DistributedDataParallel.
    """
    if torch_private.is_inside_ddp():
        raise RefusedError(_ddp_sentence("the wrapped model"))
    if not torch.is_grad_enabled():
        return
    for name, parameter in alike(model):
        watch = _watch_of(parameter)
        if watch is not None and watch.has_changed(parameter):
            raise ShardpassError(
                f"parameter {name!r} has changed since the last backward, but its gradient was not summed over ranks: "
                f"call sync_gradients(model, comm) after backward and before optimizer.step(). (If you dropped those "
                f"gradients on purpose, call sync_parameters(model, comm) first.)"
            )
        if watch is not None and parameter.grad is None:
            watch.version = None  # dropped without a step


def forget_gradients(model: nn.Module) -> None:
    """Forget what was recorded about earlier backward passes, as after loading other parameter values."""
    for _, parameter in alike(model):
        _forget(parameter)


def refuse_as_built(model: nn.Module) -> None:
    """Raise if `model` cannot be wrapped as it is built.

    Raises:
        RefusedError: it averages gradients over ranks, or a parameter has no shape yet.
    """
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        raise RefusedError(
            f"{type(model).__name__} averages gradients, but those of a sharded graph must be summed: wrap the "
            f"model inside it, and call sync_gradients(model, comm) after backward"
        )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise RefusedError(
                f"parameter {name!r} has no shape yet (a lazy layer, in_channels=-1). Give the number of input "
                f"channels, or run the model once on a few nodes before wrap"
            )


def _refuse_ddp_within(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise RefusedError(_ddp_sentence(f"submodule {name!r}" if name else "the model"))


def _ddp_sentence(where: str) -> str:
    return (
        f"DistributedDataParallel around {where} is refused: it averages gradients over ranks, while the gradients of "
        f"a sharded graph are parts of one sum. Remove it and call sync_gradients(model, comm) after backward"
    )


class _Watch:
    """What is known of one parameter's gradient. Autograd calls it when a gradient has been accumulated.

    Attributes:
        version: the parameter's version when the latest gradient arrived that was not summed; `None` without one.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._onto_summed = False

    def before(self, parameter: Tensor | None) -> None:
        """Autograd is about to add to the gradient."""
        self._onto_summed = parameter is not None and _is_summed(parameter)

    def __call__(self, parameter: Tensor) -> None:
        if hasattr(parameter.grad, "shardpass_summed") and not self._onto_summed:
            del parameter.grad.shardpass_summed  # type: ignore[union-attr]
        self._onto_summed = False
        self.version = torch_private.version_of(parameter)

    def has_changed(self, parameter: Tensor) -> bool:
        """Whether the parameter has changed since a gradient arrived that was not summed."""
        return self.version not in (None, torch_private.version_of(parameter))


class _Before(NamedTuple):
    """The hook by which a watch is told that a gradient is to be added."""

    watch: _Watch
    parameter: weakref.ref[Tensor]

    def __call__(self, _: Tensor) -> None:
        self.watch.before(self.parameter())


def _watch_of(parameter: Tensor) -> _Watch | None:
    """The watch of a trainable parameter, attached now if it has none; `None` for a frozen one."""
    for hook in torch_private.grad_hooks(parameter):
        if isinstance(hook, _Watch):
            return hook
    if not (parameter.requires_grad and parameter.is_leaf):
        return None
    watch = _Watch()
    parameter.register_hook(_Before(watch, weakref.ref(parameter)))
    parameter.register_post_accumulate_grad_hook(watch)
    return watch


class _HasWarned:
    """Whether this run was warned of hooks."""

    of_hooks = False


def _warn_of_hooks(named: list[tuple[str, nn.Parameter]], comm: Ranks, stacklevel: int) -> None:
    """Warn once on rank 0 if parameters have hooks of the user's, which see gradients before they are summed."""
    warned = comm.caches.of(_HasWarned)
    if comm.size == 1 or comm.rank > 0 or warned.of_hooks:
        return
    for name, parameter in named:
        if any(not isinstance(hook, (_Watch, _Before)) for hook in torch_private.grad_hooks(parameter)):
            warned.of_hooks = True
            warnings.warn(
                f"parameter {name!r} has a gradient hook, which sees the part of this rank before sync_gradients sums "
                f"over {comm.size} ranks: a clip, a norm or an optimizer step there differs from that on the whole "
                f"graph. Do it after sync_gradients; shardpass.clip_grad_norm clips. A hook that only scales is right",
                stacklevel=stacklevel + 1,
            )
            return


def alike(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The names of the parameters that are the same on all ranks, and the parameters; the same object once."""
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "shardpass_local", False):
            yield name, parameter


def _with_gradients(named: list[tuple[str, nn.Parameter]], comm: Ranks) -> list[nn.Parameter]:
    """The parameters that have a gradient on some rank. Collective; the first problem of any rank is raised on all."""
    states, unlike = [[_state_of(parameter) for _, parameter in named]], list[tuple[int, int]]()
    if comm.size > 1:
        states, unlike = _on_all_ranks(states[0], [parameter for _, parameter in named], comm)
    for rank, row in enumerate(states):
        for (name, _), state in zip(named, row):
            if state in _PROBLEMS:
                raise ShardpassError(f"the gradient of {name!r} on rank {rank} {_PROBLEMS[state]}")
    if unlike:
        rank, number = unlike[0]
        raise DivergenceError(
            f"parameter {named[number][0]!r} is not the same on rank 0 and rank {rank}. To wrap the model makes it the "
            f"same. If it is wrapped, something has changed it since, such as reset_parameters(), for which each rank "
            f"has random numbers of its own. Call that in `with shardpass.seed(number, comm):`, or call "
            f"shardpass.sync_parameters(model, comm) after it"
        )
    return [parameter for (_, parameter), found in zip(named, zip(*states)) if any(found)]


def _on_all_ranks(
    states: list[int], parameters: list[nn.Parameter], comm: Ranks
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The states on each rank, and ``(rank, number)`` of the parameters that are not as on rank 0. Collective."""
    values = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in parameters]
    sums = [value.sum(dtype=torch.float64) for value in values]
    norms = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in values]
    own = torch.tensor(states, dtype=torch.float64, device=comm.device)
    own = torch.cat([own, *(found.to(comm.device).view(1) for found in (*sums, *norms))])
    label = f"sync_gradients of {len(parameters)} parameters"
    every, sums_of, norms_of = torch.stack(comm.all_gather(own, label)).cpu().view(comm.size, 3, len(states)).unbind(1)
    unlike = ((sums_of - sums_of[0]).abs() > _UNLIKE * norms_of.amax(0)).nonzero().tolist()
    return every.tolist(), [(rank, number) for rank, number in unlike]


def _state_of(parameter: nn.Parameter) -> int:
    """What is known of its gradient before it is summed."""
    watch = _watch_of(parameter)
    if parameter.grad is None:
        return _ABSENT
    if parameter.grad.layout != torch.strided:
        return _SPARSE
    if _is_summed(parameter):
        return _SUMMED
    return _STEPPED if watch is not None and watch.has_changed(parameter) else _PRESENT


def _is_summed(parameter: Tensor) -> bool:
    """Whether its gradient is, or contains, a sum over ranks that is not all zeros."""
    grad = parameter.grad
    return grad is not None and hasattr(grad, "shardpass_summed") and bool(grad.any())


def _mark_summed(parameter: nn.Parameter) -> None:
    """Note that its gradient is a sum over ranks from now on."""
    grad: Any = parameter.grad
    if grad is not None:
        grad.shardpass_summed = True
    _forget(parameter)


def _forget(parameter: nn.Parameter) -> None:
    """Forget that a gradient has arrived that was not summed."""
    watch = _watch_of(parameter)
    if watch is not None:
        watch.version = None


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Its gradient, which is set to zeros if it is `None`."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
