"""`Names`: the name of each node, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, in_memory, row_range
from shardpass.errors import StoreError, require

_EXAMPLES = 5
_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False)
class Names:
    """The name of each node, in the order of their numbers.

    values: the names, int64 or uint64 [n]. Or the UTF-8 bytes of all of them, one after the other, uint8.
    ends: for strings, the place in `values` behind the last byte of each, int64 [n]. `None` for integers.
    """

    values: Tensor | FileRows
    ends: Tensor | FileRows | None = None

    def __len__(self) -> int:
        return len(self.values if self.ends is None else self.ends)

    def block(self, start: int, stop: int) -> Any:
        """The names `[start, stop)` as an array of pyarrow: integers, or `large_string`."""
        arrow = require("pyarrow", "names", "names of nodes")
        if self.ends is None:
            return arrow.array(row_range(self.values, start, stop).numpy())
        ends = self._ends(start, stop)
        text = row_range(self.values, int(ends[0]), int(ends[-1])).numpy()
        buffers = [None, arrow.py_buffer(ends - ends[0]), arrow.py_buffer(text)]
        names = arrow.Array.from_buffers(arrow.large_string(), stop - start, buffers)
        names.validate(full=True)
        return names

    def blocks(self) -> Iterator[Any]:
        """All names, some at a time, as `block` gives them."""
        for start in range(0, len(self), _BLOCK):
            yield self.block(start, min(start + _BLOCK, len(self)))

    def take(self, node_ids: Tensor) -> np.ndarray:
        """The names of some nodes: int64 or uint64 [n], or an array of `str` objects."""
        if self.ends is None:
            return _take(self.values, node_ids)
        found = np.empty(node_ids.numel(), dtype=object)
        stops = _take(self.ends, node_ids)
        starts = np.where(node_ids.numpy() == 0, 0, _take(self.ends, (node_ids - 1).clamp(min=0)))
        text = in_memory(self.values).numpy().data
        for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist())):
            found[row] = str(text[start:stop], "utf-8")
        return found

    def check(self, count: int, what: str) -> None:
        """Return when these can be the names of `count` nodes; else raise a StoreError about `what`."""
        kind, last, total = self.values.dtype, 0, len(self.values)
        if self.ends is None:
            fits = kind in (torch.int64, torch.uint64) and self.values.shape == (count,)
        else:
            fits = kind is torch.uint8 and self.ends.dtype is torch.int64 and self.ends.shape == (count,)
        if not fits or len(self.values.shape) != 1:
            raise StoreError(f"{what}: {kind} {list(self.values.shape)}; expected the names of {count} nodes")
        for start in range(0, 0 if self.ends is None else count, _BLOCK):
            ends = self._ends(start, min(start + _BLOCK, count))
            last = int(ends[-1])
            if bool((np.diff(ends) < 0).any()) or last > total:
                raise StoreError(f"{what}: the places where names end do not ascend to {total}")
            text = row_range(self.values, int(ends[0]), last).numpy()
            begins = (ends[:-1] - ends[0])[ends[:-1] < last]
            try:
                str(text.data, "utf-8")
            except UnicodeDecodeError as error:
                raise StoreError(f"{what}: the names are not UTF-8 ({error.reason})") from None
            if bool((text[begins] & 0xC0 == 0x80).any()):
                raise StoreError(f"{what}: a name begins within a character")
        if self.ends is not None and last != total:
            raise StoreError(f"{what}: the names end at {last}; expected {total}")

    def _ends(self, start: int, stop: int) -> np.ndarray:
        """Where the names `[start, stop)` end, after the place where the first of them begins: int64 [n + 1]."""
        assert self.ends is not None
        ends = row_range(self.ends, max(0, start - 1), stop).numpy()
        return ends if start else np.concatenate([np.zeros(1, np.int64), ends])


def _take(rows: Tensor | FileRows, ids: Tensor) -> np.ndarray:
    found: np.ndarray = rows.take(ids).numpy() if isinstance(rows, FileRows) else rows.numpy()[ids.numpy()]
    return found


class Examples:
    """How many rows of something are wrong, and the first five of them."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[tuple[int, str]] = []

    def add(self, rows: np.ndarray, values: Sequence[Any] | None = None) -> None:
        """Count some rows, and remember the first of them with their values."""
        self.count += len(rows)
        first = np.argsort(rows, kind="stable")[:_EXAMPLES].tolist()
        words = [(int(rows[i]), f"{_short(values[i])} in row " if values is not None else "row ") for i in first]
        self._first = sorted([*self._first, *words])[:_EXAMPLES]

    def __str__(self) -> str:
        return ", ".join(f"{words}{row}" for row, words in self._first) + (", ..." if self.count > _EXAMPLES else "")


def _short(value: Any) -> str:
    text = repr(value.as_py() if hasattr(value, "as_py") else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
