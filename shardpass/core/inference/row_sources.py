"""Where deferred rows come from: a tensor in memory, a file, a number, or an operation on other rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import torch_private

ATEN = torch.ops.aten
SIZED = frozenset([ATEN.view, ATEN._unsafe_view, ATEN.reshape, ATEN.expand, ATEN._reshape_alias])
"""Operations among whose arguments the number of rows is a size. In others it is a number like any other."""
_BLOCK_BYTES = 1 << 20


class ChangedRowsError(Exception):
    """A tensor was written into in a way that deferred rows cannot follow. The model has to run without them."""


class HeldRows:
    """Rows of a tensor in memory, along dimension `dim`."""

    def __init__(self, tensor: Tensor, dim: int = 0) -> None:
        self.tensor, self.dim, self.count = tensor, dim, tensor.size(dim)
        self._seen = [(tensor, torch_private.version_of(tensor))]

    def block(self, start: int, stop: int, made: dict[Any, Tensor]) -> Tensor:
        """The rows from `start` to `stop`."""
        return self.whole().narrow(self.dim, start, stop - start)

    def whole(self) -> Tensor:
        """All rows."""
        if any(torch_private.version_of(tensor) != version for tensor, version in self._seen):
            raise ChangedRowsError("rows in memory were written into after others were made of them")
        return self.tensor

    def show(self, view: Tensor) -> None:
        """Note that a view of the tensor was given away, by which it may be written into."""
        self._seen.append((view, torch_private.version_of(view)))

    def refuse_views(self) -> None:
        """Raise if views were given away: they would not see what is written into the rows."""
        if len(self._seen) > 1:
            raise ChangedRowsError("rows were written into after a view of some of them was made")


class StoredRows:
    """Rows of a tensor in a file, along its first dimension. They are read, not mapped, and nothing keeps them.

    Args:
        path: the file.
        start: where the tensor begins, in bytes.
        like: its shape and dtype, without memory.
        device: where the rows are wanted.
    """

    dim = 0

    def __init__(self, path: Path, start: int, like: Tensor, device: torch.device) -> None:
        self.path, self.start, self.like, self.count, self._device = path, start, like, like.size(0), device
        # it stays open, since the file may be removed before whoever kept the rows is gone
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115

    def block(self, start: int, stop: int, made: dict[Any, Tensor]) -> Tensor:
        """The rows from `start` to `stop`."""
        found = torch.empty((stop - start, *self.like.shape[1:]), dtype=self.like.dtype)
        content: Any = found.view(-1).view(torch.uint8).numpy()
        raw = memoryview(content)
        self._file.seek(self.start + start * (found.nbytes // max(1, stop - start)))
        while len(raw):
            count = self._file.readinto(raw)
            if not count:
                raise OSError(f"{self.path} ends before its rows do: something has cut it while it was in use")
            raw = raw[count:]
        return found.to(self._device)

    def whole(self) -> Tensor:
        """All rows."""
        return self.block(0, self.count, {})


class FilledRows:
    """Rows of one number."""

    dim = 0

    def __init__(self, like: Tensor, value: Any, device: torch.device) -> None:
        self.like, self.count, self._value, self._device = like, like.size(0), value, device

    def block(self, start: int, stop: int, made: dict[Any, Tensor]) -> Tensor:
        """The rows from `start` to `stop`."""
        shape = (stop - start, *self.like.shape[1:])
        return torch.full(shape, self._value, dtype=self.like.dtype, device=self._device)

    def whole(self) -> Tensor:
        """All rows."""
        return self.block(0, self.count, {})


class ComputedRows:
    """Rows that an operation makes of others.

    Args:
        func: the operation.
        leaves, structure: its arguments, as `tree_flatten` gives them, with rows in the place of tensors of rows.
        number: which of the tensors that it returns.
        like: that tensor, without memory.
        dim: where it has its rows.
        count: how many.
    """

    def __init__(
        self, func: Any, leaves: Sequence[Any], structure: Any, number: int, like: Tensor, dim: int, count: int
    ) -> None:
        self.func, self.leaves, self.structure, self.number = func, leaves, structure, number
        self.like, self.dim, self.count = like, dim, count
        self._held: HeldRows | None = None

    def block(self, start: int, stop: int, made: dict[Any, Tensor]) -> Tensor:
        """The rows from `start` to `stop`. `made` has those that were made for this block already."""
        if self._held is not None:
            return self._held.block(start, stop, made)
        if self not in made:
            made[self] = self._made(start, stop, made)
        return made[self]

    def _made(self, start: int, stop: int, made: dict[Any, Tensor]) -> Tensor:
        leaves = [leaf.block(start, stop, made) if isinstance(leaf, _ROWS) else leaf for leaf in self.leaves]
        if self.func.overloadpacket in SIZED and leaves[1 + self.dim] == self.count:
            leaves[1 + self.dim] = stop - start  # the sizes follow the tensor; another may be as large by chance
        if torch_private.is_mutable(self.func):
            leaves[0] = leaves[0].clone()
        args, kwargs = torch_private.tree_unflatten(leaves, self.structure)
        out: Tensor = tensors_of(self.func(*args, **kwargs))[self.number]
        return out

    def whole(self) -> Tensor:
        """All rows, which are held from now on."""
        hold([self])
        assert self._held is not None
        return self._held.whole()

    def seen_in(self, memory: Tensor) -> Tensor:
        """What the operation, a view, makes of `memory`."""
        leaves = [memory if isinstance(leaf, _ROWS) else leaf for leaf in self.leaves]
        args, kwargs = torch_private.tree_unflatten(leaves, self.structure)
        out: Tensor = tensors_of(self.func(*args, **kwargs))[self.number]
        return out

    @property
    def held(self) -> HeldRows | None:
        """The rows in memory, if they are."""
        return self._held

    def keep(self, tensor: Tensor) -> None:
        """Hold `tensor`, which has all rows, and let go what they are made of."""
        self._held, self.leaves = HeldRows(tensor, self.dim), []


AnyRows = HeldRows | StoredRows | FilledRows | ComputedRows
_ROWS = (HeldRows, StoredRows, FilledRows, ComputedRows)


def hold(rows: Iterable[AnyRows]) -> None:
    """Put rows that have to be made into memory, those of one number of rows block by block together."""
    wanted = list(dict.fromkeys(one for one in rows if isinstance(one, ComputedRows) and one.held is None))
    for count in {one.count for one in wanted}:
        alike = [one for one in wanted if one.count == count]
        found: dict[ComputedRows, Tensor] = {}
        for start, stop in spans(count, [one.like for one in alike]):
            made: dict[Any, Tensor] = {}
            for one in alike:
                rows = one.block(start, stop, made)
                if one not in found:
                    shape, strides = one.like.shape, one.like.stride()
                    found[one] = torch.empty_strided(shape, strides, dtype=rows.dtype, device=rows.device)
                found[one].narrow(one.dim, start, stop - start).copy_(rows)
        for one in alike:
            one.keep(found[one])


def spans(count: int, like: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """The blocks of `count` rows of tensors like these, of about a megabyte of the widest."""
    width = max((one.numel() * one.itemsize for one in like), default=0) / max(1, count)
    step = max(1, int(_BLOCK_BYTES / max(1.0, width)))
    for start in range(0, count, step):
        yield start, min(count, start + step)


def held_rows(rows: AnyRows) -> HeldRows | None:
    """The rows in memory, if they are."""
    return rows.held if isinstance(rows, ComputedRows) else rows if isinstance(rows, HeldRows) else None


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what an operation returned."""
    return [leaf for leaf in torch_private.tree_leaves(value) if isinstance(leaf, Tensor)]
