"""The order of differentiable collective calls: the same in backward on every rank.

[Note: every rank takes part in backward]
A collective call whose backward communicates must be visited by backward on every rank, in one order, or ranks wait
for each other for ever. Autograd visits only what the local loss reaches. So each such call takes the previous call's
0-dim *token* as one more autograd input and returns a new token as one more output, and the outputs of the outermost
wrapped forward are tied to the last token. Whatever part of the outputs a rank's loss uses, backward then walks the
chain of tokens, hence all calls, latest first; a call that the loss does not reach gets zeros and communicates them.

A call is written so (`AllReduceSum` is the smallest one)::

    number, token = begin_call(comm, label)
    output, token = SomeFunction.apply(token, tensor, comm, f"{label} #{number}")
    end_call(comm, token)

and its Function (1) saves the token, and in backward unpacks ``ctx.saved_tensors`` before it communicates, so that a
recomputation by `torch.utils.checkpoint` (which communicates itself) is over by then on every rank; (2) calls
`refuse_double_backward`; (3) leaves gradient materialisation on, and returns a zero gradient for the token.

The chain ties the calls of one outermost forward. Losses built from several forwards must reach each of them on every
rank, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardpass.core.ranks.random import refuse_checkpointed_draws
from shardpass.core.ranks.ranks import ForwardPass, Ranks
from shardpass.errors import NeedsHaloError, RefusedError


def begin_call(comm: Ranks, label: str) -> tuple[int, Tensor]:
    """The number of this collective call and the 0-dim token it must take as an autograd input.

    The token is the latest one of the chain, a fresh leaf where no chain is active or it has none yet, and a constant
    when gradients are disabled. Not collective itself; every rank begins the same calls in the same order.

    Args:
        comm: the communicator on which the call will communicate.
        label: what is called, for the messages of the caller.
    """
    refuse_inside_message(comm, label)
    comm.calls += 1
    if not torch.is_grad_enabled():
        return comm.calls, torch.zeros((), device=comm.device)
    if comm.forward is not None and comm.forward.token is not None:
        return comm.calls, comm.forward.token
    return comm.calls, _new_token(comm)


def refuse_inside_message(comm: Ranks, label: str) -> None:
    """Raise if a message function is running: it runs in pieces, so it cannot hold a collective call.

    Raises:
        NeedsHaloError: in ``halo`` mode the message function runs once, on all edges of the rank, and may.
    """
    if comm.watch is not None:
        raise NeedsHaloError(
            f"{comm.watch.name}: {label} inside message() needs all edges of the graph at once, so it cannot be "
            f"computed one shard at a time. Use Options(mode='halo') for this model, or move it out of message()"
        )


def end_call(comm: Ranks, token: Tensor) -> None:
    """Make `token`, returned by the call, the latest of the chain; does nothing outside one or without gradients."""
    if comm.forward is not None and token.requires_grad:
        comm.forward.token = token


def start_chain(comm: Ranks, graph_is_hidden: bool = False) -> bool:
    """Start the chain of an outermost wrapped forward; True if it was started here, False inside another one.

    Whoever gets True ends it, with `end_chain` on success and `drop_chain` on an exception; `chained` does both.
    """
    if comm.forward is not None:
        return False
    comm.forwards += 1
    comm.forward = ForwardPass(_new_token(comm) if torch.is_grad_enabled() else None, graph_is_hidden)
    return True


def end_chain(comm: Ranks, outputs: Any) -> Any:
    """`outputs` tied to the last token, structure kept; the chain is over afterwards.

    Tied are the floating point tensors that require grad, found in nested tuples, lists, dicts and whatever else is
    registered with torch's pytree. If none requires grad (a branch on this rank returned constants) all floating point
    tensors are tied, so that this rank can still call backward and answer the others. Tensors are aliased, not copied.
    """
    token = None if comm.forward is None else comm.forward.token
    drop_chain(comm)
    if token is None or token.grad_fn is None or not torch.is_grad_enabled():
        return outputs  # no differentiable call was made
    leaves, structure = tree_flatten(outputs)
    floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _differentiable(leaf)]
    tied = [i for i in floating if leaves[i].requires_grad] or floating
    if tied:
        for i, tensor in zip(tied, _Tie.apply(token, *(leaves[i] for i in tied))):
            leaves[i] = tensor
    return tree_unflatten(leaves, structure)


def drop_chain(comm: Ranks) -> None:
    """End the chain without outputs, as after an exception; the graph behind the last token is released."""
    comm.forward = None


def chained(comm: Ranks, function: Callable[..., Any], *args: Any, graph_is_hidden: bool = False, **kwargs: Any) -> Any:
    """What ``function(*args, **kwargs)`` returns, run as one chain; nested uses take part in the outermost chain."""
    if not start_chain(comm, graph_is_hidden):
        return function(*args, **kwargs)
    try:
        with refuse_checkpointed_draws(comm):
            outputs = function(*args, **kwargs)
        return end_chain(comm, outputs)
    finally:
        drop_chain(comm)


def refuse_double_backward(name: str) -> None:
    """Raise if the running backward was asked for its own graph. For the first line of a Function's backward.

    Raises:
        RefusedError: gradients are enabled inside backward, that is ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RefusedError(
            f"double backward through a sharded call is not supported: the backward of {name!r} was run with "
            f"create_graph=True. Use first-order gradients only, or compute this term in one process"
        )


def all_reduce_sum(tensor: Tensor, comm: Ranks, label: str = "all_reduce_sum") -> Tensor:
    """The sum of `tensor` over ranks, differentiable; the same bits on every rank.

    Collective, in backward too: the gradient of `tensor` is the sum over ranks of the gradients that arrive here, which
    is right under our convention that the objective is the sum over ranks of what each calls backward on.

    Args:
        tensor: floating point, with the same shape and dtype on every rank.
        comm: the ranks.
        label: what is summed, the same on every rank; it appears in error messages.
    """
    number, token = begin_call(comm, label)
    total, token = AllReduceSum.apply(token, tensor, comm, f"{label} #{number}")
    end_call(comm, token)
    return total


class AllReduceSum(torch.autograd.Function):
    """Forward: sum over ranks. Backward: sum of the gradients over ranks. See `all_reduce_sum`."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tensor: Tensor, comm: Ranks, label: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(token)
        ctx.comm, ctx.label = comm, label
        total = comm.all_reduce(tensor.detach().contiguous(), "sum", label)
        return total, torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.label)
        (token,) = ctx.saved_tensors  # before communicating, see the note above
        summed = ctx.comm.all_reduce(grads[0].contiguous(), "sum", f"{ctx.label} backward")
        return torch.zeros_like(token), summed, None, None


class _Tie(torch.autograd.Function):
    """Identity on the tensors, with the token as one more input: whoever reaches a tensor reaches the token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device = token.device
        # detach, not view_as: an alias on which the user may still work in place
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return torch.zeros((), device=ctx.device), *grads


def _new_token(comm: Ranks) -> Tensor:
    return torch.zeros((), device=comm.device, requires_grad=True)


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
