"""The order of differentiable collective calls, which is the same in backward on every rank.

[Note: every rank takes part in backward]
Backward must visit a collective call whose backward communicates on every rank, in one order, or ranks wait for each
other for ever. But autograd visits only what the local loss reaches. So each such call takes the 0-dim *token* of the
previous call as one more autograd input, and returns a new token as one more output. The outputs of the outermost
wrapped forward are tied to the last token. Whatever part of these outputs the loss of a rank uses, its backward walks
the chain of tokens and visits all calls, the latest first. A call that the loss does not reach communicates zeros.

You write such a call like this (`linear_call` is the smallest one)::

    number, token = begin_call(comm, label)
    output, token = SomeFunction.apply(token, tensor, comm, f"{label} #{number}")
    end_call(comm, token)

Its Function does three things. (1) It saves the token, and backward unpacks ``ctx.saved_tensors`` before it
communicates: a recomputation by `torch.utils.checkpoint`, which communicates itself, is then over on every rank. (2) It
leaves gradient materialization on, and returns a zero gradient for the token. (3) Where gradients are enabled in
backward (``create_graph=True``), it returns what `derived` gives instead: a token, and gradients that calls have
computed which can be differentiated in their turn.

The chain ties the calls of one outermost forward. A loss built from several forwards must reach each of them on every
rank, in the same order.

[Note: derivatives of derivatives]
Calls that backward makes with ``create_graph=True`` are a chain of their own, the latest call of forward first: the
gradient of a token *is* the latest token of that chain. Its first token is made of the last one of forward, so backward
through both visits all calls of derivatives before those of forward. Within a model, whose chain goes on, they take
part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import torch_private
from shardpass.core.ranks.arguments import require_tensor
from shardpass.core.ranks.own_model import is_made_of_parameters
from shardpass.core.ranks.random import refuse_checkpointed_draws
from shardpass.core.ranks.ranks import ForwardPass, Ranks, takes_followed
from shardpass.errors import NeedsHaloError, RefusedError

Linear = Callable[[Tensor], Tensor]
Found = list[Tensor | None]


def check_backward(comm: Ranks, grads: Sequence[Tensor | None]) -> None:
    """Refuse a backward through a sharded call that cannot be exact.

    Args:
        grads: what has arrived at the call.
    """
    if any(grad is not None and torch_private.is_batched(grad) for grad in grads):
        raise RefusedError(
            "torch.autograd.grad(..., is_grads_batched=True), as of torch.autograd.functional.jacobian(vectorize=True),"
            " comes to a layer on a sharded graph, whose rows travel one gradient at a time. Call torch.autograd.grad "
            "for one gradient after the other"
        )
    forward = comm.forward
    if comm.size > 1 and forward is not None and forward.rows is None and not forward.is_derivative:
        if forward.is_left_out is not None:
            forward.is_left_out()
        raise RefusedError(
            "forward takes gradients in a call of the model whose rows are not followed, so it is not known which of "
            "them have rows and which are sums over ranks. Wrap the model without check=False, and let its first call "
            "take gradients too; every call is followed then"
        )


def begin_call(comm: Ranks, label: str) -> tuple[int, Tensor]:
    """The number of this collective call, and the 0-dim token that it must take as an autograd input.

    The token is the latest one of the chain. It is a fresh leaf outside a chain, and a constant when gradients are
    disabled. Not collective itself, but every rank begins the same calls in the same order.

    Args:
        comm: the ranks that will communicate.
        label: names the call in error messages.
    """
    refuse_inside_message(comm, label)
    comm.calls += 1
    if not torch.is_grad_enabled():
        return comm.calls, torch.zeros((), device=comm.device)
    if comm.forward is None:
        return comm.calls, _new_token(comm)
    if comm.forward.token is None:  # gradients are enabled within a model that was called without
        comm.forward.token = _new_token(comm)
    return comm.calls, comm.forward.token


def refuse_inside_message(comm: Ranks, label: str) -> None:
    """Raise if a message function is running. It runs in pieces, so it cannot hold a collective call.

    Raises:
        NeedsHaloError: in the mode ``halo`` a message function runs once, on all edges of the rank, and may hold one.
    """
    if comm.watch is not None:
        raise NeedsHaloError(
            f"{comm.watch.name}: {label} inside message() needs all edges of the graph at once, so it cannot be "
            f"computed one shard at a time. Use Options(mode='halo') for this model, or move it out of message()"
        )


def end_call(comm: Ranks, token: Tensor) -> None:
    """Make `token`, which the call returned, the latest of the chain. Nothing happens outside a chain."""
    if comm.forward is not None and token.requires_grad:
        comm.forward.token = token


def start_chain(comm: Ranks) -> bool:
    """Whether this is an outermost forward, whose chain starts here.

    Whoever gets `True` ends the chain, with `end_chain` on success and `drop_chain` on an exception. `chained` does
    both.
    """
    if comm.forward is not None:
        return False
    comm.forwards += 1
    comm.derivative = None
    comm.forward = ForwardPass(_new_token(comm) if torch.is_grad_enabled() else None)
    return True


def end_chain(comm: Ranks, outputs: Any) -> Any:
    """`outputs`, tied to the last token. Ends the chain.

    This ties the floating point tensors that require grad, inside tuples, lists, dicts and whatever else is registered
    with torch's pytree. If none requires grad, because a branch on this rank returned constants, it ties all floating
    point tensors, so that this rank can still call backward and answer the others. Tensors are aliased, not copied.
    """
    token = None if comm.forward is None else comm.forward.token
    drop_chain(comm)
    if token is None or token.grad_fn is None or not torch.is_grad_enabled():
        return outputs  # no differentiable call was made
    leaves, structure = torch_private.tree_flatten(outputs)
    floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_differentiable(leaf)]
    tied = [i for i in floating if leaves[i].requires_grad] or floating
    if tied:
        for i, tensor in zip(tied, _Tie.apply(token, *(leaves[i] for i in tied))):
            leaves[i] = tensor
    return torch_private.tree_unflatten(leaves, structure)


def derived(comm: Ranks, arrived: Tensor | None, compute: Callable[[], Sequence[Tensor | None]]) -> Found:
    """What a Function's backward returns with ``create_graph=True``: a token, and the gradients of `compute`.

    Collective calls that `compute` makes are one chain: of the model, where its forward runs, and else that of all
    derivatives of one backward. Every gradient is tied to the last of them, so a backward through any of them visits
    all of them, on every rank.

    Args:
        arrived: the gradient that arrived for the token that the Function returned: the latest token of that chain.
    """
    outer = comm.forward
    if outer is None:
        follows = arrived is not None and arrived.requires_grad
        comm.forward = ForwardPass(arrived if follows else _new_token(comm), is_derivative=True)
    try:
        found = compute()
        assert comm.forward is not None
        token = comm.forward.token
    finally:
        comm.forward = outer
    assert token is not None
    if outer is None and comm.size > 1:  # one rank has rows of all kinds
        comm.derivative = token
    return [token, *_tied(token, found)]


def end_derivatives(comm: Ranks, found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What ``torch.autograd.grad`` has found, tied to the last call of its derivatives.

    They are tied already, but torch lets go of ties where a rank has no rows: in backward of ``torch.cat``.
    """
    token, comm.derivative = comm.derivative, None
    return [*found] if token is None or not found else _tied(token, found)


def _tied(token: Tensor, found: Sequence[Tensor | None]) -> list[Tensor | None]:
    tied = iter(_TieOfGradients.apply(token, *(one for one in found if one is not None)))
    return [None if one is None else next(tied) for one in found]


def computed_again(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The gradients of `inputs`, given those of ``function(*inputs)``, which consists of functions of torch and calls.

    For the backward of a Function that has a closed form of first order alone.
    """
    given = [one if one is None or not one.requires_grad else one.view_as(one) for one in inputs]  # each one its own
    pairs = [(out, grad) for out, grad in zip(function(*given), grads) if grad is not None and out.requires_grad]
    wanted = [one for one in given if one is not None and one.requires_grad]
    if not pairs or not wanted:
        return [None] * len(given)
    outputs, cotangents = zip(*pairs)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=True, allow_unused=True))
    return [next(found) if one is not None and one.requires_grad else None for one in given]


def drop_chain(comm: Ranks) -> None:
    """End the chain without outputs, as after an exception, and release the graph behind the last token."""
    comm.forward = None


def chained(comm: Ranks, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``function(*args, **kwargs)`` returns, run as one chain. Nested uses take part in the outermost chain."""
    if not start_chain(comm):
        return function(*args, **kwargs)
    try:
        with refuse_checkpointed_draws(comm):
            outputs = function(*args, **kwargs)
        return end_chain(comm, outputs)
    finally:
        drop_chain(comm)


@takes_followed("sum")
def all_reduce_sum(tensor: Tensor, comm: Ranks, label: str = "all_reduce_sum") -> Tensor:
    """The sum of `tensor` over ranks, differentiable; the same bits on every rank.

    Where gradients are enabled it requires one, since the tensor of another rank may: take ``.detach()`` of a mere
    number. Collective, in backward too. The gradient of `tensor` is the sum over ranks of the gradients that arrive
    here, since the objective is the sum over ranks of what each of them calls backward on.

    Args:
        tensor: floating point, with the same shape and dtype on every rank.
        comm: the ranks.
        label: what is summed, the same on every rank; it appears in error messages.

    Raises:
        RefusedError: a wrapped model is running, and `tensor` is no sum over own rows: a mean or a maximum of them,
            the rows themselves, or what every rank has alike.
    """
    require_tensor(tensor, "tensor", "all_reduce_sum(tensor, comm)")
    if comm.runs_user_code:
        _check_sum(tensor, comm, label)
    elif comm.size > 1 and comm.forward is None and is_made_of_parameters(tensor):
        raise RefusedError(
            f"all_reduce_sum: this tensor of shape {[*tensor.shape]} is made of parameters, which every rank has "
            f"alike, so its sum over ranks is {comm.size} times as large. Leave all_reduce_sum out; rows that meet "
            f"parameters belong in a method of the wrapped model"
        )
    with comm.unfollowed():
        out = summed(tensor, comm, label)
    comm.mark_plain(out)
    return out


def _check_sum(tensor: Tensor, comm: Ranks, label: str) -> None:
    """Refuse what is no sum over own rows, where rows are followed. Collective."""
    assert comm.forward is not None and comm.forward.rows is not None
    is_sum = comm.forward.rows.is_sum(tensor)
    number, _ = begin_call(comm, f"check of {label}")
    with comm.unfollowed():
        values = tensor.detach().double()
        own = torch.stack([values.new_tensor(float(is_sum)), values.sum(), values.square().sum()])
        every = torch.stack(comm.all_gather(own[None], f"check of {label} #{number}")).squeeze(1)
        alike = torch.allclose(every, every[:1].expand_as(every), rtol=1e-9, atol=0, equal_nan=True)
        if comm.size > 1 and alike and not every[:, 0].any():
            comm.forward.rows.refuse_alike(tensor)


def summed(tensor: Tensor, comm: Ranks, label: str) -> Tensor:
    """What `all_reduce_sum` returns, of a tensor that is known to be summed over ranks."""
    number, token = begin_call(comm, label)
    label = f"{label} #{number}"

    def over_ranks(rows: Tensor, name: str = label) -> Tensor:
        return comm.all_reduce(rows.contiguous(), "sum", name)

    return linear_call(comm, token, label, tensor, over_ranks, lambda grad: over_ranks(grad, f"{label} backward"))


def linear_call(comm: Ranks, token: Tensor, label: str, rows: Tensor, forward: Linear, adjoint: Linear) -> Tensor:
    """``forward(rows)``, whose gradient in backward is ``adjoint(gradient)``. Both may communicate. Ends the call.

    Args:
        token: that `begin_call` gave.
        label: of the call, for error messages.
        rows: floating point.
    """
    out, token = _LinearCall.apply(token, rows, forward, adjoint, label, comm)
    end_call(comm, token)
    return out


class _LinearCall(torch.autograd.Function):
    """Inputs: token, rows, the function, its adjoint, a label. Outputs: what the function returns, a token."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, rows: Tensor, forward: Linear, adjoint: Linear, label: str, comm: Ranks
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(token)
        ctx.call = forward, adjoint, label, comm
        return forward(rows.detach()), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors  # before communicating, see the note above
        forward, adjoint, label, comm = ctx.call
        check_backward(comm, grads)
        if not torch.is_grad_enabled():
            return torch.zeros_like(token), adjoint(grads[0]), None, None, None, None
        call = partial(linear_call, comm, label=label, rows=grads[0], forward=adjoint, adjoint=forward)
        found = derived(comm, grads[1], lambda: [call(token=begin_call(comm, label)[1])])
        return *found, None, None, None, None


class _Tie(torch.autograd.Function):
    """The identity on tensors, with the token as one more input: backward from a tensor reaches the token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        # detach and not view_as, so that the user may still change the alias in place
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return token * 0, *grads  # derivatives begin with a token that follows the last one of forward


class _TieOfGradients(_Tie):
    """As `_Tie`, of what backward has found."""

    ties_gradients = True


def _new_token(comm: Ranks) -> Tensor:
    return torch.zeros((), device=comm.device, requires_grad=True)


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor of this dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()
