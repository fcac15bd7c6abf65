"""Structure that stays in CPU memory: `to_device` and `to_host` are the only ways between the two places.

They copy even if the device is the CPU, so that tests without a GPU take the same path.
"""

from __future__ import annotations

import torch
from torch import Tensor

HOST = torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of an edge tensor, or of structure, on the device where the rows of nodes are."""
    return tensor.to(device, non_blocking=True, copy=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor in CPU memory, where edge tensors and structure are."""
    return tensor.to(HOST, copy=True)
