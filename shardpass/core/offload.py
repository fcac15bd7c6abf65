"""Saved tensors on disk: what autograd keeps between forward and backward, in a file in place of memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@contextmanager
def offload(
    directory: str | os.PathLike[str] | None = None, *, min_bytes: int = 1 << 20, read_ahead: int = 2
) -> Iterator[None]:
    """A ``with`` block for a forward pass, whose saved tensors lie on disk until backward wants them.

    ``with sp.offload("/scratch"): loss = ...``, and ``loss.backward()`` there or after. Gradients are the same bits.
    Parameters, tensors that are mapped from a file already, and small ones stay where they are. Not collective: each
    rank has a file of its own, which is gone when the graph of the forward is, also if the process is killed.

    Args:
        directory: a folder on a disk with room for the saved tensors; None: the system's temporary one, which may be
            memory itself (tmpfs).
        min_bytes: of the smallest tensor that is written.
        read_ahead: how many tensors are read in another thread before backward asks for them.

    Raises:
        OSError: the file cannot be made, or the disk is full.
        RuntimeError: in backward, where a tensor that stayed in memory was changed in place, as without the block.
            (What lies in the file is what it was.)
    """
    if read_ahead < 0 or min_bytes < 1:
        raise ValueError(f"read_ahead is at least 0 and min_bytes at least 1, got {read_ahead} and {min_bytes}")
    folder = None if directory is None else Path(directory)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    saved = _SavedTensors(_File(folder), min_bytes, read_ahead)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        yield


class _File:
    """A file without a name, so that it goes with the process; ranges that are freed are used again."""

    def __init__(self, folder: Path | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as a graph needs it
        self._where = str(folder or tempfile.gettempdir())
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def write(self, data: memoryview) -> int:
        """Where the bytes lie."""
        free = self._free.get(data.nbytes)
        start = free.pop() if free else self._end
        self._end = max(self._end, start + data.nbytes)
        done = 0
        try:
            while done < data.nbytes:
                done += os.pwrite(self._file.fileno(), data[done:], start + done)
        except OSError as error:
            raise OSError(
                f"sp.offload could not write {data.nbytes} bytes after {self._end - data.nbytes} to a file in "
                f"{self._where}: {error.strerror}. Give it a folder with more room"
            ) from error
        return start

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes that lie there."""
        done = 0
        while done < into.nbytes:
            count = os.preadv(self._file.fileno(), [into[done:]], start + done)
            if count == 0:
                raise OSError(f"sp.offload: the file in {self._where} is {into.nbytes - done} bytes short")
            done += count

    def free(self, start: int, num_bytes: int) -> None:
        """The bytes are not needed any more."""
        self._free.setdefault(num_bytes, []).append(start)


class _Left:
    """One tensor that stays in memory. Autograd does not look for changes in place where there are hooks."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, _version(tensor)

    def take(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        if _version(self.tensor) != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {_version(self.tensor)}; expected "
                f"version {self.version} instead. Forward ran in sp.offload, which leaves parameters, small tensors "
                f"and those of mapped files in memory: do not change them before backward is over"
            )
        return self.tensor


class _Stored:
    """One tensor in the file."""

    def __init__(self, file: _File, tensor: Tensor) -> None:
        host = tensor.detach().cpu().contiguous()
        self.shape, self.dtype, self.device, self.file = tensor.shape, tensor.dtype, tensor.device, file
        data = _bytes_of(host)
        self.start, self.num_bytes = file.write(data), data.nbytes
        self.loading: Future[Tensor] | None = None
        self._alive: weakref.ref[Tensor] | None = None
        weakref.finalize(self, file.free, self.start, self.num_bytes)

    def load(self) -> Tensor:
        """A new tensor with the content, on the CPU."""
        host = torch.empty(self.shape, dtype=self.dtype)
        self.file.read(self.start, _bytes_of(host))
        return host

    def is_loaded(self) -> bool:
        return self.loading is not None or (self._alive is not None and self._alive() is not None)

    def take(self) -> Tensor:
        """The content, shared by all who hold it at the same time."""
        alive = None if self._alive is None else self._alive()
        if alive is not None:
            return alive
        loading, self.loading = self.loading, None
        found = (self.load() if loading is None else loading.result()).to(self.device)
        self._alive = weakref.ref(found)
        return found


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _bytes_of(host: Tensor) -> memoryview:
    return memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class _SavedTensors:
    """Packs tensors of one forward; the same content is written once."""

    def __init__(self, file: _File, min_bytes: int, read_ahead: int) -> None:
        self._file, self._min_bytes, self._read_ahead = file, min_bytes, read_ahead
        self._order: list[weakref.ref[_Stored]] = []
        self._place: weakref.WeakKeyDictionary[_Stored, int] = weakref.WeakKeyDictionary()
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Stored]]] = {}
        self._reader = ThreadPoolExecutor(1, "shardpass offload")

    def pack(self, tensor: Tensor) -> _Left | _Stored:
        """For autograd: what to keep in place of `tensor`."""
        if not self._is_worth_it(tensor):
            return _Left(tensor)
        # the address alone would not do: it is used again when the tensor is gone
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        storage, known = self._known.get(key, (None, None))
        stored = None if known is None or storage is None or storage.expired() else known()
        if stored is None:
            stored = _Stored(self._file, tensor)
            self._known[key] = (StorageWeakRef(tensor.untyped_storage()), weakref.ref(stored))
            self._place[stored] = len(self._order)
            self._order.append(weakref.ref(stored))
        return stored

    def unpack(self, kept: _Left | _Stored) -> Tensor:
        """For autograd: the tensor of which `kept` was made."""
        if isinstance(kept, _Left):
            return kept.take()
        found = kept.take()
        place = self._place[kept]
        for reference in reversed(self._order[max(0, place - self._read_ahead) : place]):
            before = reference()
            if before is not None and not before.is_loaded():
                before.loading = self._reader.submit(before.load)
        return found

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.is_inference() or type(tensor) not in (Tensor, nn.Parameter):
            return False
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or tensor.numel() * tensor.itemsize < self._min_bytes:
            return False
        is_expanded = tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize
        return not is_expanded and not _is_mapped(tensor)


def _is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor's memory is that of a file, as the fields of a loaded graph are; False where Linux is not."""
    if tensor.device.type != "cpu":
        return False
    address = tensor.data_ptr()
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            for line in maps:
                span, _, _, _, inode, *_ = line.split()
                start, stop = (int(text, 16) for text in span.split("-"))
                if start <= address < stop:
                    return inode != "0"
    except OSError:
        pass
    return False
