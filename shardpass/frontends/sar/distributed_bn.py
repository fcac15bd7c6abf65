"""Batch normalisation over the nodes of all ranks, and the statistics that it needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardpass.core.training import DistributedBatchNorm, row_moments
from shardpass.frontends.sar._state import STATE, communicator


class DistributedBN1D(DistributedBatchNorm):
    """`torch.nn.BatchNorm1d` over the nodes of all ranks; see `DistributedBatchNorm`.

    Parameters, buffers and ``state_dict`` keys are BatchNorm1d's: in evaluation it uses running statistics, and does
    not communicate. It may be made before `initialize_comms`.

    Args:
        n_feats: channels.
        eps: added to the variance.
        affine: with `weight` and `bias`.
        distributed: whether statistics are over the nodes of all ranks, rather than this rank's. `None` means: if
            `initialize_comms` was called by the time of a forward.
        options: momentum, track_running_stats, dtype and device, as in BatchNorm1d. Without running statistics,
            evaluation uses those of the batch and is collective.
    """

    def __init__(
        self, n_feats: int, eps: float = 1e-5, affine: bool = True, distributed: bool | None = None, **options: Any
    ) -> None:
        super().__init__(n_feats, None, eps=eps, affine=affine, **options)  # type: ignore[arg-type]
        self.distributed = distributed

    def forward(self, inp: Tensor) -> Tensor:
        """The normalised rows, [num_own, channels]. Collective in training."""
        if self.distributed is False or (self.distributed is None and STATE.comm is None):
            return nn.BatchNorm1d.forward(self, inp)
        if self.comm is None:
            self.comm = communicator()
        return super().forward(inp)


class MeanOp:
    """``MeanOp.apply(x)`` is the mean over the rows of all ranks, ``[channels]``. Collective, in backward too."""

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        """The mean of `x`, ``[num_own, channels]``, in its dtype."""
        return row_moments(x, communicator())[1].to(x.dtype)


class VarOp:
    """``VarOp.apply(features)`` is the biased variance over the rows of all ranks, ``[channels]``. Collective too."""

    @staticmethod
    def apply(features: Tensor) -> Tensor:
        """The variance of `features`, ``[num_own, channels]``, in their dtype."""
        return row_moments(features, communicator())[2].to(features.dtype)
