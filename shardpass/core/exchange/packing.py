"""Rows of several tensors in one piece of memory: a message, or a window."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from shardpass.core.ranks import torch_private

MESSAGE_BUFFER = "message buffer"
"""The name under which a profiler, or the dry run of the planner, sees that memory for messages is made."""


def message_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """New memory for the rows of a message, uint8 ``[num_bytes]``, not initialised."""
    with torch_private.span(MESSAGE_BUFFER):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Packing:
    """How rows of several tensors make one message: the rows of each tensor together, one tensor after the other.

    Args:
        tensors: whose rows travel.
        wire: the dtype in which float32 rows travel. `None` keeps float32.
    """

    def __init__(self, tensors: Sequence[Tensor], wire: torch.dtype | None = None) -> None:
        self.tails = [tuple(t.shape[1:]) for t in tensors]
        self.computed = [t.dtype for t in tensors]
        self.dtypes = [wire if wire is not None and dtype == torch.float32 else dtype for dtype in self.computed]
        self.row_bytes = [prod(tail) * dtype.itemsize for tail, dtype in zip(self.tails, self.dtypes)]

    @property
    def layout(self) -> int:
        """A fingerprint of widths and dtypes, 31 bits, never 0. It tells how rows are to be read."""
        return zlib.crc32(repr((self.tails, self.dtypes)).encode()) >> 1 | 1

    def describe(self) -> str:
        """What a row is, in words."""
        return ", ".join(f"{str(t).removeprefix('torch.')} {[*tail]}" for t, tail in zip(self.dtypes, self.tails))

    @property
    def converts(self) -> bool:
        """Whether rows travel in another dtype than the one in which they are computed."""
        return self.dtypes != self.computed

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

    def write(self, tensors: Sequence[Tensor], buffer: Tensor, rows: Tensor | None = None) -> None:
        """Write rows of `tensors` into `buffer` as they travel: those at `rows`, or all of them.

        Args:
            tensors: at least one, ``[num_rows, ...]`` each, in the dtypes in which they are computed.
            rows: ``[count]``, int64.
        """
        num_rows = tensors[0].size(0) if rows is None else rows.numel()
        for tensor, view in zip(tensors, self.views(buffer, num_rows)):
            if rows is None:
                view.copy_(tensor)
            elif view.dtype == tensor.dtype:
                torch.index_select(tensor, 0, rows, out=view)
            else:
                view.copy_(tensor.index_select(0, rows))

    def read(self, buffer: Tensor, num_rows: int) -> list[Tensor]:
        """Rows that have travelled, in the dtypes in which they are computed. No copy where these are the same."""
        return self.to_computed(self.views(buffer, num_rows))

    def to_computed(self, rows: list[Tensor]) -> list[Tensor]:
        """`rows` as they travel, in the dtypes in which they are computed. No copy where these are the same."""
        return [part.to(dtype) for part, dtype in zip(rows, self.computed)]
