"""Count, mean and variance of the rows of all ranks, which every norm over a graph is made of.

They are merged over chunks and ranks without loss, and are differentiable in `row_moments`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following import user_line
from shardpass.core.ranks import (
    OnRanks,
    Ranks,
    begin_call,
    computed_again,
    derived,
    dtype_name,
    end_call,
    summed,
    unfollowed,
)
from shardpass.errors import RefusedError

CHUNK_BYTES = 1 << 20  # rows are processed in chunks whose temporaries stay in cache; larger ones on accelerators
ACCELERATOR_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class Moments:
    """Rows, mean and biased variance per channel, the last two float64 [channels].

    Attributes:
        copies: how many ranks have given the same rows as far as their moments tell, or 1.
    """

    count: int
    mean: Tensor
    variance: Tensor
    copies: int = 1


def global_moments(rows: Tensor, comm: Ranks, label: str) -> Moments:
    """The moments of the rows of all ranks, the same bits on every rank. Collective.

    Every chunk gives its count, its mean and the squares about its mean. They are exact to the accumulation dtype also
    if the mean is much larger than the deviation. They are merged over chunks, then over ranks, in float64. The mean of
    a channel with one value is that value to the last bit, so that a ReLU behind a norm sees exactly zero.

    Args:
        rows: [num_own, channels] of any floating dtype; accumulated in at least float32.
        comm: the ranks.
        label: names the call, the same on every rank.
    """
    channels = rows.shape[1]
    zero = torch.zeros(channels, dtype=torch.float64, device=rows.device)
    counts, means, squares = [zero], [zero], [zero]
    for part in row_chunks(rows):
        chunk = rows[part].to(accumulator_of(rows))
        shift = chunk[0] + (chunk - chunk[0]).mean(0)
        centred = chunk - shift
        first = centred.sum(0).double() / chunk.shape[0]  # what rounding left of the mean
        means.append(shift.double() + first)
        squares.append(centred.square_().sum(0).double() - chunk.shape[0] * first.square())
        counts.append(torch.full_like(means[-1], chunk.shape[0]))
    own = torch.stack(_merge(*(torch.stack(values) for values in (counts, means, squares))))
    every = torch.stack(comm.all_gather(own[None], label)).squeeze(1)  # [ranks, 3, channels]
    count, mean, square = _merge(every[:, 0], every[:, 1], every[:, 2])
    total = int(count[0]) if channels else 0
    alike = torch.allclose(every, every[:1].expand_as(every), rtol=1e-6, atol=1e-9, equal_nan=True)
    return Moments(total, mean, (square / max(total, 1)).clamp_(min=0), comm.size if alike else 1)


def _merge(counts: Tensor, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and squares about the mean of the union of disjoint sets, [sets, channels] each -> [channels].

    Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances (1979), eq. 1.5,
    for any number of sets at once. Sets without rows have no influence.
    """
    count = counts.sum(0)
    one = means.gather(0, (counts > 0).long().argmax(0, keepdim=True))  # of a set with rows
    mean = one.squeeze(0) + (counts * (means - one)).sum(0) / count.clamp(min=1)
    return count, mean, (squares + counts * (means - mean).square()).sum(0)


def accumulator_of(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def row_chunks(rows: Tensor) -> Iterator[slice]:
    """Slices of rows whose temporaries in the accumulation dtype fit the chunk size."""
    size = CHUNK_BYTES if rows.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    step = max(1, size // max(1, rows.shape[1] * accumulator_of(rows).itemsize))
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


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
        ctx: Any, token: Tensor, rows: Tensor, mean: Tensor, variance: Tensor, count: int, comm: Ranks, label: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(token, rows, mean)
        ctx.count, ctx.comm, ctx.label = count, comm, label
        return mean.clone(), variance.clone(), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        token, rows, mean = ctx.saved_tensors  # before communicating, see core/ranks/autograd_order.py
        if torch.is_grad_enabled():
            again = partial(moments_again, count=ctx.count, comm=ctx.comm, label=ctx.label)
            found = derived(ctx.comm, grads[2], lambda: computed_again(again, [rows], grads[:2]))
            return *found, *[None] * 5
        total = ctx.comm.all_reduce(torch.stack(grads[:2]), "sum", f"{ctx.label} backward") / max(ctx.count, 1)
        grad = shifted(rows, mean, 2 * total[1], total[0]) if ctx.needs_input_grad[1] else None
        return torch.zeros_like(token), grad, None, None, None, None, None


def moments_again(rows: Tensor, count: int, comm: Ranks, label: str) -> tuple[Tensor, Tensor]:
    """Mean and variance of the rows of all ranks, which can be differentiated any number of times. Collective."""
    rows, count = rows.double(), max(count, 1)
    mean = summed(rows.sum(0), comm, f"{label} mean") / count
    return mean, summed((rows - mean).square().sum(0), comm, f"{label} variance") / count


def shifted(rows: Tensor, mean: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``(rows - mean) * scale + bias`` per channel, in the dtype of `rows`, differentiable in all. Not collective.

    Args:
        rows: ``[num_own, channels]``.
        mean, scale, bias: float64, ``[channels]`` or 0-dim.
    """
    near, scale, constant = shift_of(mean, scale, bias, accumulator_of(rows))
    return torch.addcmul(constant, rows.to(near.dtype) - near, scale).to(rows.dtype)


def shift_of(mean: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Such `near`, `scale` and `constant` in `dtype` that `shifted` is ``(rows - near) * scale + constant``.

    No accuracy is lost if the mean is much larger than the deviation: the constant term makes good for the rounding of
    `mean` to `dtype`.
    """
    near = mean.detach().to(dtype)
    constant = (near.double() - mean) * scale
    return near, scale.to(dtype), (constant if bias is None else constant + bias).to(dtype)


@unfollowed(1)
def total_rows(rows: Tensor, comm: Ranks) -> list[int]:
    """How many rows each rank holds. Collective."""
    number, _ = begin_call(comm, "number of rows")
    counts = comm.all_gather(torch.tensor([rows.size(0)], device=comm.device), f"number of rows #{number}")
    return [int(count) for count in counts]


class RowNorm(OnRanks):
    """A norm over the own rows of all ranks, or over rows that every rank has, as those of a readout or a parameter.

    Mean and variance are the same if every rank gives the same rows, but the number of rows is not. Equal moments on
    all ranks say that they are the same, unless the model was followed and the norm took own rows only.
    """

    _took: frozenset[bool] = frozenset()

    def look_at(self, rows: Tensor) -> None:
        """Note whether `rows` are own rows, where the model is followed.

        Raises:
            RefusedError: some of them are, and others are on every rank, so that they would be counted several times.
        """
        if self.comm is None or not self.comm.is_followed:
            return
        copies = self.comm.copies_in(rows)
        if copies:
            raise RefusedError(
                f"{user_line()}: {type(self).__bases__[-1].__name__} over own rows joined with {copies} rows that "
                f"every rank has: they would be counted once for each rank. Join them after the norm, or normalise "
                f"them with a norm of their own"
            )
        self._took |= {self.comm.row_dim(rows) is not None}

    def count(self, moments: Moments) -> int:
        """How many rows have these moments, each of them counted once."""
        return moments.count if self._took == {True} else moments.count // moments.copies
