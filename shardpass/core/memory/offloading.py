"""Saved tensors on disk: what autograd keeps between forward and backward lies in a file instead of in memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.following import unfollowed_anywhere
from shardpass.core.memory.kept import Kept
from shardpass.core.memory.scratch_file import Range, ScratchFile
from shardpass.core.ranks import is_parameter, torch_private


@contextmanager
def offload(
    directory: str | os.PathLike[str] | None = None, *, min_bytes: int = 1 << 20, read_ahead: int = 2
) -> Iterator[None]:
    """A ``with`` block for a forward pass. The tensors that autograd saves in it lie on disk until backward needs them.

    ``with sp.offload("/scratch"): loss = ...``, and call ``loss.backward()`` in the block or after it. Results are the
    same to the last bit, with one exception: a saved tensor with gaps in memory (some columns of a wider one) comes
    back without gaps, and an operation may round differently on it. Parameters, tensors that are mapped from a file
    already, and small tensors stay where they are. Not collective: each rank has a file of its own. The file is gone
    when its last tensor is, also if the process is killed.

    Args:
        directory: a folder on a disk with room for the tensors. It is made if it does not exist. `None` stands for the
            system's temporary folder, which may itself be memory (tmpfs), and for pinned CPU memory if a tensor is on
            a GPU.
        min_bytes: the size of the smallest tensor that is written.
        read_ahead: how many tensors another thread reads before backward asks for them.

    Raises:
        OSError: the file cannot be made, or the disk is full.
        TypeError, ValueError: an argument is not what it should be.
        RuntimeError: in backward, if a tensor that stayed in memory was changed in place, as without the block. (A
            tensor in the file keeps the value that it had when it was saved.)
    """
    _check(directory, min_bytes, read_ahead)
    folder = None if directory is None else Path(directory)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    saved = _SavedTensors(ScratchFile(folder), min_bytes, read_ahead, gpu_to_memory=folder is None)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        yield


def _check(directory: Any, min_bytes: Any, read_ahead: Any) -> None:
    for name, value, least in (("min_bytes", min_bytes, 1), ("read_ahead", read_ahead, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"sp.offload: {name} must be an integer of at least {least}, found {value!r}")
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"sp.offload: directory must be the path of a folder, found {type(directory).__name__}")
    if directory is not None and Path(directory).exists() and not Path(directory).is_dir():
        raise NotADirectoryError(f"sp.offload: {directory} is a file; pass the path of a folder")


class _Stored:
    """A tensor in the file, or in CPU memory if `file` is `None`. Its dimensions are in the order of the memory.

    Attributes:
        range: where it lies in the file; `None` without a file.
        place: how many tensors were stored before it.
    """

    def __init__(self, file: ScratchFile | None, tensor: Tensor, place: int) -> None:
        dims = _by_stride(tensor)
        tensor = tensor.detach().permute(dims)
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._back = [dims.index(dim) for dim in range(len(dims))]
        self.range: Range | None = None
        self.place = place
        if file is None:
            self._host = torch.empty(self._shape, dtype=self._dtype, pin_memory=self._device.type == "cuda")
            self._host.copy_(tensor)
        else:
            self.range = file.write(tensor.cpu().contiguous())

    def get(self) -> Tensor:
        """The tensor, each time in new memory: autograd may add to it in place when nobody else holds it."""
        host = self._host if self.range is None else self.range.map(self._shape, self._dtype)
        return host.to(self._device, non_blocking=True).permute(self._back)


def _by_stride(tensor: Tensor) -> list[int]:
    """The dimensions in the order of the memory if that has no gaps, else in their own order."""
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return dims if tensor.permute(dims).is_contiguous() else list(range(tensor.dim()))


class _SavedTensors:
    """The saved tensors of one forward pass. A tensor that several operations save is stored once."""

    def __init__(self, file: ScratchFile, min_bytes: int, read_ahead: int, gpu_to_memory: bool) -> None:
        self._file, self._min_bytes, self._read_ahead = file, min_bytes, read_ahead
        self._gpu_to_memory = gpu_to_memory
        self._order: list[weakref.ref[_Stored]] = []
        self._known: dict[tuple[Any, ...], tuple[torch_private.StorageWeakRef, weakref.ref[_Stored]]] = {}
        self._reader = ThreadPoolExecutor(1, "shardpass offload")

    def pack(self, tensor: Tensor) -> Kept | _Stored:
        """For autograd: what to hold in place of `tensor`."""
        if not self._is_worth_it(tensor):
            return Kept(tensor)
        # the address alone does not tell a tensor: it is used again when the tensor is gone
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, torch_private.version_of(tensor)
        storage, known = self._known.get(key, (None, None))
        stored = None if known is None or storage is None or storage.expired() else known()
        if stored is None:
            file = None if self._gpu_to_memory and _is_on_gpu(tensor) else self._file
            with unfollowed_anywhere():  # bytes are no rows
                stored = _Stored(file, tensor, place=len(self._order))
            self._order.append(weakref.ref(stored))
            self._known[key] = (torch_private.StorageWeakRef(tensor.untyped_storage()), weakref.ref(stored))
        return stored

    def unpack(self, saved: Kept | _Stored) -> Tensor:
        """For autograd: the tensor for which `pack` returned `saved`."""
        if isinstance(saved, _Stored):
            for reference in self._order[max(0, saved.place - self._read_ahead) : saved.place][::-1]:
                before = reference()  # backward asks for the tensors in the opposite order
                if before is not None and before.range is not None:
                    self._reader.submit(before.range.read)
        return saved.get()

    def _is_worth_it(self, tensor: Tensor) -> bool:
        num_bytes = tensor.numel() * tensor.itemsize
        if num_bytes < self._min_bytes or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_inference():
            return False
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        is_expanded = tensor.untyped_storage().nbytes() < num_bytes
        return not (is_expanded or is_parameter(torch_private.base_of(tensor)) or _is_mapped(tensor))


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _is_mapped(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` is a file's, as for the fields of a loaded graph. False if this is not Linux."""
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
