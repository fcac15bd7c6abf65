"""Rows that travel between ranks in differentiable calls. Fetching halo rows and scattering them are adjoint."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, pairwise

import torch
from torch import Tensor

from shardpass.core.exchange.halo import HaloPlan
from shardpass.core.exchange.tokens import WalkId
from shardpass.core.exchange.walk import GradientReturn, fetch_blocks
from shardpass.core.ranks import Ranks, agree, begin_call, digest, diverged, linear_call

Carrier = Callable[[Tensor, WalkId], Tensor]


def halo_fetch(own: Tensor, plan: HaloPlan, label: str) -> Tensor:
    """Own rows ``[num_own_src, ...]`` followed by the halo rows: ``[num_src, ...]``. Collective, differentiable."""
    if not plan.schedule.rounds:
        return own
    if own.device != plan.comm.device:  # computed from edges in CPU memory
        return halo_fetch(own.to(plan.comm.device), plan, label).to(own.device)
    return carry(plan.comm, own, label, lambda t, s: gather_halo(t, plan, s), lambda t, s: sum_to_owners(t, plan, s))


def scatter_to_owners(rows: Tensor, plan: HaloPlan, label: str) -> Tensor:
    """Rows ``[num_src, ...]`` summed into their owners: ``[num_own_src, ...]``. Collective, differentiable."""
    if not plan.schedule.rounds:
        return rows
    if rows.device != plan.comm.device:
        return scatter_to_owners(rows.to(plan.comm.device), plan, label).to(rows.device)
    return carry(plan.comm, rows, label, lambda t, s: sum_to_owners(t, plan, s), lambda t, s: gather_halo(t, plan, s))


def extremum_at_owners(rows: Tensor, plan: HaloPlan, op: str, label: str) -> Tensor:
    """Rows ``[num_src, ...]`` of which owners take the extrema: ``[num_own_src, ...]``. Collective, no gradient."""
    begin_call(plan.comm, label)
    rows, bounds = rows.detach(), plan.halo_start
    own = rows[: plan.num_own_src].clone()
    leaving = [rows[start:stop].contiguous() for start, stop in pairwise(bounds)]
    for theirs, part in zip(plan.send_rows, plan.comm.all_to_all(leaving, label=label)):
        numbers = theirs.to(own.device).view(-1, *[1] * (own.dim() - 1)).expand_as(part)
        own.scatter_reduce_(0, numbers, part, op)
    return own


def carry(comm: Ranks, rows: Tensor, label: str, there: Carrier, back: Carrier) -> Tensor:
    """``there(rows)``, as one differentiable call whose adjoint is `back`. Collective, in backward too.

    Every rank must pass rows of the same dtype and trailing shape.
    """
    number, token = begin_call(comm, label)
    label = f"call {number} {label}"
    grad = torch.is_grad_enabled() and rows.requires_grad
    enabled = "enabled" if torch.is_grad_enabled() else "disabled"
    text = f"{str(rows.dtype).removeprefix('torch.')} rows of shape {list(rows.shape[1:])}, gradients {enabled}"
    answers = agree(comm, label, [digest(text), int(grad)])
    if any(answer[0] != answers[0][0] for answer in answers):
        raise diverged(comm, label, text)
    walks = count(1)
    if not any(answer[1] for answer in answers):
        with torch.no_grad():
            return there(rows, WalkId(number, 0, label))
    return linear_call(
        comm,
        token,
        label,
        rows,
        lambda t: there(t, WalkId(number, next(walks), label)),
        lambda t: back(t, WalkId(number, next(walks), f"{label} backward")),
    )


def gather_halo(own: Tensor, plan: HaloPlan, walk: WalkId) -> Tensor:
    """What `halo_fetch` gives, without gradients."""
    out = own.new_empty((plan.num_src, *own.shape[1:]))
    for _, block, (rows,) in fetch_blocks(plan, [own.detach().contiguous()], walk):
        out[block.start : block.stop] = rows
    return out


def sum_to_owners(rows: Tensor, plan: HaloPlan, walk: WalkId) -> Tensor:
    """What `scatter_to_owners` gives, without gradients."""
    own = rows.detach()[: plan.num_own_src].clone(memory_format=torch.contiguous_format)
    back = GradientReturn(plan, [own], walk)
    for position, block in enumerate(plan.blocks[1:], start=1):
        back.buffers(position)[0].copy_(rows[block.start : block.stop])
        back.send(position)
    back.finish()
    return own
