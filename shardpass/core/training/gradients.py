"""Parameters and gradients that are the same on all ranks.

[Note: where gradients are summed]
Within a wrapped model parameters meet rows, of which a rank has its own. So what backward finds there is a part of the
gradient, and the parts of all ranks add up to it. While an outermost call of the model runs, its modules hold copies of
the parameters, which share their memory: `_Sum` has made them, and its backward sums over ranks. So the sum is a node
in the graph of backward, in front of the parameters. Whatever looks at the gradient of a parameter sees all of it: an
optimizer, clipping, a hook, `torch.autograd.grad`. And what every rank computes alike of the parameters themselves,
outside of the model, such as a penalty on weights, counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardpass.core.ranks import (
    ParameterCopies,
    Ranks,
    SummedModels,
    agree,
    begin_call,
    is_local,
    is_parameter,
    refuse_shared_model,
    require_model,
    require_ranks,
    torch_private,
    warn_of_unwrapped,
)
from shardpass.core.training.buckets import BUCKET_BYTES, broadcast_tensors, summed_tensors
from shardpass.core.training.groups import is_fully_sharded, is_sharded, refuse_ddp, refuse_parts
from shardpass.core.training.same_model import alike, first_difference, refuse_unlike
from shardpass.errors import RefusedError, ShardpassError

_KEPT = 8  # lists of copies of a model, for itself and for parts of it that are called by themselves
_ABSENT, _PRESENT, _SPARSE, _SUMMED, _INFINITE = range(5)
_IN_BACKWARD = "shardpass_summed"  # of a parameter, see `is_summed_before`
_SUM = "shardpass_sum"  # of a gradient that sync_gradients has summed: its version then
_PROBLEMS = {
    _SPARSE: "is sparse: build the layer with sparse=False, or let ranks own its rows (NodeEmbedding)",
    _SUMMED: "was already summed over ranks: call optimizer.zero_grad() before the next backward, and sync_gradients "
    "once after it",
}


def sync_parameters(model: nn.Module, comm: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Give every rank the parameters and buffers of rank 0. Collective.

    Parameters marked ``shardpass_local`` (rows owned by ranks) are left alone, and tied parameters travel once.

    Args:
        model: the same architecture on every rank: names, shapes and dtypes of parameters and buffers are compared.
        comm: the ranks.
        bucket_bytes: tensors travel concatenated in buckets of about this size.

    Raises:
        ValueError: on every rank, if the models differ; it names the first difference.
        RefusedError: ``fully_shard`` has sharded the model.
    """
    require_model(model, "sync_parameters(model, comm)")
    refuse_parts(model, "sync_parameters", "call it before fully_shard; wrap does, too")
    named = [*alike(model), *model.named_buffers()]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"parameter {name!r} is not initialised yet: run the lazy module once before wrapping it")
    problem = first_difference(model, named, comm, "sync_parameters")
    if problem is not None:
        raise ValueError(problem)
    if comm.size > 1:
        broadcast_tensors([tensor for _, tensor in named], comm, "sync_parameters", bucket_bytes)


class GradientSums:
    """Sums the gradients of a wrapped model over ranks, in backward. See [Note: where gradients are summed].

    Args:
        comm: the ranks.
        model: its parameters are told by `is_summed_before` from then on.

    Attributes:
        waits: gradients that backward finds now are held until it finds others when this is off again.
        is_left: gradients are not summed here, but by `sync_gradients`.
        local: the names of the parameters that are rows owned by ranks.
    """

    def __init__(self, comm: Ranks, model: nn.Module) -> None:
        self.comm, self.waits, self.is_left = comm, False, False
        self.local = {name for name, parameter in model.named_parameters() if is_local(parameter)}
        self._copies: list[tuple[Any, Tensor, ParameterCopies]] = []  # of parts, and of the whole model
        self._held: Any = torch_private.WeakTensorKeyDictionary()
        comm.caches.of(SummedModels).models.add(model)
        for _, _, parameter in _places(model):
            setattr(parameter, _IN_BACKWARD, True)

    def leave(self, model: nn.Module) -> None:
        """Leave gradients to `sync_gradients`, since `model` shares its parameters with one that is not wrapped."""
        self.is_left = True
        self.comm.caches.of(SummedModels).models.discard(model)
        for _, _, parameter in _places(model):
            delattr(parameter, _IN_BACKWARD)

    @contextmanager
    def within(self, model: nn.Module) -> Iterator[None]:
        """A block of an outermost call in which modules hold copies of parameters. Collective, and so is backward."""
        is_on = torch.is_grad_enabled() and self.comm.size > 1 and not self.is_left
        places = list(_places(model)) if is_on else []
        if not places:
            yield
            return
        token, copies = self._made(places)
        forward = self.comm.forward
        assert forward is not None and forward.token is not None
        forward.token, forward.copies = forward.token + token, (*forward.copies, copies)
        with copies.held():
            yield

    def _made(self, places: list[tuple[dict[str, Any], str, Tensor]]) -> tuple[Tensor, ParameterCopies]:
        """The copies for `places`, and a token of theirs: the same ones as long as nothing but values changes."""
        parameters = [*dict.fromkeys(parameter for _, _, parameter in places)]
        known = [(id(p), *_memory(p), p.dtype, p.shape, p.grad_fn) for p in parameters]
        for like, token, copies in self._copies:
            if like == known:
                return token, ParameterCopies(places, copies.copy_of)
        number, start = begin_call(self.comm, f"gradients of {len(parameters)} parameters")
        label = f"gradients of {len(parameters)} parameters #{number}"
        token, *found = _Sum.apply(torch.zeros_like(start, requires_grad=True), self, label, *parameters)
        for parameter in parameters:
            setattr(parameter, _IN_BACKWARD, True)
        made = ParameterCopies(places, dict(zip(parameters, found)))
        self._copies = [*self._copies[1 - _KEPT :], (known, token, made)]
        return token, made

    def summed(self, parameters: list[Tensor], parts: tuple[Tensor | None, ...], label: str) -> list[Tensor | None]:
        """What backward is to hand on for the `parts` that it has found on this rank. Collective, unless it waits."""
        if self.waits:
            return [*map(self._hold, parameters, parts)]
        return summed_gradients(parameters, [*map(self._with_held, parameters, parts)], self.comm, label)

    def _hold(self, parameter: Tensor, part: Tensor | None) -> Tensor | None:
        if part is None or is_local(parameter):
            return part
        self._held[parameter] = part + self._held.get(parameter, 0)
        return torch.zeros_like(part)

    def _with_held(self, parameter: Tensor, part: Tensor | None) -> Tensor | None:
        held = self._held.pop(parameter, None)
        if held is None or parameter.grad is None:  # as zero_grad leaves it, for gradients that are not wanted
            return part
        return held if part is None else part + held

    def __reduce__(self) -> Any:
        raise TypeError(
            "a wrapped model holds a communicator, which belongs to its process: save model.state_dict() (or "
            "shardpass.save_checkpoint), and wrap a new model before it is loaded"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSums:
        return memo.setdefault(id(self), GradientSums(self.comm, nn.Module()))  # type: ignore[no-any-return]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """A block whose backward passes sum no gradients over ranks; the next one after it sums those of all.

    It saves traffic where gradients are accumulated over several backward passes, which is right without it, too. In
    the block, ``.grad`` does not tell gradients; ``zero_grad`` drops those that wait. Every rank enters it alike.

    Args:
        model: a wrapped model.

    Raises:
        TypeError: the model is not wrapped.
        RefusedError: it is sharded by ``fully_shard``.
    """
    sums = getattr(model, "_shardpass_wrapped", None)
    if not isinstance(sums, GradientSums):
        raise TypeError(f"no_sync: {type(model).__name__} is not wrapped, so nothing sums its gradients in backward")
    if is_fully_sharded(model):
        raise RefusedError(
            "no_sync: fully_shard takes the gradients of each backward away: call model.set_requires_gradient_sync"
            "(False) before all backward passes of a step but the last, and then with True"
        )
    before, sums.waits = sums.waits, True
    try:
        yield
    finally:
        sums.waits = before


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where modules hold parameters that want a gradient."""
    for module in model.modules():
        held: dict[str, Any] = torch_private.parameters_of(module)  # type: ignore[assignment]
        for name, value in [*held.items()]:
            # and not a copy that an outer call has put there
            if value is not None and value.requires_grad and (value.is_leaf or not is_parameter(value)):
                yield held, name, value


def _memory(parameter: Tensor) -> tuple[int, int]:
    """What tells its memory from others, also where ``fully_shard`` frees it and allocates it again."""
    return torch_private.storage_number(parameter.untyped_storage()), int(parameter.storage_offset())


class _Sum(torch.autograd.Function):
    """Inputs: token, the sums, a label, parameters. Outputs: a token, and copies of them that share their memory."""

    gives_parameters = True

    @staticmethod
    def forward(ctx: Any, token: Tensor, sums: GradientSums, label: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.label, ctx.parameters = sums, label, [*parameters]
        return torch.zeros_like(token), *(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *parts: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_freed(ctx.parameters)
        if torch.is_grad_enabled():
            if ctx.sums.waits:
                raise RefusedError(
                    "gradients by parameters with create_graph=True within no_sync would be those of this rank's rows. "
                    "Take them outside of no_sync"
                )
            anchor = torch.zeros((), requires_grad=True)  # sums can be differentiated where no part is of this rank
            return None, None, None, *_Whole.apply(ctx.sums, ctx.parameters, f"{ctx.label} backward", anchor, *parts)
        return None, None, None, *ctx.sums.summed(ctx.parameters, parts, f"{ctx.label} backward")


class _Whole(torch.autograd.Function):
    """The sums over ranks of parts of gradients. What is made of them counts once, as what is made of parameters does.

    So each part gets the gradient of its sum, which every rank has alike.
    """

    gives_parameters = gives_gradients = True

    @staticmethod
    def forward(
        ctx: Any, sums: GradientSums, parameters: list[Tensor], label: str, anchor: Tensor, *parts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.has_part, ctx.parameters = [part is not None for part in parts], parameters
        return tuple(sums.summed(parameters, tuple(part if part is None else part.clone() for part in parts), label))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(grad if has_part else None for grad, has_part in zip(grads, ctx.has_part))


def _refuse_freed(parameters: list[Tensor]) -> None:
    """Raise if ``fully_shard`` has freed parameters whose gradients are only about to be summed: it would miss them."""
    if any(parameter.numel() and not parameter.untyped_storage().size() for parameter in parameters):
        raise RefusedError(
            "backward has freed parameters that fully_shard has sharded before their gradients were summed over ranks, "
            "as it does where an argument of the module requires a gradient: apply fully_shard to the wrapped model "
            "itself, and give it no such arguments, or use DistributedDataParallel(model, process_group=...)"
        )


def sync_gradients(
    model: nn.Module, comm: Ranks, bucket_bytes: int = BUCKET_BYTES, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Sum the gradients of a model that is not wrapped over ranks, in place. Collective; once per step, after backward.

    For a model that is trained on sampled batches. Of a wrapped model, backward has summed them, and this does nothing.
    A parameter that has a gradient on some rank gets one on every rank. One that has none anywhere keeps `None`.
    Parameters marked ``shardpass_local`` are left alone.

    Args:
        model: the same architecture on every rank.
        comm: the ranks.
        bucket_bytes: gradients travel concatenated, per dtype, in buckets of about this size.
        scaler: what has scaled the loss, if it was scaled. It skips a step if a gradient is not finite. If that is one
            of rows owned by a rank, every rank skips it.

    Raises:
        ShardpassError: on every rank, if a gradient is sparse, or has not changed since it was summed.
        DivergenceError: on every rank, if the model differs between ranks; see `refuse_unlike`.
        RefusedError: DistributedDataParallel averages over these ranks, around the model or within it; ``fully_shard``
            has sharded it; or ranks that are threads hold one model.
    """
    require_ranks(comm, "sync_gradients(model, comm)")
    require_model(model, "sync_gradients(model, comm)")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            refuse_ddp(module, f"submodule {name!r}" if name else "the model", comm)
    comm.run_at_once()
    wrapped = [(module, getattr(module, "_shardpass_wrapped", None)) for module in model.modules()]
    sums = [module for module, found in wrapped if isinstance(found, GradientSums) and not found.is_left]
    summed = {parameter for module in sums for parameter in module.parameters()}
    left = [parameter for _, parameter in alike(model) if parameter not in summed]
    if left:
        refuse_parts(model, "sync_gradients", "use DistributedDataParallel(model, process_group=...)")
        refuse_shared_model(model, comm, "sync_gradients")
        warn_of_unwrapped(model, comm, stacklevel=2)
        refuse_unlike(model, comm)
        found = summed_gradients(left, [p.grad for p in left], comm, "sync_gradients", bucket_bytes, alike(model))
        for parameter, gradient in zip(left, found):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.detach().copy_(gradient)
            else:
                parameter.grad = gradient
            if parameter.grad is not None:
                setattr(parameter.grad, _SUM, torch_private.version_of(parameter.grad))
    if comm.size > 1 and scaler is not None and scaler.is_enabled():
        _skip_together(model, comm)


def summed_gradients(
    parameters: list[Any], parts: list[Tensor | None], comm: Ranks, label: str, bucket_bytes: int = BUCKET_BYTES,
    names: Any = (),
) -> list[Tensor | None]:  # fmt: skip
    """The sums over ranks of `parts` of gradients, `None` where no rank has one. Collective.

    Args:
        parameters: the same on every rank.
        parts: this rank's.
        label: names the call.
        names: pairs of a name and a parameter, for errors.

    Raises:
        ShardpassError: on every rank, if a part is sparse, or was summed already.
    """
    every = agree(comm, label, [_state_of(parameter, part) for parameter, part in zip(parameters, parts)])
    named = {parameter: repr(name) for name, parameter in names}
    for rank, row in enumerate(every):
        for parameter, state in zip(parameters, row):
            if state in _PROBLEMS:
                name = named.get(parameter, f"of shape {[*parameter.shape]}")
                raise ShardpassError(f"the gradient of parameter {name} on rank {rank} {_PROBLEMS[state]}")
    if comm.size == 1:
        return parts
    wanted = [any(states) and not is_local(parameter) for parameter, states in zip(parameters, zip(*every))]
    given = [
        torch.zeros_like(parameter) if part is None else part
        for parameter, part, is_wanted in zip(parameters, parts, wanted) if is_wanted
    ]  # fmt: skip
    sums = iter(summed_tensors(given, comm, label, bucket_bytes))
    found = [next(sums) if is_wanted else part for is_wanted, part in zip(wanted, parts)]
    if any(_INFINITE in row for row in every):  # what scales losses skips the step then, and it must on every rank
        next(gradient for gradient in found if gradient is not None and gradient.numel()).view(-1)[0] = float("inf")
    return found


def _skip_together(model: nn.Module, comm: Ranks) -> None:
    """Make a gradient infinite on every rank if one of rows owned by a rank is not finite there. Collective."""
    shared = [p.grad for p in model.parameters() if p.grad is not None and not is_local(p)]
    local = [p.grad for p in model.parameters() if p.grad is not None and is_local(p)]
    lost = torch.tensor([not all(bool(grad.isfinite().all()) for grad in local)])
    if comm.all_reduce(lost, "max", "sync_gradients: finite").item():
        for grad in [grad for grad in (*shared, *local) if grad.numel()][:1]:
            grad.detach().view(-1)[0] = float("inf")


def clip_grad_norm(model: nn.Module, max_norm: float, comm: Ranks) -> Tensor:
    """The 2-norm of all gradients, 0-dim float64; gradients are then scaled to at most `max_norm`. Collective.

    Gradients of rows owned by ranks (`NodeEmbedding`) are those of all ranks, and every rank scales by the same factor,
    while `torch.nn.utils.clip_grad_norm_` would see each rank's own rows. Without such rows the two do the same.

    Args:
        model: the same architecture on every rank.
        max_norm: the largest norm that is left.
        comm: the ranks.
    """
    require_model(model, "clip_grad_norm(model, max_norm, comm)")
    shared, rows = squares = torch.zeros(2, dtype=torch.float64, device=comm.device)
    found = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    for parameter, gradient in found:
        square: Any = torch.linalg.vector_norm(gradient.detach().double()).square()
        square = square.full_tensor() if is_sharded(square) else square  # of what fully_shard has sharded
        squares[int(is_local(parameter))] += square.to(comm.device)
    norm = (shared + comm.all_reduce(rows, "sum", "clip_grad_norm")).sqrt()
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch does
    for _, gradient in found:
        gradient.detach().mul_(factor)
    return norm


def _state_of(parameter: Tensor, part: Tensor | None) -> int:
    if part is None:
        return _ABSENT
    if is_local(parameter):
        return _PRESENT if bool(part.isfinite().all()) else _INFINITE
    if getattr(part, _SUM, None) == torch_private.version_of(part):
        return _SUMMED
    return _PRESENT if part.layout == torch.strided else _SPARSE
