"""Dropout of attention weights: which edges keep theirs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import numba_loops_for
from shardpass.core.ranks import dropout_factors as factors_in_torch


def dropout_factors(seed: int, edges: slice | Tensor, heads: int, p: float, like: Tensor) -> Tensor:
    """What `shardpass.core.ranks.dropout_factors` returns for these edges, faster where numba is installed.

    Args:
        edges: their positions in the shard, ``[count]``, or a slice with a start and a stop.
        like: gives dtype and device.
    """
    if isinstance(edges, slice):
        edges = torch.arange(edges.start, edges.stop, device=like.device)
    if numba_loops_for(like) is None:
        return factors_in_torch(seed, edges, heads, p, like.dtype)
    from shardpass.core.kernels import numba_dropout

    out = like.new_empty((edges.numel(), heads))
    factor = out.numpy().dtype.type(1) / out.numpy().dtype.type(1 - p)
    numba_dropout.fill(out.numpy(), edges.numpy(), np.uint64(seed), np.uint64(int(p * (1 << 53))), factor)
    return out
