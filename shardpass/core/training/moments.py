"""Count, mean and variance of the rows of all ranks, merged over chunks and ranks without loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks

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
    counts: list[Tensor] = []
    means: list[Tensor] = []
    squares: list[Tensor] = []
    for part in row_chunks(rows):
        chunk = rows[part].to(accumulator_of(rows))
        shift = chunk[0] + (chunk - chunk[0]).mean(0)
        centred = chunk - shift
        first = centred.sum(0).double() / chunk.shape[0]  # what rounding left of the mean
        means.append(shift.double() + first)
        squares.append(centred.square_().sum(0).double() - chunk.shape[0] * first.square())
        counts.append(torch.full_like(means[-1], chunk.shape[0]))
    zero = torch.zeros(channels, dtype=torch.float64, device=rows.device)
    own = torch.stack(_merge(*(torch.stack([*values, zero]) for values in (counts, means, squares))))
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
