"""Mean and variance of the node rows of all ranks, as differentiable functions. Norms over a graph use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, begin_call, dtype_name, end_call, refuse_double_backward, unfollowed
from shardpass.core.training.moments import Moments, global_moments
from shardpass.errors import RefusedError


@unfollowed(1)
def row_moments(rows: Tensor, comm: Ranks) -> tuple[Moments, Tensor, Tensor]:
    """The moments of the rows of all ranks; and mean and biased variance per channel, float64 ``[channels]`` each.

    Collective, in backward too; the same bits on every rank. It is differentiable: the gradients of mean and variance
    are summed over ranks, and each rank gets those of its rows. A rank without rows takes part. The moments of pieces
    are merged, not computed from sums of squares; see `global_moments`.

    Args:
        rows: ``[num_own, channels]``, floating point; channels and dtype the same on every rank.
        comm: the ranks.

    Raises:
        RefusedError: `rows` does not have two dimensions.
    """
    if rows.dim() != 2:
        raise RefusedError(f"norms over a sharded graph take [rows, channels], found {list(rows.shape)}: flatten first")
    label = f"moments of {rows.shape[1]} channels of {dtype_name(rows.dtype)}"
    number, token = begin_call(comm, label)
    label = f"{label} #{number}"
    with torch.no_grad():
        found = global_moments(rows.detach(), comm, label)
    mean, variance, token = _Moments.apply(token, rows, found.mean, found.variance, found.count, comm, label)
    end_call(comm, token)
    return found, mean, variance


class _Moments(torch.autograd.Function):
    """Forward: the moments given. Backward: ``(g_mean + 2 g_var (x - mean)) / count``, with g summed over ranks."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, rows: Tensor, mean: Tensor, variance: Tensor, count: int, comm: Ranks,
        label: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(token, rows, mean)
        ctx.count, ctx.comm, ctx.label = count, comm, label
        return mean.clone(), variance.clone(), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.label)
        token, rows, mean = ctx.saved_tensors  # before communicating, see core/ranks/autograd_order.py
        summed = ctx.comm.all_reduce(torch.stack(grads[:2]), "sum", f"{ctx.label} backward") / max(ctx.count, 1)
        grad = shifted(rows, mean, 2 * summed[1], summed[0]) if ctx.needs_input_grad[1] else None
        return torch.zeros_like(token), grad, None, None, None, None, None


def shifted(rows: Tensor, mean: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``(rows - mean) * scale + bias`` per channel, in the dtype of `rows`, differentiable in all. Not collective.

    No accuracy is lost if the mean is much larger than the deviation: the constant term makes good for the rounding of
    `mean` to the dtype of the rows.

    Args:
        rows: ``[num_own, channels]``.
        mean, scale, bias: float64, ``[channels]`` or 0-dim.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    near = mean.detach().to(dtype)
    constant = (near.double() - mean) * scale
    constant = constant if bias is None else constant + bias
    return torch.addcmul(constant.to(dtype), rows.to(dtype) - near, scale.to(dtype)).to(rows.dtype)


@unfollowed(1)
def total_rows(rows: Tensor, comm: Ranks) -> list[int]:
    """How many rows each rank holds. Collective."""
    number, _ = begin_call(comm, "number of rows")
    counts = comm.all_gather(torch.tensor([rows.size(0)], device=comm.device), f"number of rows #{number}")
    return [int(count) for count in counts]
