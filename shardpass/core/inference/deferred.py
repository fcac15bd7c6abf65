"""Tensors of rows that are computed block by block, when they are needed: what a model computes between its calls.

[Note: what is deferred]
Between two sharded calls a model computes row by row. A `DeferredRows` has the shape and dtype of a tensor but no
memory; it knows the operation that makes it and what that takes. An operation on it is deferred too if `verdict_of`
finds that it treats rows one by one. Any other operation is given the rows themselves, all of them, and runs as it
would have. So nothing is refused here and no result changes; what differs is how many tensors of full height there are.

Rows are made a block at a time, through all deferred operations at once: into the tensor that a sharded call reads, or
into a file. Results of calls are in files (`StoredRows`). So a rank holds the rows that a call reads, those it makes,
and a block.

A tensor that is changed in place becomes what the change makes of it. Its views follow, since a view is kept as a
function of the tensor that it is a view of. What was computed from the tensor before keeps what it took.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following import Rows, draws, verdict_of
from shardpass.core.inference.row_sources import (
    SIZED,
    AnyRows,
    ChangedRowsError,
    ComputedRows,
    FilledRows,
    HeldRows,
    StoredRows,
    held_rows,
    hold,
    tensors_of,
)
from shardpass.core.ranks import RowSet, places_in, read_header, torch_private


class Deferral:
    """Defers what one run of a model computes of rows. It remembers which operations treat rows one by one."""

    def __init__(self) -> None:
        self._verdicts: dict[Any, tuple[list[int | None], dict[int, int]] | None] = {}

    def of(self, rows: AnyRows, like: Tensor, device: torch.device) -> DeferredRows:
        """The stand-in for `rows`, which make a tensor like `like`."""
        out: DeferredRows = torch_private.without_memory(DeferredRows, like, device)
        out.deferral, out.seen_from, out._own, out._under = self, None, rows, None
        return out

    def held(self, tensor: Tensor) -> Tensor:
        """The stand-in for a tensor in memory; the tensor itself if it has fewer than two rows."""
        if tensor.dim() == 0 or tensor.size(0) < 2:
            return tensor
        return self.of(HeldRows(tensor), _without_memory(tensor), tensor.device)

    def filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What ``func(*args, **kwargs)`` returns: a new tensor of zeros, ones or a number, as of `Tensor.new_full`."""
        value = {"new_zeros": 0, "new_ones": 1}.get(func.__name__)
        if value is None:
            value = kwargs["fill_value"] if "fill_value" in kwargs else args[2]
        rest = {name: one for name, one in kwargs.items() if name != "device"}
        like = func(_without_memory(args[0]), *args[1:], **rest)
        if like.dim() == 0 or like.size(0) < 2 or kwargs.get("device") is not None:
            out: Tensor = func(*args, **kwargs)
            return out
        return self.of(FilledRows(like, value, args[0].device), like, args[0].device)

    def stored(self, path: Path, device: torch.device) -> dict[str, Tensor]:
        """The stand-ins for the tensors of a file that `write_verified` wrote, or the tensors if they have few rows."""
        found: dict[str, Tensor] = {}
        with open(path, "rb") as file:
            places = places_in(read_header(file))
        for name, (info, start) in places.items():
            like = torch.empty(info.shape, dtype=info.dtype, device="meta")
            rows = StoredRows(path, start, like.view(-1) if like.dim() == 0 else like, device)
            few = like.dim() == 0 or like.size(0) < 2
            found[name] = rows.whole().view(like.shape) if few else self.of(rows, like, device)
        return found

    def results(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        """What the operation returns, as stand-ins; `None` if it must be given the rows themselves."""
        given = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, DeferredRows)}
        counts, devices = {leaf.rows.count for leaf in given.values()}, {leaf.device for leaf in given.values()}
        devices |= {leaf for leaf in leaves if isinstance(leaf, torch.device)}
        count = min(counts)
        as_number = any(type(leaf) is int and leaf == count for leaf in leaves) and func.overloadpacket not in SIZED
        if len(counts) > 1 or len(devices) > 1 or count < 2 or as_number or draws(func):
            return None
        verdict = self._verdict(func, leaves, structure, {i: leaf.rows.dim for i, leaf in given.items()}, count)
        if verdict is None:
            return None
        dims, plain = verdict
        args, kwargs = torch_private.tree_unflatten([_without_memory(leaf) for leaf in leaves], structure)
        like, whole_structure = torch_private.tree_flatten(func(*args, **kwargs))
        if len(like) != len(dims) or any(dim is not None and one.size(dim) != count for one, dim in zip(like, dims)):
            return None
        held = [HeldRows(leaf, plain[i]) if i in plain else leaf for i, leaf in enumerate(leaves)]
        first = next(iter(given.values()))
        outs: list[Tensor] = []
        for number, (one, dim) in enumerate(zip(like, dims)):
            if dim is None:
                beside = _made(func, held, structure, number, one, 0, count).block(0, 1, {})
                if beside.numel():
                    return None
                outs.append(beside)  # nothing, as a batch norm in evaluation mode returns beside its rows
                continue
            make = partial(_made, func, held, structure, number, one, dim, count)
            out = self.of(make(), one, devices.copy().pop())
            if torch_private.is_view(func):
                out.seen_from, out.view_of, out._under = first, make, first.rows
            outs.append(out)
        return torch_private.tree_unflatten(outs, whole_structure)

    def _verdict(
        self, func: Any, leaves: list[Any], structure: Any, dims: dict[int, int], count: int
    ) -> tuple[list[int | None], dict[int, int]] | None:
        """Where the results have their rows, and operands in memory theirs; `None` if rows are not treated one by one.

        An operand in memory with as many rows counts as one with rows, unless the operation takes no such.
        """
        key = (func, str(structure), *(_described(leaf, dims.get(i)) for i, leaf in enumerate(leaves)))
        if key not in self._verdicts:
            self._verdicts[key] = _verdict(func, leaves, structure, dims, RowSet("rows", count, None))
        return self._verdicts[key]


class DeferredRows(Tensor):
    """A stand-in for a tensor of rows that are not in memory. See the note above.

    Attributes:
        seen_from: the tensor of which this is a view, or `None`.
        view_of: what makes the rows of the view, of those of that tensor.
    """

    deferral: Deferral
    seen_from: DeferredRows | None
    view_of: Callable[[AnyRows], ComputedRows]
    _own: AnyRows
    _under: AnyRows | None

    __torch_function__ = torch_private.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @property
    def rows(self) -> AnyRows:
        """What makes the rows now."""
        if self.seen_from is not None and self._under is not (under := self.seen_from.rows):
            self._under, self._own = under, self.view_of(under)
        return self._own

    def write(self, func: Any, leaves: list[Any], structure: Any) -> None:
        """Carry out an operation that writes into this tensor, its first argument."""
        if (held := held_rows(self.rows)) is not None:
            held.refuse_views()
        found = None if self.seen_from is not None else self.deferral.results(func, leaves, structure)
        if found is not None:
            self._own = found.rows
            return
        first = self
        while first.seen_from is not None:
            first = first.seen_from
        if (held := held_rows(first.rows)) is not None:
            held.refuse_views()
        memory, others = first.rows.whole().clone(), [whole(leaf) for leaf in leaves[1:]]
        args, kwargs = torch_private.tree_unflatten([self._in(memory), *others], structure)
        func(*args, **kwargs)
        first._own = HeldRows(memory, first.rows.dim)

    def _in(self, memory: Tensor) -> Tensor:
        """This tensor, where `memory` takes the place of the one that it is a view of."""
        if self.seen_from is None:
            return memory
        return self.view_of(self.seen_from.rows).seen_in(self.seen_from._in(memory))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        leaves, structure = torch_private.tree_flatten((args, kwargs or {}))
        written = torch_private.written_arguments(func, args, kwargs or {})
        if list(written) == [0] and isinstance(args[0], DeferredRows):
            args[0].write(func, leaves, structure)
            return args[0]
        if any(isinstance(leaf, DeferredRows) for leaf in torch_private.tree_leaves(written)):
            raise ChangedRowsError(f"{func} writes into several tensors, or into an `out`")
        some = next(leaf for leaf in leaves if isinstance(leaf, DeferredRows))
        found = None if written else some.deferral.results(func, leaves, structure)
        if found is not None:
            return found
        args, kwargs = torch_private.tree_unflatten([whole(leaf) for leaf in leaves], structure)
        out = func(*args, **kwargs)
        if torch_private.is_view(func) and (held := held_rows(some.rows)) is not None:
            for view in tensors_of(out):
                held.show(view)
        return out

    def numpy(self, **options: Any) -> Any:
        """The rows themselves, as numpy has them."""
        return whole(self).numpy(**options)

    def tolist(self) -> Any:
        """The rows themselves, as a list."""
        return whole(self).tolist()

    def __array__(self, *args: Any) -> Any:
        return whole(self).__array__(*args)

    def data_ptr(self) -> int:
        """Where the rows themselves are."""
        return whole(self).data_ptr()


def whole(value: Any) -> Any:
    """`value`, or the rows themselves if it is a stand-in for some."""
    return value.rows.whole() if isinstance(value, DeferredRows) else value


def in_memory(*sides: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """The tensors in `sides` with the rows themselves, those that have to be made block by block together."""
    hold(leaf.rows for side in sides for leaf in side.values() if isinstance(leaf, DeferredRows))
    read: dict[int, Tensor] = {}  # a tensor that is there under two names is one tensor
    return tuple({name: read.setdefault(id(leaf), whole(leaf)) for name, leaf in side.items()} for side in sides)


def block_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The rows from `start` to `stop` of a tensor, along its first dimension."""
    if isinstance(tensor, DeferredRows) and tensor.rows.dim == 0:
        return tensor.rows.block(start, stop, {})
    found: Tensor = whole(tensor)[start:stop]
    return found


def _made(
    func: Any, leaves: list[Any], structure: Any, number: int, like: Tensor, dim: int, count: int,
    under: AnyRows | None = None,
) -> ComputedRows:  # fmt: skip
    """The rows that an operation makes; `under` takes the place of those of the tensor that it is a view of."""
    rows = [(under or leaf.rows) if isinstance(leaf, DeferredRows) else leaf for leaf in leaves]
    return ComputedRows(func, rows, structure, number, like, dim, count)


def _verdict(
    func: Any, leaves: list[Any], structure: Any, dims: dict[int, int], of: RowSet
) -> tuple[list[int | None], dict[int, int]] | None:
    """See `Deferral._verdict`."""
    meta = [_without_memory(leaf) for leaf in leaves]
    args, kwargs = torch_private.tree_unflatten(meta, structure)
    try:
        made = func(*args, **kwargs)
    except RuntimeError:  # the shape depends on values
        return None
    outs = [out for out in torch_private.tree_leaves(made) if isinstance(out, Tensor)]
    verdict = verdict_of(func, meta, structure, {i: Rows(dim, of) for i, dim in dims.items()}, outs)
    plain = dict(verdict.plain)
    fits = all(meta[i].size(dim) == of.count for i, dim in plain.items())
    found = [one for one in verdict.found if one is not None]
    if not found or not fits or not all(isinstance(one, Rows) and one.outer == one.inner == 1 for one in found):
        return None
    return [one.dim if isinstance(one, Rows) else None for one in verdict.found], plain


def _without_memory(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _described(leaf: Any, dim: int | None) -> Any:
    return (tuple(leaf.shape), leaf.dtype, dim) if isinstance(leaf, Tensor) else repr(leaf)
