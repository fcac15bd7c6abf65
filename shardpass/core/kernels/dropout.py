"""Dropout of rows of edges: which entries keep their values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import numba_loops_for
from shardpass.core.ranks import dropout_factors as factors_in_torch


def dropout_factors(seed: int, edges: slice | Tensor, rows: Tensor, p: float) -> Tensor:
    """What `shardpass.core.ranks.dropout_factors` returns for these edges, faster where numba is installed.

    Args:
        edges: their places in the edge list of the rank, ``[count]``, or a slice with a start and a stop.
        rows: the rows that some are dropped of, ``[count, ...]``. They give width, dtype and device.
    """
    width = rows.shape[1:].numel()
    if isinstance(edges, slice):
        edges = torch.arange(edges.start, edges.stop, device=rows.device)
    if numba_loops_for(rows) is None:
        return factors_in_torch(seed, edges.to(rows.device), width, p, rows.dtype)
    from shardpass.core.kernels import numba_dropout

    out = rows.new_empty((edges.numel(), width))
    number = out.numpy().dtype.type
    factor = number(1) / number(1 - p) if p < 1 else number(0)
    numba_dropout.fill(out.numpy(), edges.numpy(), np.uint64(seed), np.uint64(int(p * (1 << 53))), factor)
    return out
