"""Arrays that stay in their files. Rows are read when they are asked for, and nothing of them stays in memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.ranks import refuse_irregular, tells_of_full_disk
from shardpass.data.reading import reading
from shardpass.errors import InternalError

_ROWS_AT_ONCE = 1024  # each row of a random selection may touch a page of its own, and the pages around it


@dataclass(frozen=True, eq=False)
class FileRows:
    """An array in a file, with one row per node or edge.

    Args:
        array: the array, mapped from its file. Use the methods to read it: they let go of the pages that they touch.
        name: the file that error messages name. If `array` is a converted copy, this is the file that you gave.

    Raises:
        TypeError: when the values are not numbers or booleans.
    """

    array: np.ndarray
    name: Path

    def __post_init__(self) -> None:
        try:
            torch.from_numpy(np.empty(0, self.array.dtype.newbyteorder("=")))
        except TypeError:
            raise TypeError(
                f"{self.name} holds {self.array.dtype}, which tensors cannot hold; expected numbers or booleans"
            ) from None

    @staticmethod
    def of_npy(path: Path, name: Path | None = None) -> FileRows:
        """The array of an `.npy` file."""
        with reading(name or path, "an .npy file of numbers"):
            refuse_irregular(path)
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            raise ValueError(f"{path} is not an .npy file; save the array with numpy.save")
        return FileRows(array, name or path)

    @staticmethod
    def of_numbers(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], name: Path | None = None) -> FileRows:
        """The array in a file that holds nothing but its numbers."""
        empty = 0 in shape  # no file can be mapped that has no bytes
        return FileRows(np.empty(shape, dtype) if empty else np.memmap(path, dtype, "r", 0, shape), name or path)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.array.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors that are read."""
        return torch.from_numpy(np.empty(0, self.array.dtype.newbyteorder("="))).dtype

    def __len__(self) -> int:
        return len(self.array)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has the place of the array in its file, not the array."""
        mapping: Any = getattr(self.array, "_mmap", None)
        if mapping is None:
            return FileRows, (self.array, self.name)
        array: Any = self.array
        start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # where in the file the mapping begins
        start += array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
        return _mapped, (array.filename, start, array.dtype, array.shape, array.strides, self.name)

    def __getitem__(self, index: Any) -> FileRows:
        """A part of the array that stays in the file too: `rows[0]` or `rows[:, 1]`."""
        return FileRows(self.array[index], self.name)

    def block(self, start: int, stop: int) -> Tensor:
        """A copy of the rows `[start, stop)`."""
        return self._read(slice(start, stop))

    def take(self, ids: Tensor) -> Tensor:
        """A copy of the rows `ids` (int64)."""
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        for start in range(0, ids.numel(), _ROWS_AT_ONCE):
            wanted = ids[start : start + _ROWS_AT_ONCE]
            rows[start : start + wanted.numel()] = self._read(wanted.numpy())
        return rows

    def load(self) -> Tensor:
        """A copy of the whole array."""
        return self.block(0, len(self))

    def _read(self, rows: Any) -> Tensor:
        values = np.array(self.array[rows], dtype=self.array.dtype.newbyteorder("="), order="C")
        mapping: Any = getattr(self.array, "_mmap", None)
        if hasattr(mapping, "madvise"):
            mapping.madvise(mmap.MADV_DONTNEED)  # pages of the file count as ours until we let go of them
        return torch.from_numpy(values)


def _mapped(
    path: Path, start: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], name: Path
) -> FileRows:
    """The array that is in a file from the byte `start` on."""
    with reading(path, "the file that rank 0 reads"):
        flat = np.memmap(path, np.uint8, "r")
        stop = start + dtype.itemsize + sum((count - 1) * stride for count, stride in zip(shape, strides))
        values = flat[start : start if 0 in shape else stop]
        array = np.lib.stride_tricks.as_strided(values.view(dtype), shape, strides, subok=True, writeable=False)
        return FileRows(array, name)


def blocks(rows: Tensor | FileRows, count: int, rank: int = 0, size: int = 1) -> Iterator[tuple[int, Tensor]]:
    """The rows of an array, `count` at a time, each block with the number of its first row.

    With `size` ranks, those of one rank: in each round the blocks of all ranks follow each other, and in the last round
    the blocks of some ranks may be short or empty.
    """
    for start in range(rank * count, -(-len(rows) // (count * size)) * count * size, count * size):
        yield start, row_range(rows, start, start + count)


def row_range(rows: Tensor | FileRows, start: int, stop: int) -> Tensor:
    """The rows `[start, stop)` of an array."""
    return rows.block(start, stop) if isinstance(rows, FileRows) else rows[start:stop]


def in_memory(rows: Tensor | FileRows) -> Tensor:
    """The whole array in memory."""
    return rows.load() if isinstance(rows, FileRows) else rows


class RowWriter:
    """A file of rows that grows with every `append`. Errors about what `rows()` returns have `name` for `path`."""

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = (), name: Path | None = None) -> None:
        self.path, self.dtype, self.row_shape, self.name = path, np.dtype(dtype), row_shape, name
        self.count = 0
        path.write_bytes(b"")

    def append(self, values: np.ndarray) -> None:
        """Write further rows, [n, *row_shape]."""
        raw = np.ascontiguousarray(values, dtype=self.dtype)
        if raw.shape[1:] != self.row_shape:
            raise InternalError(f"{self.path}: rows of the shape {raw.shape[1:]}; expected {self.row_shape}")
        with tells_of_full_disk(self.path, self.count * raw[:1].nbytes + raw.nbytes), open(self.path, "ab") as file:
            file.write(raw.data)
        self.count += len(raw)

    def rows(self) -> FileRows:
        """The rows that have been written."""
        return FileRows.of_numbers(self.path, self.dtype, (self.count, *self.row_shape), self.name)
