"""Numbers of bytes, counts and kinds of tensors as people write them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
SAFETENSORS_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
"""What the safetensors format calls a dtype."""


def parse_bytes(text: str | float) -> int:
    """The bytes that `text` says: 6 * 1024**3 for ``"6GiB"``, 512 * 1000**2 for ``"512MB"``; a number as it is.

    Raises:
        ValueError: it is no size, or not above 0.
    """
    return _parse(text, _BYTES, "a number of bytes such as '6GiB', '512MB' or 1e9")


def parse_count(text: str | float) -> int:
    """The count that `text` says: 111 million for ``"111M"``, 3.2 thousand million for ``"3.2B"``; a number as it is.

    Raises:
        ValueError: it is no count, or not above 0.
    """
    return _parse(text, _COUNTS, "a count such as '111M', '3.2B' or 50000")


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or on a GPU. Then nothing else can be concluded from the error."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # as the CPU's allocator has it


def memory_error(error: BaseException) -> BaseException | None:
    """The error that says that memory ran out, where `error` was raised while that one was handled; else `None`."""
    found: BaseException | None = error
    while found is not None and not is_out_of_memory(found):
        found = found.__context__
    return found


def describe(value: Any) -> str:
    """The dtype and shape of a tensor, such as ``"float32 [3, 4]"``; of anything else, the name of its type."""
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _parse(text: str | float, units: dict[str, int], wanted: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-z]*)\s*", str(text).lower().replace("_", ""))
    if isinstance(text, bool) or found is None or found[2] not in units:
        raise ValueError(f"expected {wanted}, got {text!r}")
    value = round(float(found[1]) * units[found[2]])
    if value <= 0:
        raise ValueError(f"expected {wanted}, above 0, got {text!r}")
    return value


def bytes_text(count: float) -> str:
    """A number of bytes for people: ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
