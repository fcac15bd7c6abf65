"""`Team`: the processes that prepare one graph together, or a single process."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, fail_together
from shardpass.data.file_rows import FileRows, RowWriter, blocks
from shardpass.errors import CommunicationError, DivergenceError, MissingDependencyError, ShardpassError, StoreError

T = TypeVar("T")
Array = np.ndarray[Any, Any]
_ERRORS = (StoreError, MissingDependencyError, DivergenceError, ShardpassError, ValueError, TypeError, OSError)
"""What is told on every rank as the error that it was on one, the special kinds first."""


class Team:
    """The ranks that prepare one graph. With `None`, this process does the work and talks to nobody.

    All methods but `share` and `blocks` are collective.
    """

    def __init__(self, comm: Ranks | None = None) -> None:
        self._comm = comm if comm is not None and comm.size > 1 else None
        self.rank, self.size = (0, 1) if self._comm is None else (self._comm.rank, self._comm.size)
        self._have_all_failed = False

    def share(self, count: int) -> range:
        """This rank's share of `count` rows. The shares of all ranks follow each other in rank order."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def together(self, label: str, work: Callable[[], T]) -> T:
        """What `work` returned on this rank. An error on one rank is raised on all, so that none waits for it."""
        if self._comm is None:
            return work()
        try:
            return fail_together(self._comm, label, work, *_ERRORS)
        except _ERRORS as error:
            self._have_all_failed = not isinstance(error, CommunicationError)
            raise

    def after_failure(self) -> None:
        """Wait for the other ranks if all of them raise one error: who ends first may end the others."""
        if self._comm is not None and self._have_all_failed:
            self._comm.barrier("after an error")

    def only_first(self, label: str, work: Callable[[], T], otherwise: T) -> T:
        """What `work` returned on rank 0, which alone does it, and `otherwise` on the other ranks."""
        return self.together(label, lambda: work() if self.rank == 0 else otherwise)

    def first(self, label: str, work: Callable[[], T]) -> T:
        """What `work` returned on rank 0, on all ranks. Arrays in files stay in their files."""
        if self._comm is None:
            return work()
        packed = np.frombuffer(self.only_first(label, lambda: pickle.dumps(work()), b""), np.uint8)
        found = self._comm.all_gather(torch.from_numpy(packed.copy()).to(self._comm.device), label)[0].cpu()
        unpacked: T = self.together(label, lambda: pickle.loads(found.numpy().data))
        return unpacked

    def join(self, writer: RowWriter) -> FileRows:
        """The rows that all ranks have written, those of lower ranks first, in one file."""
        if self._comm is None:
            return writer.rows()
        pieces = self.gather("rows", [str(writer.path), writer.count, writer.dtype.str, writer.row_shape])
        kinds = [kind for _, count, *kind in pieces if count] or [pieces[0][2:]]

        def join() -> FileRows:
            if any(kind != kinds[0] for kind in kinds):
                raise ValueError(f"{writer.name}: rows of the kinds {kinds} (dtype, shape); expected one kind")
            with open(writer.path, "ab") as whole:
                for path, *_ in pieces[1:]:
                    with open(path, "rb") as piece:
                        shutil.copyfileobj(piece, whole, 1 << 24)
                    os.unlink(path)
            shape = sum(count for _, count, *_ in pieces), *kinds[0][1]
            return FileRows.of_numbers(writer.path, np.dtype(kinds[0][0]), shape, writer.name)

        return self.first("rows", join)

    def gather(self, label: str, value: Any) -> list[Any]:
        """The value of each rank, in rank order. It must be representable in JSON."""
        return [value] if self._comm is None else self._comm.all_gather_object(value, label)

    def sum(self, label: str, counts: Tensor) -> Tensor:
        """The sum over all ranks."""
        return counts if self._comm is None else self._comm.all_reduce(counts.to(self._comm.device), "sum", label).cpu()

    def broadcast(self, label: str, values: Tensor) -> Tensor:
        """The values of rank 0. The others pass a tensor of the same shape and dtype."""
        if self._comm is None:
            return values
        return self._comm.broadcast(values.to(self._comm.device).contiguous(), 0, label).cpu()

    def to_first(self, label: str, array: Array) -> list[Array]:
        """The arrays of all ranks, in rank order, on rank 0; empty ones on the others."""
        return self.all_to_all(label, [array, *[array[:0]] * (self.size - 1)])

    def blocks(self, rows: Tensor | FileRows, count: int) -> Iterator[tuple[int, Tensor]]:
        """This rank's blocks of the rows of an array, as `file_rows.blocks`."""
        return blocks(rows, count, self.rank, self.size)

    def all_to_all(self, label: str, arrays: Sequence[Array]) -> list[Array]:
        """What each rank sent to this one: `arrays[r]` goes to rank r. They have one dtype, and any lengths."""
        if self._comm is None:
            return list(arrays)
        kind, device = arrays[0].dtype, self._comm.device
        rows = [torch.from_numpy(array.view(np.uint8).reshape(-1, kind.itemsize)).to(device) for array in arrays]
        return [found.cpu().numpy().view(kind).reshape(-1) for found in self._comm.all_to_all(rows, label)]

    def agree(self, label: str, facts: dict[str, Any]) -> None:
        """Return when all ranks have the same facts, which are representable in JSON."""
        for rank, others in enumerate(self.gather(label, facts)):
            for name, value in facts.items():
                if others[name] != value:
                    raise DivergenceError(
                        f"{label}: ranks disagree about {name}: {value!r} on rank {self.rank}, {others[name]!r} on "
                        f"rank {rank}. Every rank must pass the same arguments"
                    )
