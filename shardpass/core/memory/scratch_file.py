"""A file without a name that holds tensors. They are mapped into memory when somebody reads them."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


class _Mapping(mmap.mmap):
    """The memory of a tensor that was read. It keeps the range from being written again while the tensor lives."""

    range: Range


class Range:
    """Where one tensor lies in a file. Its bytes can be used again once nobody holds this object or a tensor of it."""

    def __init__(self, file: ScratchFile, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes = file, start, num_bytes
        weakref.finalize(self, file.free, start, num_bytes)

    def map(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The content as a tensor. What you write into the tensor does not reach the file."""
        memory = _Mapping(self._file.fileno, self._num_bytes, access=mmap.ACCESS_COPY, offset=self._start)
        memory.range = self
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def read(self) -> None:
        """Ask the kernel to read the content. Call it in a thread of its own: it may wait for the disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno, self._start, self._num_bytes, os.POSIX_FADV_WILLNEED)


class ScratchFile:
    """A file that ends with the process. It writes to freed ranges first, which is much faster than growing."""

    def __init__(self, folder: Path | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as a range needs it
        self._where = str(folder or tempfile.gettempdir())
        self._end = 0
        self._free: dict[int, list[int]] = {}

    @property
    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, host: Tensor) -> Range:
        """Where the content of `host` lies from now on.

        Args:
            host: contiguous, on the CPU, not empty.

        Raises:
            OSError: the disk is full.
        """
        data = host.reshape(-1).view(torch.uint8).numpy().data
        free = self._free.get(_pages(len(data)))
        start = free.pop() if free else self._end
        self._end = max(self._end, start + _pages(len(data)))
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.fileno, data[done:], start + done)
        except OSError as error:
            raise OSError(
                f"sp.offload could not write {len(data)} bytes at {start} to a file in {self._where}: "
                f"{error.strerror}. Pass a folder on a disk with more room"
            ) from error
        return Range(self, start, len(data))

    def free(self, start: int, num_bytes: int) -> None:
        """Let the bytes be written again."""
        self._free.setdefault(_pages(num_bytes), []).append(start)


def _pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to a size at which the next range may begin."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
