"""Rows of several tensors as one piece of memory."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

MESSAGE_BUFFER = "message buffer"
"""The name under which a profiler, or the dry run of the planner, sees that memory for messages is made."""


def message_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """New memory for the rows of a message, uint8 ``[num_bytes]``, not initialised."""
    with record_function(MESSAGE_BUFFER):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Packing:
    """Rows of several tensors as one message: each tensor's rows contiguous, one after the other.

    Args:
        tensors: of whose rows messages are made.
        wire: the dtype in which rows of float32 travel; None: their own.
    """

    def __init__(self, tensors: Sequence[Tensor], wire: torch.dtype | None = None) -> None:
        self.tails = [tuple(t.shape[1:]) for t in tensors]
        self.computed = [t.dtype for t in tensors]
        self.dtypes = [wire if wire is not None and dtype == torch.float32 else dtype for dtype in self.computed]
        self.row_bytes = [_numel(tail) * dtype.itemsize for tail, dtype in zip(self.tails, self.dtypes)]

    @property
    def layout(self) -> int:
        """A fingerprint of what a row is, 31 bits, never 0: the same where rows are read as they were written."""
        return zlib.crc32(repr((self.tails, self.dtypes)).encode()) >> 1 | 1

    @property
    def converts(self) -> bool:
        """Whether rows travel in another dtype than they are computed in."""
        return self.dtypes != self.computed

    def to_computed(self, rows: list[Tensor]) -> list[Tensor]:
        """`rows` as they travel in the dtypes in which they are computed; the same tensors where those agree."""
        return [part.to(dtype) for part, dtype in zip(rows, self.computed)]

    def _spans(self, num_rows: int) -> list[tuple[int, int]]:
        spans, position = [], 0
        for dtype, width in zip(self.dtypes, self.row_bytes):
            position = -(-position // dtype.itemsize) * dtype.itemsize
            spans.append((position, position + width * num_rows))
            position += width * num_rows
        return spans

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of a message of `num_rows` rows."""
        return self._spans(num_rows)[-1][1] if self.dtypes else 0

    def views(self, buffer: Tensor, num_rows: int) -> list[Tensor]:
        """The tensors inside `buffer` (uint8, at least `num_bytes` long), ``[num_rows, ...]`` each."""
        return [
            buffer[start:stop].view(dtype).view(num_rows, *tail)
            for (start, stop), dtype, tail in zip(self._spans(num_rows), self.dtypes, self.tails)
        ]


def _numel(tail: tuple[int, ...]) -> int:
    count = 1
    for length in tail:
        count *= length
    return count
