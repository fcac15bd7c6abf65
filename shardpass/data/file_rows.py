"""Arrays that stay in their files: rows are read when they are asked for, and nothing of them is kept in memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.errors import InternalError

_ROWS_AT_ONCE = 1024  # rows in any order may each touch a page of their own, and some around it


@dataclass(frozen=True)
class FileRows:
    """An array in a file, one row per node or edge.

    Args:
        path: the file; it must not change while the array is in use.
        array_dtype: NumPy's dtype of the numbers, as stored.
        array_shape: of the whole array in the file.
        offset: where it begins, in bytes.
        fortran: whether the first index runs fastest.
        selected: which of it this is: `()` all, `(0,)` its first row, `(slice(None), 1)` its second column.
        origin: the file that errors name, where these rows are a converted copy of it.

    Raises:
        TypeError: for values that no tensor can hold.
    """

    path: Path
    array_dtype: np.dtype[Any]
    array_shape: tuple[int, ...]
    offset: int = 0
    fortran: bool = False
    selected: tuple[Any, ...] = ()
    origin: Path | None = None

    def __post_init__(self) -> None:
        try:
            torch.from_numpy(np.empty(0, self.array_dtype.newbyteorder("=")))
        except TypeError:
            raise TypeError(
                f"{self.name} holds {self.array_dtype}, which tensors cannot hold; expected numbers or booleans"
            ) from None

    @property
    def name(self) -> Path:
        """The file that errors should name."""
        return self.origin or self.path

    @staticmethod
    def of_npy(path: Path) -> FileRows:
        """The array of an `.npy` file.

        Raises:
            ValueError: when the file is none, holds objects, or is shorter than its header says.
        """
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} cannot be read as an .npy file of numbers: {error}") from error
        if not isinstance(array, np.memmap):
            raise ValueError(f"{path} is not an .npy file; save the array with numpy.save")
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        return FileRows(Path(path), array.dtype, tuple(array.shape), int(array.offset), fortran)

    @property
    def shape(self) -> torch.Size:
        """Rows first, as a tensor's."""
        return torch.Size(np.broadcast_to(np.empty((), bool), self.array_shape)[self.selected].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors that are read."""
        return torch.from_numpy(np.empty(0, self.array_dtype.newbyteorder("="))).dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __len__(self) -> int:
        return self.shape[0]

    def select(self, *selected: Any) -> FileRows:
        """A row or a column of the whole array, or a run of rows."""
        return replace(self, selected=selected)

    def block(self, start: int, stop: int) -> Tensor:
        """The rows `[start, stop)`, in memory of their own."""
        return self._tensor(self._view()[1][start:stop])

    def take(self, ids: Tensor) -> Tensor:
        """The rows `ids` (int64), in memory of their own."""
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        if rows.numel() == 0:
            return rows
        mapping, view = self._view()
        for start in range(0, ids.numel(), _ROWS_AT_ONCE):
            wanted = ids[start : start + _ROWS_AT_ONCE]
            rows[start : start + wanted.numel()] = self._tensor(view[wanted.numpy()])
            if hasattr(mapping, "madvise"):
                mapping.madvise(mmap.MADV_DONTNEED)  # pages of the file count as ours until they are let go
        return rows

    def load(self) -> Tensor:
        """The whole array, in memory."""
        return self.block(0, len(self))

    def _view(self) -> tuple[Any, np.ndarray]:
        """A new mapping of the file and the array in it; the mapping ends with the last reference."""
        if 0 in self.array_shape:
            return None, np.empty(self.array_shape, self.array_dtype)[self.selected]
        order: Any = "F" if self.fortran else "C"
        array = np.memmap(self.path, self.array_dtype, "r", self.offset, self.array_shape, order)
        return getattr(array, "_mmap", None), np.asarray(array)[self.selected]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=self.array_dtype.newbyteorder("="), order="C"))


def blocks(rows: Tensor | FileRows, count: int) -> Iterator[tuple[int, Tensor]]:
    """The rows of an array in runs of `count`: the first row's number and the rows."""
    for start in range(0, len(rows), count):
        yield start, (rows.block(start, start + count) if isinstance(rows, FileRows) else rows[start : start + count])


def loaded(rows: Tensor | FileRows) -> Tensor:
    """The whole array in memory."""
    return rows.load() if isinstance(rows, FileRows) else rows


class RowWriter:
    """A file of rows that grows by `append`; `rows()` is what was written.

    Args:
        path: the file to write.
        dtype: NumPy's, of the numbers.
        row_shape: of one row.
        origin: the file that errors about these rows should name.
    """

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = (), origin: Path | None = None) -> None:
        self.path, self.dtype, self.row_shape, self.origin = path, np.dtype(dtype), row_shape, origin
        self.count = 0
        path.write_bytes(b"")

    def append(self, values: np.ndarray) -> None:
        """Write further rows, [n, *row_shape]."""
        raw = np.ascontiguousarray(values, dtype=self.dtype)
        if raw.shape[1:] != self.row_shape:
            raise InternalError(f"{self.path}: rows of the shape {raw.shape[1:]}; expected {self.row_shape}")
        with open(self.path, "ab") as file:
            file.write(raw.reshape(-1).view(np.uint8).data)
        self.count += len(raw)

    def rows(self) -> FileRows:
        """What was written so far."""
        return FileRows(self.path, self.dtype, (self.count, *self.row_shape), origin=self.origin)
