"""Which tensors Triton's kernels take: those of CUDA devices, where triton is installed. It is imported by then only.

The CUDA builds of torch for Linux bring triton along. Without it, and with SHARDPASS_TRITON=0 in the environment, the
plain torch code runs. The tests of the kernels let `is_compiled_for` say yes to the CPU, under Triton's interpreter.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SWITCH = "SHARDPASS_TRITON"


def is_compiled_for(device: torch.device) -> bool:
    """Whether Triton compiles kernels for this device."""
    return device.type == "cuda"


def triton_sums_for(*tensors: Tensor | None) -> ModuleType | None:
    """`triton_sums`, if it takes these tensors: sums of source rows, and their gradients."""
    if not _takes(tensors):
        return None
    try:
        from shardpass.core.kernels import triton_sums
    except ImportError:
        return None
    return triton_sums


def triton_extremum_for(*tensors: Tensor | None) -> ModuleType | None:
    """`triton_extremum`, if it takes these tensors."""
    if not _takes(tensors):
        return None
    try:
        from shardpass.core.kernels import triton_extremum
    except ImportError:
        return None
    return triton_extremum


def triton_attention_for(*tensors: Tensor | None) -> ModuleType | None:
    """`triton_attention`, if it takes these tensors, which must have one dtype."""
    if not _takes(tensors) or len({tensor.dtype for tensor in tensors if tensor is not None}) != 1:
        return None
    try:
        from shardpass.core.kernels import triton_attention
    except ImportError:
        return None
    return triton_attention


def _takes(tensors: tuple[Tensor | None, ...]) -> bool:
    given = [tensor for tensor in tensors if tensor is not None]
    known = all(is_compiled_for(tensor.device) and tensor.dtype in DTYPES for tensor in given)
    return known and len({tensor.device for tensor in given}) == 1 and os.environ.get(SWITCH) != "0"
