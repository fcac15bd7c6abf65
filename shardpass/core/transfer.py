"""Halo fetch and push as differentiable calls: each is the other's adjoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.agreement import agree, digest, diverged
from shardpass.core.calls import begin_call, end_call, refuse_double_backward
from shardpass.core.exchange import GradientReturn, Stream, fetch_blocks
from shardpass.core.halo import HaloPlan


def halo_fetch(own: Tensor, plan: HaloPlan, label: str) -> Tensor:
    """Own rows ``[num_own_src, ...]`` followed by the halo rows: ``[num_src, ...]``. Collective, differentiable."""
    return own if not plan.schedule.rounds else _call(_Fetch, own, plan, label)


def halo_push(rows: Tensor, plan: HaloPlan, label: str) -> Tensor:
    """Rows ``[num_src, ...]`` summed into their owners: ``[num_own_src, ...]``. Collective, differentiable."""
    return rows if not plan.schedule.rounds else _call(_Push, rows, plan, label)


def _call(function: Any, rows: Tensor, plan: HaloPlan, label: str) -> Tensor:
    comm = plan.comm
    number, token = begin_call(comm, label)
    label = f"call {number} {label}"
    grad = torch.is_grad_enabled() and rows.requires_grad
    enabled = "enabled" if torch.is_grad_enabled() else "disabled"
    text = f"{str(rows.dtype).removeprefix('torch.')} rows of shape {list(rows.shape[1:])}, gradients {enabled}"
    answers = agree(comm, label, [digest(text), int(grad)])
    if any(answer[0] != answers[0][0] for answer in answers):
        raise diverged(comm, label, text)
    if not any(answer[1] for answer in answers):
        with torch.no_grad():
            return function.run(rows, plan, Stream(number, 0, label))
    out, token = function.apply(token, rows, plan, number, label)
    end_call(comm, token)
    return out


def _gather(own: Tensor, plan: HaloPlan, stream: Stream) -> Tensor:
    out = own.new_empty((plan.num_src, *own.shape[1:]))
    for _, block, (rows,) in fetch_blocks(plan, [own.detach().contiguous()], stream):
        out[block.start : block.stop] = rows
    return out


def _sum_to_owners(rows: Tensor, plan: HaloPlan, stream: Stream) -> Tensor:
    own = rows.detach()[: plan.num_own_src].clone(memory_format=torch.contiguous_format)
    back = GradientReturn(plan, [own], stream)
    for position, block in enumerate(plan.blocks[1:], start=1):
        back.buffers(position)[0].copy_(rows[block.start : block.stop])
        back.send(position)
    back.finish()
    return own


class _Fetch(torch.autograd.Function):
    run = staticmethod(_gather)

    @staticmethod
    def forward(ctx: Any, token: Tensor, own: Tensor, plan: HaloPlan, number: int, label: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(token)
        ctx.plan, ctx.number, ctx.label = plan, number, label
        return _gather(own, plan, Stream(number, 0, label)), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.label)
        (token,) = ctx.saved_tensors
        summed = _sum_to_owners(grads[0], ctx.plan, Stream(ctx.number, 1, ctx.label + " backward"))
        return torch.zeros_like(token), summed, None, None, None


class _Push(torch.autograd.Function):
    run = staticmethod(_sum_to_owners)

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, rows: Tensor, plan: HaloPlan, number: int, label: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(token)
        ctx.plan, ctx.number, ctx.label = plan, number, label
        return _sum_to_owners(rows, plan, Stream(number, 0, label)), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.label)
        (token,) = ctx.saved_tensors
        rows = _gather(grads[0], ctx.plan, Stream(ctx.number, 1, ctx.label + " backward"))
        return torch.zeros_like(token), rows, None, None, None
