"""Saved tensors on disk: what autograd keeps between forward and backward, in a file in place of memory."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardpass.core.memory.layer_outputs import between_layers, is_alone
from shardpass.core.memory.scratch_file import Mapping, Range, ScratchFile


@contextmanager
def offload(
    directory: str | os.PathLike[str] | None = None,
    *,
    outputs_of: nn.Module | None = None,
    min_bytes: int = 1 << 20,
    read_ahead: int = 2,
) -> Iterator[None]:
    """A ``with`` block for a forward pass, whose saved tensors lie on disk until backward wants them.

    ``with sp.offload("/scratch"): loss = ...``, and ``loss.backward()`` there or after. Results are the same bits, but
    where a tensor with gaps in memory was saved (some columns of a wider one), which comes back without. Parameters,
    tensors that are mapped from a file already, and small ones stay where they are. Not collective: each rank has a
    file of its own, which is gone when the last tensor in it is, also if the process is killed.

    Args:
        directory: a folder on a disk with room for the tensors, made if it is not there; None: the system's temporary
            one, which may be memory itself (tmpfs), and pinned CPU memory for tensors of a GPU.
        outputs_of: a model whose forward holds tensors for later: outputs of layers for a jumping knowledge, skip
            connections. Those that its modules were given or returned go to the file as well while none of them works
            on them, without gradients too. They stay ordinary tensors; only their memory is the file's. Not moved are
            what the model is called with, what shares its memory with a view or an array, and tensors on a GPU.
        min_bytes: of the smallest tensor that is written.
        read_ahead: how many tensors are read in another thread before backward asks for them.

    Raises:
        OSError: the file cannot be made, or the disk is full.
        TypeError, ValueError: an argument of another kind.
        RuntimeError: in backward, where a tensor that was not copied was changed in place, as without the block.
            (What was copied to the file is what it was.)
    """
    _check(directory, outputs_of, min_bytes, read_ahead)
    folder = None if directory is None else Path(directory)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    saved = _SavedTensors(ScratchFile(folder), min_bytes, read_ahead, gpu_to_memory=folder is None)
    outputs = nullcontext() if outputs_of is None else between_layers(outputs_of, saved.move, saved.let_go)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack), outputs:
        yield


def _check(directory: Any, outputs_of: Any, min_bytes: Any, read_ahead: Any) -> None:
    for name, value, least in (("min_bytes", min_bytes, 1), ("read_ahead", read_ahead, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"sp.offload: {name} is a whole number, at least {least}; got {value!r}")
    if outputs_of is not None and not isinstance(outputs_of, nn.Module):
        raise TypeError(f"sp.offload: outputs_of is the model (a torch.nn.Module), got {_kind(outputs_of)}")
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        hint = "; pass the model as outputs_of=model" if isinstance(directory, nn.Module) else ""
        raise TypeError(f"sp.offload: directory is the path of a folder, got {_kind(directory)}{hint}")
    if directory is not None and Path(directory).exists() and not Path(directory).is_dir():
        raise NotADirectoryError(f"sp.offload: {directory} is a file; give it a folder")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of {type(value).__name__}"


class _Left:
    """One tensor that stays where it is. Autograd does not look for changes in place where there are hooks."""

    def __init__(self, tensor: Tensor, place: Range | None = None) -> None:
        self.tensor, self.version, self.range = tensor, _version(tensor), place

    def take(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        if _version(self.tensor) != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {_version(self.tensor)}; expected "
                f"version {self.version} instead. Forward ran in sp.offload, which leaves parameters, small tensors, "
                f"those in mapped files and outputs of layers as they are: do not change them before backward is over"
            )
        return self.tensor


class _Stored:
    """One tensor in the file, or in CPU memory where there is no file. In the order in which it lay in memory."""

    def __init__(self, file: ScratchFile | None, tensor: Tensor) -> None:
        dims = _by_stride(tensor)
        tensor = tensor.detach().permute(dims)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.back = [dims.index(dim) for dim in range(len(dims))]
        self.range: Range | None = None
        if file is None:
            self._host = torch.empty(self.shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")
            self._host.copy_(tensor)
        else:
            self.range = file.write(tensor.cpu().resolve_conj().resolve_neg().contiguous())
        self.output: _Left | None = None  # the tensor itself, once it lies in the file

    def take(self) -> Tensor:
        """The content, each time in memory of its own: autograd may add to what only one backward knows of."""
        if self.output is not None:
            return self.output.take()
        host = self._host if self.range is None else self.range.map(self.shape, self.dtype)[0]
        return host.to(self.device, non_blocking=True).permute(self.back)


def _by_stride(tensor: Tensor) -> list[int]:
    """The dimensions in the order of the memory if that has no gaps, else as they are."""
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return dims if tensor.permute(dims).is_contiguous() else list(range(tensor.dim()))


_Kept = TypeVar("_Kept", _Left, _Stored)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _SavedTensors:
    """Packs tensors of one forward; the same content is written once."""

    def __init__(self, file: ScratchFile, min_bytes: int, read_ahead: int, gpu_to_memory: bool) -> None:
        self._file, self._min_bytes, self._read_ahead = file, min_bytes, read_ahead
        self._gpu_to_memory = gpu_to_memory
        self._order: list[weakref.ref[_Left | _Stored]] = []
        self._place: weakref.WeakKeyDictionary[_Left | _Stored, int] = weakref.WeakKeyDictionary()
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Stored]]] = {}
        self._outputs: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
        self._reader = ThreadPoolExecutor(1, "shardpass offload")

    def pack(self, tensor: Tensor) -> _Left | _Stored:
        """For autograd: what to keep in place of `tensor`."""
        output = self._outputs.get(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        if output is not None:
            return self._in_order(_Left(tensor, output.range))
        if tensor.is_inference() or not self._is_worth_it(tensor):
            return _Left(tensor)
        return self._stored(tensor) or self._in_order(self._store(tensor))

    def unpack(self, kept: _Left | _Stored) -> Tensor:
        """For autograd: the tensor of which `kept` was made."""
        if kept.range is not None:
            kept.range.is_coming = False
        place = self._place.get(kept, 0)
        for reference in self._order[max(0, place - self._read_ahead) : place][::-1]:
            before = reference()
            if before is not None and before.range is not None and not before.range.is_coming:
                before.range.is_coming = True
                self._reader.submit(before.range.read)
        found = kept.take()
        self.let_go([found])
        return found

    def move(self, tensor: Tensor) -> bool:
        """Give a tensor that nothing shares its memory with memory of the file; whether that was done."""
        if tensor.data_ptr() in self._outputs:
            return True
        is_leaf = tensor.is_leaf and tensor.requires_grad
        if tensor.device.type != "cpu" or is_leaf or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.is_inference() and not torch.is_inference_mode_enabled():  # must not be changed here
            return False
        if not is_alone(tensor) or not self._is_worth_it(tensor):
            return False
        stored = self._stored(tensor) or self._store(tensor)
        assert stored.range is not None
        tensor.data, memory = stored.range.map(tensor.shape, tensor.dtype, shared=True)
        self._outputs[tensor.data_ptr()] = memory
        stored.output = _Left(tensor.detach())  # has the same counter of changes
        return True

    def let_go(self, in_use: list[Tensor]) -> None:
        """Take the pages of moved tensors out of the process's memory; whoever reads them gets them again."""
        addresses = {tensor.data_ptr() for tensor in in_use}
        for address, memory in list(self._outputs.items()):
            if address not in addresses:
                memory.madvise(mmap.MADV_DONTNEED)

    def _in_order(self, kept: _Kept) -> _Kept:
        self._place[kept] = len(self._order)
        self._order.append(weakref.ref(kept))
        return kept

    def _stored(self, tensor: Tensor) -> _Stored | None:
        """What was stored of the same tensor, if somebody has it yet."""
        storage, known = self._known.get(_key(tensor), (None, None))
        return None if known is None or storage is None or storage.expired() else known()

    def _store(self, tensor: Tensor) -> _Stored:
        stored = _Stored(None if self._gpu_to_memory and _is_on_gpu(tensor) else self._file, tensor)
        self._known[_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), weakref.ref(stored))
        return stored

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            return False
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or tensor.numel() * tensor.itemsize < self._min_bytes:
            return False
        is_expanded = tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize
        return not is_expanded and not _is_mapped(tensor)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """The address alone would not do: it is used again when the tensor is gone."""
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, bits, _version(tensor)


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
