"""Sum, maximum, minimum and product over the node rows of all ranks, of which graph-level readouts are made.

The result is the same on every rank. The objective is the sum over ranks of what each rank calls backward on, so the
gradient of the result is the sum over ranks of the gradients that arrive at it, and every rank gets that of its own
rows. A loss that every rank computes from the result therefore goes through `replicated`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, begin_call, end_call, linear_call, refuse_double_backward, unfollowed
from shardpass.errors import RefusedError

Reduction = Literal["sum", "max", "min", "prod"]


@unfollowed(2)
def reduce_rows(rows: Tensor, op: Reduction, comm: Ranks, base: float | None = None) -> Tensor:
    """`rows` of all ranks reduced along dimension 0: ``[...]`` for ``[num_own, ...]``, the same bits on every rank.

    Collective, in backward too where `rows` requires grad on any rank. A rank without rows takes part. Partial results
    travel in float64 (integers are exact up to 2**53) and are merged in the order of the ranks.

    Args:
        rows: the trailing shape and dtype are the same on every rank; floating point; for ``sum`` also integers or
            complex.
        op: the reduction. ``max`` and ``min`` split the gradient evenly among the tied rows of all ranks, as in torch.
        base: for ``max`` and ``min``, the result without rows. torch's ``scatter_reduce_`` counts it as one more tie if
            the result equals it, also with ``include_self=False``, so it is counted here.

    Raises:
        RefusedError: an integer maximum, minimum or product; a backward with ``create_graph=True``.
        DivergenceError: ranks pass rows of different trailing shapes or dtypes.
    """
    if op == "sum" and rows.is_complex():
        return torch.view_as_complex(reduce_rows(torch.view_as_real(rows), op, comm))
    if op != "sum" and not rows.is_floating_point():
        kind = "complex numbers" if rows.is_complex() else "integers"
        raise RefusedError(f"the {op} of {kind} over all nodes is not supported on a sharded graph; convert to float")
    label = f"{op} of {str(rows.dtype).removeprefix('torch.')} rows of shape {list(rows.shape[1:])} over all nodes"
    number, token = begin_call(comm, label)
    label = f"{label} #{number}"
    operand = rows if op != "prod" else rows.prod(0)  # torch's own product has the gradient of zeros right
    partial = _partial(operand.detach(), op)
    wants = torch.is_grad_enabled() and rows.requires_grad
    parts, differentiable = _gathered(partial, wants, comm, label)
    value, factor = _merged(parts, op, comm.rank, base)
    out = value.to(rows.dtype)
    if not differentiable:
        return out
    tied = operand == out if op in ("max", "min") else None
    out, token = _Reduce.apply(token, operand, tied, factor, out, comm, label)
    end_call(comm, token)
    return out


def _partial(operand: Tensor, op: Reduction) -> Tensor:
    """What this rank contributes, float64: ``[1, ...]``, or ``[2, ...]`` (value, number of ties) for extrema."""
    if op == "prod":
        return operand.double()[None]
    if op == "sum":
        wide = operand.dtype if operand.dtype not in (torch.float16, torch.bfloat16) else torch.float32
        return operand.sum(0, dtype=wide if operand.is_floating_point() else torch.int64).double()[None]
    worst = torch.full((1, *operand.shape[1:]), float("-inf" if op == "max" else "inf"), device=operand.device)
    padded = torch.cat([worst.to(operand.dtype), operand])
    best = padded.amax(0) if op == "max" else padded.amin(0)
    return torch.stack([best.double(), (operand == best).sum(0).double()])


def _gathered(partial: Tensor, wants: bool, comm: Ranks, label: str) -> tuple[Tensor, bool]:
    """The contributions of all ranks, ``[ranks, parts, ...]``, and whether any of them wants gradients. Collective."""
    flag = torch.full((1,), float(wants), dtype=torch.float64, device=partial.device)
    rows = torch.cat(comm.all_gather(torch.cat([partial.flatten(), flag])[None], label))
    return rows[:, :-1].reshape(comm.size, *partial.shape), bool(rows[:, -1].any())


def _merged(parts: Tensor, op: Reduction, rank: int, base: float | None) -> tuple[Tensor, Tensor]:
    """The value over all ranks, and what the gradient of this rank's (tied) operand is multiplied by."""
    if op == "sum":
        return parts[:, 0].sum(0), torch.ones_like(parts[0, 0])
    if op == "prod":
        others = torch.cat([parts[:rank, 0], parts[rank + 1 :, 0]]).prod(0)
        return parts[:, 0].prod(0), others
    best, counts = parts[:, 0], parts[:, 1]
    value = best.amax(0) if op == "max" else best.amin(0)
    ties = torch.where(best == value, counts, 0).sum(0)
    if base is not None:
        ties = ties + (value == base)
    return value, ties.clamp(min=1).reciprocal()


class _Reduce(torch.autograd.Function):
    """Forward: the value given. Backward: the sum of its gradients over ranks, times `factor`, at the tied rows."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, operand: Tensor, tied: Tensor | None, factor: Tensor, value: Tensor,
        comm: Ranks, label: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(token, tied, factor)
        ctx.shape, ctx.comm, ctx.label = operand.shape, comm, label
        return value.clone(), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.label)
        token, tied, factor = ctx.saved_tensors  # before communicating, see core/ranks/autograd_order.py
        summed = ctx.comm.all_reduce(grads[0].contiguous(), "sum", f"{ctx.label} backward")
        grad = (summed * factor).to(summed.dtype).expand(ctx.shape)
        if tied is not None:
            grad = torch.where(tied, grad, torch.zeros_like(summed))
        return torch.zeros_like(token), grad, None, None, None, None, None


@unfollowed(1)
def all_rows(rows: Tensor, comm: Ranks) -> Tensor:
    """The rows of all ranks in the order of the ranks: ``[total, ...]`` for ``[num_own, ...]``, on every rank.

    Collective, in backward too: each rank gets the sum over ranks of the gradients of its rows. Every rank holds the
    rows of the whole graph, so these must fit its memory.

    Args:
        rows: floating point; trailing shape and dtype are the same on every rank.
        comm: the ranks.
    """
    label = f"all {str(rows.dtype).removeprefix('torch.')} rows of shape {list(rows.shape[1:])}"
    number, token = begin_call(comm, label)
    label = f"{label} #{number}"
    sizes: list[int] = []

    def gathered(rows: Tensor) -> Tensor:
        parts = comm.all_gather(rows.contiguous(), label)
        sizes.extend(part.size(0) for part in parts)
        return torch.cat(parts)

    def of_owners(grad: Tensor) -> Tensor:  # every rank sends each owner its rows of the gradient; the owner adds them
        parts = [part.contiguous() for part in grad.split(sizes)]
        return torch.stack(comm.all_to_all(parts, f"{label} backward")).sum(0)

    return linear_call(comm, token, label, rows, gathered, of_owners)
