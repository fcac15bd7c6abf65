"""Sorting keys of edges. numpy sorts integers five times as fast as torch finds a stable order of them on a host."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_order(keys: Tensor, bound: int) -> Tensor:
    """The positions of `keys` in ascending order, equal ones as they stand, ``[n]`` int64: ``argsort(stable=True)``.

    Args:
        keys: ``[n]`` integers in ``[0, bound)``.
        bound: no larger than it must be. On a host, where it allows, a key and its position share one number.
    """
    bits = max(1, (keys.numel() - 1).bit_length())
    if keys.device.type != "cpu" or bound << bits >= 1 << 63:
        return torch.argsort(keys, stable=True)
    joined = (keys.long() << bits).add_(torch.arange(keys.numel()))
    joined.numpy().sort()
    return joined & ((1 << bits) - 1)  # memory that numpy has not seen; see `torch_private.is_foreign`
