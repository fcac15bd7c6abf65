"""Sum, maximum, minimum and product over the node rows of all ranks, of which graph-level readouts are made.

The result is the same on every rank. The objective is the sum over ranks of what each rank calls backward on, so the
gradient of the result is the sum over ranks of the gradients that arrive at it, and every rank gets that of its own
rows. A loss that every rank computes from the result therefore goes through `replicated`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, begin_call, derived, end_call, linear_call, summed, unfollowed
from shardpass.errors import RefusedError

Reduction = Literal["sum", "max", "min", "prod"]


class Groups(NamedTuple):
    """The group of each own row, ``[num_own]`` int64, and how many groups all ranks have."""

    ids: Tensor
    size: int


@unfollowed(2, gives="alike")
def reduce_rows(
    rows: Tensor, op: Reduction, comm: Ranks, base: float | None = None, groups: Groups | None = None
) -> Tensor:
    """`rows` of all ranks reduced along dimension 0: ``[...]`` for ``[num_own, ...]``, the same bits on every rank.

    Collective, in backward too where `rows` requires grad on any rank. A rank without rows takes part. Partial results
    travel in float64 (integers are exact up to 2**53) and are merged in the order of the ranks.

    Args:
        rows: the trailing shape and dtype are the same on every rank; floating point; for ``sum`` also integers or
            complex.
        op: the reduction. ``max`` and ``min`` split the gradient evenly among the tied rows of all ranks, as in torch.
        base: for ``max`` and ``min``, the result without rows. torch's ``scatter_reduce_`` counts it as one more tie if
            the result equals it, also with ``include_self=False``, so it is counted here.
        groups: reduce the rows of each group by themselves, ``[groups.size, ...]``; the count is the same on every
            rank.

    Raises:
        RefusedError: an integer maximum, minimum or product; a backward of a product with ``create_graph=True``.
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
    operand = rows
    if op == "prod":  # torch's own product has the gradient of zeros right
        operand = rows.prod(0) if groups is None else _scattered(rows, groups, "prod", 1.0)
    partial = _partial(operand.detach(), op) if groups is None else _partial_of_groups(operand.detach(), op, groups)
    wants = torch.is_grad_enabled() and rows.requires_grad
    parts, differentiable = _gathered(partial, wants, comm, label)
    value, factor = _merged(parts, op, comm.rank, base)
    out = value.to(rows.dtype)
    if not differentiable:
        return out
    ids = None if groups is None or op == "prod" else groups.ids
    tied = operand == (out if ids is None else out[ids]) if op in ("max", "min") else None
    out, token = _Reduce.apply(token, operand, tied, factor, ids, out, comm, label, op == "prod")
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


def _partial_of_groups(operand: Tensor, op: Reduction, groups: Groups) -> Tensor:
    """As `_partial`, for each group: ``[1, groups, ...]`` or ``[2, groups, ...]``."""
    if op == "prod":
        return operand.double()[None]
    if op == "sum":
        wide = operand.double()
        return wide.new_zeros(groups.size, *operand.shape[1:]).index_add(0, groups.ids, wide)[None]
    best = _scattered(operand, groups, "amax" if op == "max" else "amin", float("-inf" if op == "max" else "inf"))
    ties = (operand == best[groups.ids]).double()
    return torch.stack([best.double(), torch.zeros_like(best.double()).index_add(0, groups.ids, ties)])


def _scattered(rows: Tensor, groups: Groups, op: str, base: float) -> Tensor:
    ids = groups.ids.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
    return rows.new_full((groups.size, *rows.shape[1:]), base).scatter_reduce(0, ids, rows, op)


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
        value = torch.where(ties == 0, base, value)  # a group without rows
        ties = ties + (value == base)
    return value, ties.clamp(min=1).reciprocal()


class _Reduce(torch.autograd.Function):
    """Forward: the value given. Backward: the sum of its gradients over ranks, times `factor`, at the tied rows."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, operand: Tensor, tied: Tensor | None, factor: Tensor, ids: Tensor | None,
        value: Tensor, comm: Ranks, label: str, is_product: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(token, tied, factor, ids)
        ctx.shape, ctx.comm, ctx.label, ctx.is_product = operand.shape, comm, label, is_product
        return value.clone(), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        token, tied, factor, ids = ctx.saved_tensors  # before communicating, see core/ranks/autograd_order.py

        def of_rows(total: Tensor) -> Tensor:
            grad = (total * factor).to(total.dtype)
            grad = grad.expand(ctx.shape) if ids is None else grad[ids]
            return grad if tied is None else torch.where(tied, grad, torch.zeros_like(grad))

        if torch.is_grad_enabled():
            if ctx.is_product:  # `factor` has a gradient of its own
                raise RefusedError(
                    f"double backward through a product over ranks is not supported: the backward of {ctx.label!r} was "
                    f"run with create_graph=True. Take the exponential of a sum of logarithms in its place"
                )
            found = derived(ctx.comm, grads[1], lambda: [of_rows(summed(grads[0], ctx.comm, ctx.label))])
            return *found, *[None] * 7
        label = f"{ctx.label} backward"
        return torch.zeros_like(token), of_rows(ctx.comm.all_reduce(grads[0].contiguous(), "sum", label)), *[None] * 7


@unfollowed(1, gives="alike")
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
