"""Parameters and gradients kept alike on all ranks.

[Note: how misuse is found]
Every trainable parameter of a model carries one `_Watch`, attached as autograd hooks at the first forward or sync.
Hooks are neither pickled nor copied with a parameter, so what a watch knows is valid for as long as it exists.

* A gradient summed over ranks must not be summed again. `sync_gradients` tags the gradient tensors it has summed. A
  tagged tensor that is not all zeros at the next sync is a second sync; a tagged one that was not all zeros when
  backward added to it (so no ``zero_grad`` came between) is marked stale and refused at the next sync.
* A parameter must not change between backward and the sync. The watch records the parameter's version whenever a
  gradient arrives; the next sync, or the next forward where sync was forgotten, compares.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardpass.backends.communicator import Communicator
from shardpass.core.ranks import Ranks, identity_of, refuse_alike
from shardpass.errors import RefusedError, ShardpassError

_T = TypeVar("_T", bound=Tensor)

BUCKET_BYTES = 25 << 20
ABSENT, PRESENT, SECOND, STALE, STEPPED, SPARSE, CHANGED = range(7)
PROBLEMS = {
    SECOND: "was already summed over ranks: sync_gradients was called twice, or after "
    "sync_during_backward, without zero_grad and backward between",
    STALE: "holds a sum over ranks to which backward has added: call optimizer.zero_grad() before each backward that "
    "follows a sync_gradients",
    STEPPED: "belongs to parameter values that have changed since backward: call sync_gradients after the last "
    "backward and before optimizer.step()",
    SPARSE: "is sparse: build the layer with sparse=False, or let ranks own its rows (NodeEmbedding)",
    CHANGED: "was changed within sync_during_backward after backward had made it: run one backward within the block, "
    "earlier ones before it, and clip or scale gradients after it",
}


def sync_parameters(model: nn.Module, comm: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Give every rank the parameters and buffers of rank 0. Collective.

    Parameters marked ``shardpass_local`` (rows owned by ranks) are left alone; tied parameters travel once. What was
    recorded about gradients of earlier backward passes is forgotten.

    Args:
        model: the same architecture on every rank: names, shapes and dtypes of parameters and buffers are compared.
        comm: the ranks.
        bucket_bytes: tensors travel concatenated in buckets of about this size.

    Raises:
        ValueError: on every rank, if the models differ; names the first difference.
    """
    named = [*alike(model), *model.named_buffers()]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"parameter {name!r} is not initialised yet: run the lazy module once before wrapping it")
    own = [f"{name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in named]
    every = comm.all_gather_object([own, _settings(model)], "sync_parameters")
    for rank, (other, settings) in enumerate(every):
        first = _first_difference(every[0][0], other)
        if first:
            raise ValueError(
                f"the models differ: {first[0]} on rank 0, {first[1]} on rank {rank}; build the same model on "
                f"every rank"
            )
        first = _first_difference(every[0][1], settings)
        if first and comm.rank == 0:
            warnings.warn(
                f"the models differ in a setting: {first[0]} on rank 0, {first[1]} on rank {rank}. If the model "
                f"computes with it, ranks compute different things: build the same model on every rank",
                stacklevel=3,
            )
    if comm.size > 1:
        broadcast_tensors([tensor for _, tensor in named], comm, "sync_parameters", bucket_bytes)
    forget_gradients(model)


def _settings(model: nn.Module) -> list[str]:
    """Numbers, strings and functions that modules hold as attributes, as ``name: value``."""
    found = []
    for prefix, module in model.named_modules():
        for key, value in sorted(vars(module).items()):
            shown = value if isinstance(value, (bool, int, float, str)) else getattr(value, "__qualname__", None)
            if shown is not None and not key.startswith("_"):
                found.append(f"{prefix}.{key}".lstrip(".") + f": {shown}")
    return found


def sync_gradients(model: nn.Module, comm: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum the gradients of the parameters over ranks, in place. Collective; once per step, after the last backward.

    A parameter that has a gradient on some rank gets one on every rank; one that has none anywhere keeps None (backward
    through a wrapped model gives zeros to parameters that the loss does not reach).
    Parameters marked ``shardpass_local`` are left alone. Buckets are summed in a fixed order.

    Args:
        model: the same architecture on every rank.
        comm: the ranks.
        bucket_bytes: gradients travel concatenated, per dtype, in buckets of about this size.

    Raises:
        ShardpassError: on every rank, if a gradient was summed before, backward added to a summed one, a parameter
            changed since backward, or a gradient is sparse. See [Note: how misuse is found].
        RefusedError: DistributedDataParallel is around the model or within it.
    """
    refuse_ddp(model)
    named = list(alike(model))
    states = [state_of(parameter) for _, parameter in named]
    present = agree_on_gradients(named, states, comm, f"sync_gradients of {len(named)} parameters")
    sum_gradients([parameter for (_, parameter), has in zip(named, present) if has], comm, bucket_bytes)
    mark_summed(named)


def clip_grad_norm(model: nn.Module, max_norm: float, comm: Ranks) -> Tensor:
    """The 2-norm of all gradients, 0-dim float64, which are then scaled in place to at most `max_norm`. Collective.

    Call it after `sync_gradients`. Gradients of rows owned by ranks (`NodeEmbedding`) are those of all ranks, and every
    rank scales by the same factor; `torch.nn.utils.clip_grad_norm_` would see each rank's own rows. Without such rows
    the two do the same.

    Args:
        model: the same architecture on every rank.
        max_norm: the largest norm that is left.
        comm: the ranks.

    Raises:
        ShardpassError: on every rank, if gradients were not summed over ranks yet on one.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=comm.device)  # squares of own rows; gradients not summed yet
    shared = torch.zeros((), dtype=torch.float64, device=comm.device)
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        square = torch.linalg.vector_norm(parameter.grad.detach().double()).square().to(comm.device)
        if getattr(parameter, "shardpass_local", False):
            sums[0] += square
            continue
        shared += square
        watch = watch_of(parameter)
        sums[1] += int(watch is not None and watch.version is not None)
    squares, unsummed = comm.all_reduce(sums, "sum", "clip_grad_norm").unbind()
    if unsummed:
        raise ShardpassError("clip_grad_norm: gradients are not summed over ranks yet; call sync_gradients before it")
    norm = (shared + squares).sqrt()
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch does
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach().mul_(factor)
    return norm


def note_forward(model: nn.Module) -> None:
    """Watch the parameters' gradients from now on. For the wrapper, at every outermost forward. Not collective.

    Raises:
        ShardpassError: the parameters changed since the last backward although its gradients were never summed.
        RefusedError: the forward runs inside DistributedDataParallel.
    """
    check_not_ddp()
    if not torch.is_grad_enabled():
        return
    for name, parameter in alike(model):
        watch = watch_of(parameter)
        if watch is None or watch.version is None:
            continue
        if watch.version != parameter._version:
            raise ShardpassError(
                f"parameter {name!r} has changed since the last backward, but its gradient was not summed over ranks: "
                f"call sync_gradients(model, comm) after backward and before optimizer.step(). (If those gradients "
                f"were dropped on purpose, call sync_parameters(model, comm) first.)"
            )
        if parameter.grad is None:
            watch.version = None  # dropped without a step


def forget_gradients(model: nn.Module) -> None:
    """Forget what was recorded about earlier backward passes, as after loading other parameter values."""
    for watch in (watch_of(parameter) for _, parameter in alike(model)):
        if watch is not None:
            watch.version = None


def refuse_ddp(model: nn.Module) -> None:
    """Raise if gradients of `model` are averaged by DistributedDataParallel.

    Raises:
        RefusedError: they are.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise RefusedError(_ddp_sentence(f"submodule {name!r}" if name else "the model"))


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


def check_not_ddp() -> None:
    """Raise if the caller runs inside the forward of DistributedDataParallel. For the wrapper's forward.

    Raises:
        RefusedError: it does.
    """
    if DistributedDataParallel._get_active_ddp_module() is not None:
        raise RefusedError(_ddp_sentence("the wrapped model"))


def broadcast_tensors(tensors: Sequence[Tensor], comm: Ranks, label: str, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Overwrite `tensors` with those of rank 0, in place; any dtype. Collective; shapes and dtypes must agree."""
    with torch.no_grad():
        for bucket in cut_buckets(tensors, bucket_bytes):
            flat = flatten(bucket, comm.device)
            comm.broadcast(flat.view(torch.uint8), 0, label)  # bytes: booleans and complex numbers travel too
            if comm.rank != 0:
                unpack(flat, bucket)


class _Watch:
    """What is known of one parameter's gradient; called by autograd after a gradient was accumulated."""

    def __init__(self) -> None:
        self.version: int | None = None  # of the parameter when the latest unsummed gradient arrived
        self.onto_summed = False

    def before(self, parameter: Tensor | None) -> None:
        grad = None if parameter is None else parameter.grad
        self.onto_summed = grad is not None and hasattr(grad, "shardpass_summed") and bool(grad.any())

    def __call__(self, parameter: Tensor) -> None:
        grad: Any = parameter.grad
        if self.onto_summed:
            grad.shardpass_stale = True
        else:
            for tag in ("shardpass_summed", "shardpass_stale"):
                if hasattr(grad, tag):
                    delattr(grad, tag)
        self.onto_summed = False
        self.version = parameter._version


def watch_of(parameter: Tensor) -> _Watch | None:
    """The watch of a trainable parameter, attached now if it has none; None for a frozen one."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():
        if isinstance(hook, _Watch):
            return hook
    if not (parameter.requires_grad and parameter.is_leaf):
        return None
    watch, reference = _Watch(), weakref.ref(parameter)
    parameter.register_hook(lambda _: watch.before(reference()))
    parameter.register_post_accumulate_grad_hook(watch)
    return watch


def alike(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are alike on all ranks; the same object once."""
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "shardpass_local", False):
            yield name, parameter


def agree_on_gradients(named: list[tuple[str, nn.Parameter]], states: list[int], comm: Ranks, label: str) -> list[bool]:
    """Which parameters have a gradient on some rank. Collective; the first problem of any rank is raised on all.

    Args:
        named: names and parameters, the same on every rank.
        states: `state_of` each of them here.
        comm: the ranks.
        label: of the collective.
    """
    own = [*states, *identity_of([parameter for _, parameter in named], comm)]
    rows = torch.cat(comm.all_gather(torch.tensor([own], dtype=torch.uint8, device=comm.device), label)).cpu()
    every, identities = rows[:, : len(states)], rows[:, len(states) :]
    refuse_alike(identities.tolist())
    found = [(state, rank, column) for rank, row in enumerate(every.tolist()) for column, state in enumerate(row)]
    for state, rank, column in found:
        if state in PROBLEMS:
            raise ShardpassError(f"the gradient of {named[column][0]!r} on rank {rank} {PROBLEMS[state]}")
    present: list[bool] = every.any(0).tolist()
    return present


def state_of(parameter: nn.Parameter) -> int:
    """What is to be said of its gradient before it is summed: ``ABSENT``, ``PRESENT`` or one of `PROBLEMS`."""
    grad, watch = parameter.grad, watch_of(parameter)
    if grad is None:
        return ABSENT
    if grad.layout != torch.strided:
        return SPARSE
    if hasattr(grad, "shardpass_stale") and bool(grad.any()):
        return STALE
    if hasattr(grad, "shardpass_summed") and bool(grad.any()):
        return SECOND
    if watch is not None and watch.version is not None and watch.version != parameter._version:
        return STEPPED
    return PRESENT


def mark_summed(named: list[tuple[str, nn.Parameter]]) -> None:
    """Note that the gradients are sums over ranks from now on."""
    for _, parameter in named:
        if parameter.grad is not None:
            parameter.grad.shardpass_summed = True  # type: ignore[attr-defined]
        watch = watch_of(parameter)
        if watch is not None:
            watch.version = None


def sum_gradients(parameters: Sequence[nn.Parameter], comm: Ranks, bucket_bytes: int) -> None:
    """Sum the gradients of `parameters`, the same on every rank, over ranks in place; None counts as zeros. Collective.

    Buckets run from the last parameter to the first, as backward meets them.
    """
    gradients = [gradient_of(parameter) for parameter in reversed(parameters)]
    for bucket in cut_buckets(gradients, bucket_bytes) if comm.size > 1 else ():
        flat = flatten(bucket, comm.device)
        unpack(sum_flat(flat, comm, f"sync_gradients bucket of {len(bucket)}"), bucket)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Its gradient, set to zeros where it is None."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def cut_buckets(tensors: Sequence[_T], bucket_bytes: int) -> Iterator[list[_T]]:
    """The tensors in order, grouped by dtype and cut into lists of about `bucket_bytes`."""
    by_dtype: dict[torch.dtype, list[_T]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        bucket: list[_T] = []
        size = 0
        for tensor in group:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def flatten(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A copy of all of them, one after the other, ``[numbers in all]``."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(device)


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with what `flatten` has put one after the other."""
    with torch.no_grad():
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(values.view(tensor.shape))


def sum_flat(flat: Tensor, comm: Communicator, label: str) -> Tensor:
    """The sum over ranks, a new tensor; complex numbers too. Collective."""
    if flat.is_complex():
        return torch.view_as_complex(comm.all_reduce(torch.view_as_real(flat), "sum", label))
    return comm.all_reduce(flat, "sum", label)


def _first_difference(own: list[str], other: list[str]) -> tuple[str, str] | None:
    for left, right in zip([*own, "nothing more"], [*other, "nothing more"]):
        if left != right:
            return left, right
    return None


def _ddp_sentence(where: str) -> str:
    return (
        f"DistributedDataParallel around {where} is refused: it averages gradients over ranks, while the gradients of "
        f"a sharded graph are parts of one sum. Remove it and call sync_gradients(model, comm) after backward"
    )
