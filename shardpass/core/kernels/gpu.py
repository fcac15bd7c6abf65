"""Decides which tensors Triton's kernels take: those of CUDA devices, where triton is installed.

The CUDA builds of torch for Linux bring triton along. Without it, or with SHARDPASS_TRITON=0 in the environment, plain
torch code runs instead. Triton is imported when the first tensor is taken. Tests of the kernels replace
`is_compiled_for`, so that the CPU is taken too, under Triton's interpreter.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from shardpass.core.kernels.optional import optional_module

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SWITCH = "SHARDPASS_TRITON"


def is_compiled_for(device: torch.device) -> bool:
    """Whether Triton compiles kernels for this device."""
    return device.type == "cuda"


def triton_for(what: Literal["sums", "extremum", "attention"], *tensors: Tensor | None) -> ModuleType | None:
    """The module ``triton_<what>`` if it takes these tensors, else `None`. Attention takes tensors of one dtype."""
    given = [tensor for tensor in tensors if tensor is not None]
    known = all(is_compiled_for(tensor.device) and tensor.dtype in DTYPES for tensor in given)
    if not known or len({tensor.device for tensor in given}) != 1 or os.environ.get(SWITCH) == "0":
        return None
    if what == "attention" and len({tensor.dtype for tensor in given}) != 1:
        return None
    return optional_module(f"shardpass.core.kernels.triton_{what}")
