"""A file without a name that holds tensors; they are mapped where they are read."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


class Mapping(mmap.mmap):
    """The memory of a tensor that lies in the file; it ends with the tensor's storage."""

    range: Range


class Range:
    """Where one tensor lies in a file. Its bytes are free again when nobody has this, nor a mapping of it."""

    def __init__(self, file: ScratchFile, start: int, num_bytes: int) -> None:
        self.start, self.num_bytes, self.file, self.is_coming = start, num_bytes, file, False
        weakref.finalize(self, file.free, start, num_bytes)

    def map(self, shape: Sequence[int], dtype: torch.dtype, shared: bool = False) -> tuple[Tensor, Mapping]:
        """The content as a tensor whose pages are those of the file, and its memory.

        Args:
            shared: what is written into the tensor changes the file; otherwise it is the tensor's own.
        """
        access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
        memory = Mapping(self.file.fileno, self.num_bytes, access=access, offset=self.start)
        memory.range = self
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape)), memory

    def read(self) -> None:
        """Have the kernel read it, where it can be asked; call it in another thread, it may wait for the disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno, self.start, self.num_bytes, os.POSIX_FADV_WILLNEED)


class ScratchFile:
    """Goes with the process; ranges that are freed are used again, which is many times faster than new ones."""

    def __init__(self, folder: Path | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as a range needs it
        self._where = str(folder or tempfile.gettempdir())
        self._end = 0
        self._free: dict[int, list[int]] = {}

    @property
    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, host: Tensor) -> Range:
        """Where the content lies from now on.

        Args:
            host: contiguous, on the CPU, not empty.
        """
        num_bytes = host.numel() * host.itemsize
        # not through numpy, which would mark the storage as one that must not be replaced
        data = memoryview((ctypes.c_ubyte * num_bytes).from_address(host.data_ptr()))
        free = self._free.get(_pages(num_bytes))
        start = free.pop() if free else self._end
        self._end = max(self._end, start + _pages(num_bytes))
        done = 0
        try:
            while done < num_bytes:
                done += os.pwrite(self.fileno, data[done:], start + done)
        except OSError as error:
            raise OSError(
                f"sp.offload could not write {num_bytes} bytes at {start} to a file in {self._where}: "
                f"{error.strerror}. Give it a folder with more room"
            ) from error
        return Range(self, start, num_bytes)

    def free(self, start: int, num_bytes: int) -> None:
        """The bytes are not needed any more."""
        self._free.setdefault(_pages(num_bytes), []).append(start)


def _pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to what can be mapped by itself."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
