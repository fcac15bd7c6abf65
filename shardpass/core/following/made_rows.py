"""Rows that a model makes with a size: a tensor, or a broadcast, with an entry for each of this rank's rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardpass.core.following.follow import FollowRows
from shardpass.core.following.origin import Origin
from shardpass.core.following.own_numbers import is_own_number
from shardpass.core.following.refusals import ALL_ROWS, refusal
from shardpass.core.following.row_count import RowCount
from shardpass.core.following.rows import Rows, reshaped_at
from shardpass.core.ranks import RowSet

_MAKES = frozenset("zeros ones full empty rand randn randint eye normal".split())
_MAKES_LIKE = frozenset("new_zeros new_ones new_full new_empty".split())
_SPREADS = frozenset("expand broadcast_to repeat tile repeat_interleave".split())
"""Functions of a tensor and of sizes, or of how often it is repeated."""
RESHAPES = frozenset("view reshape unflatten view_as reshape_as".split())
_PAIRS = frozenset(["meshgrid", "cartesian_prod", "broadcast_tensors"])
"""Functions that put each entry of a tensor beside each of another."""


class MadeRows:
    """Marks what a model makes with the number of own rows as a size, in one dimension. In two it is refused.

    Each of its rows has the same values, or random ones, so it goes with the rows. But the number of its entries is
    another one on every rank, so a sum over them is one over rows.

    Args:
        follower: knows which tensors hold rows.
    """

    def __init__(self, follower: FollowRows) -> None:
        self.follower = follower

    def sizes(self, name: str, args: Any, kwargs: Any) -> list[Any]:
        """The sizes among the arguments of a function; empty if it makes no rows."""
        if name in ("expand_as", "view_as", "reshape_as") and len(args) > 1 and isinstance(args[1], Tensor):
            rows = self.follower.marks.rows_of(args[1])
            return [] if rows is None else [self._count(size, dim, rows) for dim, size in enumerate(args[1].shape)]
        if name not in _MAKES | _MAKES_LIKE | _SPREADS | RESHAPES:
            return []
        given = [
            *args[2 if name == "unflatten" else name not in _MAKES :],
            *(kwargs[key] for key in ("size", "n", "repeats", "dims", "shape", "sizes") if key in kwargs),
        ]
        sizes = next((one for one in given if isinstance(one, (tuple, list))), None)
        if sizes is None:
            sizes = given * 2 if name == "eye" else given
        is_said = name in RESHAPES or any(isinstance(size, RowCount) for size in sizes)
        return [*sizes] if is_said else [self._known(size) for size in sizes]

    def note_reshaped(self, name: str, args: Any, kwargs: Any, sizes: Sequence[Any], out: Tensor) -> None:
        """Mark what a reshape returned. The number of rows among its sizes, or a -1, says where the rows are.

        Raises:
            RefusedError: no size is theirs, or the reshape does not keep the entries of each row together.
        """
        table, rows = args[0], self.follower.marks.rows_of(args[0])
        if rows is None:
            return
        shift, told = 0, self.follower.marks.made_of_counts
        if name == "unflatten":
            dim = (args[1] if len(args) > 1 else kwargs["dim"]) % table.dim()
            if dim != rows.dim:
                moved = rows.dim + (len(sizes) - 1 if dim < rows.dim else 0)
                return self.follower.marks.mark(out, replace(rows, dim=moved))
            shift = dim
        at = [dim for dim, size in enumerate(sizes) if isinstance(size, RowCount) or is_own_number(size)]
        is_whole = rows.of.count == rows.of.total  # `len` has told the number of all rows
        is_told = is_whole or rows.of.count in told
        at = at or [dim for dim, size in enumerate(sizes) if size == -1 or (is_told and size == rows.of.count)]
        at = at or [dim for dim, size in enumerate(sizes) if size == rows.of.count]  # as code outside has told it
        found = [reshaped_at(rows, table.shape, out.shape, dim + shift) for dim in at]
        fits = [one for one in found if one is not None]
        if not fits:
            raise refusal(f"`{name}` to {[*out.shape]} does not keep apart the {rows.of.name}", ALL_ROWS)
        self.follower.marks.mark(out, next((one for one in fits if one.dim == rows.dim), fits[0]))

    def note(self, name: str, args: Any, kwargs: Any, sizes: list[Any], out: Any) -> None:
        """Mark what a function returned that was given these sizes.

        Raises:
            RefusedError: it has an entry for each pair of rows, or what was made of several rows for each row.
        """
        if name in _PAIRS:
            return self._note_pairs(name, [one for one in (*args, *kwargs.values()) for one in _flat(one)], out)
        counts = [(dim, size) for dim, size in enumerate(sizes) if isinstance(size, RowCount)]
        table = args[0] if name in _SPREADS | {"expand_as"} else None
        if name in ("expand", "expand_as", "broadcast_to"):  # where it had as many entries before, they are no rows
            new = [dim for dim in range(len(sizes)) if (*[1] * len(sizes), *args[0].shape)[dim + args[0].dim()] == 1]
            counts = [(dim, size) for dim, size in counts if dim in new]
        if not counts or type(out) is not Tensor:  # stand-ins tell themselves
            return None
        found = self.follower.marks.rows_of(out)
        of, given = counts[0][1].of, None if table is None else self.follower.marks.rows_of(table)
        repeats = name in ("repeat", "tile", "repeat_interleave")
        dims = {dim for dim, _ in counts} | ({found.dim} if found is not None else set())
        if len(dims) > 1 or (repeats and given is not None):
            self._refuse(name, of)
        dim, count = counts[0]
        if found is not None or count.own != of.count:
            return None
        if name == "repeat_interleave":
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) or 0
        elif repeats:
            dim += out.dim() - len(sizes)
        elif table is not None and (before := dim - out.dim() + table.dim()) > -1 and table.size(before) != 1:
            return None  # it had as many entries before
        if self.follower.draws is not None and self.follower.marks.origins.get(out) == Origin.SEEDED:
            self.follower.draws.refuse_seeded(of.name)
        self.follower.marks.check_result(out)  # repeats what was made of several rows, which `mark` would forget
        each = out.size(dim) // of.count if of.count else 1
        outer, inner = (each, 1) if name == "repeat_interleave" else (1, each)
        self.follower.mark(out, of, dim)
        self.follower.marks.mark(out, Rows(dim % out.dim(), of, outer, inner))
        return None

    def _note_pairs(self, name: str, given: list[Any], out: Any) -> None:
        tensors = [one for one in given if isinstance(one, Tensor)]
        found = [(one, rows) for one in tensors if (rows := self.follower.marks.rows_of(one)) is not None]
        dims = {rows.dim - one.dim() for one, rows in found}
        if len(found) > 1 and (name != "broadcast_tensors" or len(dims) > 1):
            self._refuse(name, found[0][1].of)
        for one in out if name == "broadcast_tensors" and found else ():
            if self.follower.marks.rows_of(one) is None:
                self.follower.marks.check_result(one)
                self.follower.mark(one, found[0][1].of, min(dims))

    def _known(self, size: Any) -> Any:
        """A size, as the number of rows that it is where ``len`` gave it away."""
        marks = self.follower.marks
        if type(size) is not int or size < 2 or size not in marks.made_of_counts:
            return size
        return next((RowCount(size, known) for known in marks.known if known.count == size), size)

    @staticmethod
    def _count(size: int, dim: int, rows: Rows) -> Any:
        return RowCount(size, rows.of) if dim == rows.dim and size == rows.of.count else size

    def _refuse(self, name: str, of: RowSet) -> None:
        raise refusal(f"`{name}` makes an entry for each pair of the {of.name}")


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)
