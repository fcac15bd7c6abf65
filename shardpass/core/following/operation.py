"""What one primitive operation makes of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.joins import ATEN
from shardpass.core.following.judge import Verdict, verdict_of
from shardpass.core.following.origin import Origin
from shardpass.core.following.pointers import Pointers
from shardpass.core.following.refusals import ALL_ROWS, NO_VMAP, NUMBERS
from shardpass.core.following.rows import Rows, reshaped
from shardpass.core.following.user_line import is_called_by
from shardpass.core.ranks import RowSet, torch_private

_PICKS = frozenset([ATEN.index, ATEN.nonzero, ATEN.masked_select])
_LIKE = frozenset(getattr(ATEN, f"{name}_like") for name in "zeros ones full rand randn randint".split())
"""What makes other values of the same shape."""
_REAL_OR_COMPLEX = frozenset([ATEN.view_as_real, ATEN.view_as_complex])  # the last dimension comes or goes
_RESHAPES = frozenset([ATEN.view, ATEN._unsafe_view, ATEN._reshape_alias])
VIEWS_IN_PLACE = frozenset([ATEN.squeeze_, ATEN.unsqueeze_, ATEN.t_, ATEN.transpose_])
_FACTORIES = frozenset([ATEN.new_zeros, ATEN.new_ones, ATEN.new_full, ATEN.new_empty, ATEN.new_empty_strided])
_SCATTERS = frozenset(
    [
        ATEN.scatter_add, ATEN.scatter_add_, ATEN.index_add, ATEN.index_add_, ATEN.scatter_reduce, ATEN.scatter_reduce_,
        ATEN.scatter, ATEN.scatter_, ATEN.index_reduce, ATEN.index_reduce_,
        ATEN.index_copy, ATEN.index_copy_,
    ]
)  # fmt: skip
_ADDS = frozenset([ATEN.scatter_add, ATEN.index_add])
"""What adds to places in a new tensor."""
_GATHERS: dict[Any, Callable[..., tuple[int, Tensor]]] = {
    ATEN.index_select: lambda table, dim, index: (dim, index),
    ATEN.gather: lambda table, dim, index, *_: (dim, index),
    ATEN.embedding: lambda table, index, *_: (0, index),
}
"""What takes rows, and where its dimension and its index stand."""
_WRITES = dict.fromkeys(_SCATTERS, 3) | {
    ATEN.index_put: 2, ATEN.index_put_: 2, ATEN.masked_scatter: 2, ATEN.masked_scatter_: 2,
}  # fmt: skip
"""What writes values, and where they stand."""
_MASKED = frozenset([ATEN.masked_scatter, ATEN.masked_scatter_])
_KEEP_VALUES = frozenset(
    [ATEN.clone, ATEN._to_copy, ATEN.cat, ATEN.stack, ATEN.copy_, ATEN.repeat, ATEN.masked_select, ATEN.view]
)
"""Operations whose results are numbers of rows if their operands are."""


@dataclass(frozen=True)
class _Places:
    """What ``mask.nonzero()`` returns of a mask of several dimensions: numbers of rows in one of its columns."""

    of: RowSet
    column: int
    columns: int


SOFTMAX = "torch_geometric.utils._softmax"
"""It counts destinations up to the last with an edge, and returns a row per edge, which does not depend on that."""


def needs_values(func: Any) -> bool:
    """Whether an operation returns a number, or a tensor of a size, that depends on values."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func.overloadpacket is ATEN.is_nonzero or (
        not tags.isdisjoint(func.tags) and func.overloadpacket not in _PICKS
    )


class Operation(Pointers):
    """One primitive operation that has rows among its operands, after it ran. See `Primitive` for its arguments."""

    def follow(self) -> None:
        """Note where the results hold rows.

        Raises:
            RefusedError: a result has no rows, or rows that are made of several.
        """
        packet = self.packet
        if packet is ATEN.bincount and self._count():
            return None
        self._check_values()
        if packet in _REAL_OR_COMPLEX:
            return self._mark([self.first])
        if packet in _FACTORIES:
            return self._note_plain(Origin.ZEROS if packet is ATEN.new_zeros else Origin.CONSTANT)
        if packet is ATEN.empty_like:
            return self._mark([replace(self.first, points_to=None)])
        if packet is ATEN.index and self._index():
            return None
        if packet in _WRITES and len(self.args) > _WRITES[packet]:
            self._check_written(self.args[_WRITES[packet]])
        if packet in (ATEN.index_put, ATEN.index_put_) and self._put():
            return None
        if packet in (ATEN.nonzero, ATEN.masked_select):
            return self._select()
        if packet in _GATHERS and self._gather(*_GATHERS[packet](*self.args)):
            return None
        if packet in _SCATTERS and self._scatter(*self.args[:4]):
            return None
        if packet is ATEN.cat and self._join():
            return None
        if packet in _MASKED and self._put_masked():
            return None
        self._check_sets()
        if packet in _RESHAPES and isinstance(self.args[1], (list, tuple)):
            return self._mark([reshaped(self.first, self.leaves[0].shape, self.outs[0].shape)])
        if torch_private.is_view(self.func) or packet in VIEWS_IN_PLACE:
            return self._view()
        return self._try()

    def _check_written(self, values: Any) -> None:
        """Refuse numbers of rows as values."""
        rows = self._of(values) if isinstance(values, Tensor) else None
        if rows is not None and rows.points_to is not None:
            self._refuse("writes the numbers of rows, which are other numbers on every rank", remedy=NUMBERS)

    def _check_values(self) -> None:
        """Refuse what depends on the values of all rows."""
        if self.packet is ATEN.isin and self._of(self.args[1]) is not None:
            self._refuse("looks for values among all rows", self.rows_of(self.args[1]).of)
        if needs_values(self.func):
            self._refuse("needs the values of rows, as a branch on a tensor does")

    def _view(self) -> None:
        if self._part():
            return
        found = [one for one in self._verdict().found if isinstance(one, Rows)]
        if len(found) < len(self.outs) and self._stands_elsewhere():
            return self._view()
        if len(found) == len(self.outs):
            of = self.first.of
            self._mark([replace(one, of=of, points_to=self._seen(i)) for i, one in enumerate(found)])
        elif self.outs[0].dim() == 0 and is_called_by(torch_private.VMAP):
            self._refuse("is how vmap finds out the dtype of a row", remedy=NO_VMAP)
        else:
            self._refuse("takes some rows by their position", remedy=ALL_ROWS)

    def _stands_elsewhere(self) -> bool:
        """Whether the one row of a set may stand in a later dimension of size one: nothing else tells these apart."""
        position, rows = next(iter(self.rows.items()))
        operand = self.leaves[position]
        others = [dim for dim in range(rows.dim + 1, operand.dim()) if operand.size(dim) == 1]
        if rows.size != 1 or not others:
            return False
        self.first = self.rows[position] = replace(rows, dim=others[0])
        return True

    def _seen(self, place: int) -> RowSet | None:
        """The set whose numbers the view at `place` of the results holds, if any."""
        target = self.first.points_to
        if target is None or not isinstance(target.root, _Places) or self.outs[0].dim() > 1:
            return target
        taken = place if self.packet is ATEN.unbind else self.args[2] if self.packet is ATEN.select else None
        places = target.root
        return target if taken is None else places.of if taken % places.columns == places.column else None

    def _try(self) -> None:
        targets = {rows.points_to for rows in self.rows.values()}
        compares = self.packet in (ATEN.eq, ATEN.ne) and len(targets) == 1
        if targets != {None} and not compares and self.packet not in _KEEP_VALUES | _LIKE:
            if self.packet is ATEN.max and is_called_by(SOFTMAX):
                return self._note_plain()
            self._refuse("computes with the numbers of rows, which are other numbers on every rank", remedy=NUMBERS)
        for leaf in self.leaves:
            if isinstance(leaf, Tensor) and leaf.numel() == 1 and self.marks.origins.get(leaf) == Origin.NUMBERS:
                self._refuse("computes with one of the numbers of rows, which are other numbers on every rank")
        verdict = self._verdict()
        if verdict.reason:
            self._refuse(f"cannot be followed ({verdict.reason})")
        for position, dim in verdict.plain:
            if not (self.packet is ATEN.copy_ and position == 0):  # whose values do not matter
                self._check_plain(self.leaves[position], dim, self.first.of)
        points_to = self.first.points_to if self.packet in _KEEP_VALUES else None
        for one, out in zip(verdict.found, self.outs):
            if one is None:
                self.marks.forget(out)
                self.marks.origins[out] = Origin.CONSTANT
            elif isinstance(one, Rows):
                self._mark([replace(one, of=self.first.of, points_to=points_to)], [out])
            else:
                self._mark([one], [out])

    def _verdict(self) -> Verdict:
        """What the operation makes of rows. It is known for operands of these shapes, or found out."""
        lengths = tuple(len(arg) for arg in self.args if isinstance(arg, (list, tuple)))
        is_of_script = self.marks.is_around
        key = (self.func, lengths, is_of_script, *(self._described(i, leaf) for i, leaf in enumerate(self.leaves)))
        if key not in self.marks.verdicts:
            self.marks.verdicts[key] = verdict_of(
                self.func, self.leaves, self.structure, self.rows, self.outs, self._is_zero, is_of_script
            )
        found: Verdict = self.marks.verdicts[key]
        return found

    def _described(self, position: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        rows = self.rows.get(position)
        return tuple(leaf.shape), leaf.dtype, rows and (rows.dim, rows.outer, rows.inner), self._is_zero(leaf)

    def _is_zero(self, leaf: Tensor) -> bool:
        if self.marks.is_around and self.packet in _ADDS:  # how a script has made it is not known
            return leaf is self.leaves[0] and not leaf.requires_grad and not bool(leaf.any())
        return self.marks.origins.get(leaf) == Origin.ZEROS

    def _index(self) -> bool:
        """``table[index]`` along rows: by a mask, or by numbers that point to rows. Whether it was that."""
        table, indices = self.args
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        (first, one), rows = given[0], self._of(table)
        if one.dtype in (torch.bool, torch.uint8) and (len(given) == 1 or one.dim() > 1 or self._of(one) is None):
            mask = self._of(one)
            if len(given) > 1 or (mask is None and (rows is None or not first <= rows.dim < first + one.dim())):
                return False
            if rows is not None and mask is None:
                mask = self._plain(one, replace(rows, dim=rows.dim - first))
            elif mask is not None and rows is None:
                rows = self._plain(table, replace(mask, dim=first + mask.dim))
            assert rows is not None and mask is not None
            self._check_sets()
            picked = self.marks.selection(one, mask.of, self.outs[0].size(first))
            self._mark([Rows(first, picked, points_to=rows.points_to)])
            return True
        given = self._with_pointers(given)
        adjacent = all(b == a + 1 for (a, _), (b, _) in pairwise(given))
        start, width = first if adjacent else 0, max(index.dim() for _, index in given)
        for dim, index in given:
            if rows is not None and rows.dim == dim:
                pointer = self._pointer(index, rows)
                self._check_beside(pointer, index.dim(), [other for _, other in given if other is not index])
                out = start + width - index.dim() + pointer.dim
                self._mark([Rows(out, pointer.of, points_to=rows.points_to)])
                return True
            if self._is_looked_up(table, dim, index):
                self._mark([Rows(start + width - index.dim() + self.rows_of(index).dim, self.rows_of(index).of)])
                return True
        return False

    def _count(self) -> bool:
        """``torch.bincount`` of what points to rows, with an entry for each of them. Whether it was that."""
        index, weights, fewest = (*self.args, None, 0)[:3]
        found = self._of(index)
        if found is None or found.points_to is None:
            return False
        if fewest != found.points_to.count:
            self._refuse("without minlength=num_nodes has an entry up to the last row that is counted")
        return self._scatter(self.outs[0].new_zeros(fewest), 0, index, weights)

    def _gather(self, dim: int, index: Tensor) -> bool:
        """``index_select``, ``gather`` or ``embedding`` along rows. Whether it was that."""
        table = self.args[0]
        dim, rows = dim % max(1, table.dim()), self._of(table)
        if rows is None or rows.dim != dim:
            if self._is_looked_up(table, dim, index):
                found = self.rows_of(index)
                self._mark([Rows(dim if self.packet is ATEN.index_select else found.dim, found.of)])
                return True
            return False
        pointer = self._pointer(index, rows)
        out = dim if self.packet is ATEN.index_select else pointer.dim
        if out != dim and self.packet is not ATEN.embedding:
            self._refuse("takes rows by numbers that differ from row to row")
        self._mark([Rows(out, pointer.of, points_to=rows.points_to)])
        return True

    def _scatter(self, base: Tensor, dim: int, index: Tensor, source: Any) -> bool:
        """A scatter onto rows, by numbers that point to them. Whether it was that."""
        pointer, rows = self._of(index), self._of(base)
        dim = dim % max(1, base.dim())
        if pointer is None or pointer.points_to is None:
            return False
        target = pointer.points_to
        if self.in_pieces and pointer.of.picked_from != target.count:
            self._refuse("scatters by destination in a way that the engine does not see", target)
        if base.size(dim) < target.count and is_called_by(SOFTMAX):
            target = RowSet(f"{target.name} up to the last with an edge", base.size(dim), ("reached", target.root))
        if base.size(dim) != target.count or (rows is not None and not (rows.dim == dim and rows.of.goes_with(target))):
            self._refuse(f"scatters by the numbers of rows onto a tensor of shape {[*base.shape]}", target, NUMBERS)
        if rows is None:
            self._check_plain(base, dim, target)
        given = self._of(source) if isinstance(source, Tensor) else None
        if given is not None and not given.of.goes_with(pointer.of):
            self._refuse(f"puts rows of {pointer.of.name} beside rows of {given.of.name}")
        if isinstance(source, Tensor) and given is None and source.dim() > pointer.dim and source.size(pointer.dim) > 1:
            self._check_plain(source, pointer.dim, pointer.of)
        self._mark([Rows(dim, target)])
        return True

    def _put(self) -> bool:
        """``base[index] = values`` along rows, by a mask or by numbers that point to them. Whether it was that."""
        base, indices, values = self.args[:3]
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        given = self._with_pointers(given) if len(given) > 1 else given
        (dim, index), rows, where = given[0], self._of(base), self._of(given[0][1])
        if len(given) > 1 and self._put_in_each(given, values):
            return True
        if len(given) > 1 or where is None:
            if rows is not None and rows.dim == dim and index.dtype == torch.int64:
                self._refuse("writes rows by numbers that do not come from the graph", rows.of, NUMBERS)
            return False
        is_mask = index.dtype in (torch.bool, torch.uint8)
        if not is_mask:
            return self._scatter(base, dim, index, values)
        rows = rows or self._plain(base, replace(where, dim=dim + where.dim))
        if not rows.of.goes_with(where.of) or rows.dim != dim + where.dim:
            self._refuse(f"puts rows of {rows.of.name} beside rows of {where.of.name}")
        put = self._of(values)
        if put is not None and put.of != self.marks.selection(index, where.of, put.of.count):
            self._refuse(f"puts rows of {put.of.name} where another mask picks rows")
        self._mark([rows])
        return True

    def _put_in_each(self, given: list[tuple[int, Tensor]], values: Tensor) -> bool:
        """``base[torch.arange(n)[:, None], columns] = values``, in each row at its own columns. Whether it was that."""
        base, put = self.args[0], self._of(values)
        for dim, index in given:
            others = [other for _, other in given if other is not index]
            of = next((self.rows_of(one).of for one in (base, *others) if self._of(one) is not None), self.first.of)
            where = self._of(index)
            target = None if where is None else where.points_to
            picked = where is not None and target is not None and where.of.picked_from == target.count
            rows = self._of(base) or Rows(dim, target if picked and target is not None else of)
            fits = rows.dim == dim and rows.fit(base) and index.dtype == torch.int64
            if fits and (picked or index.numel() == of.count):
                pointer = self._pointer(index, rows)
                self._check_beside(pointer, index.dim(), others)
                if values.numel() > 1 and (put is None or not put.of.goes_with(pointer.of)):
                    self._refuse(f"puts values of shape {[*values.shape]} that are no rows")
                self._mark([self._plain(base, rows) if self._of(base) is None else rows])
                return True
        return False

    def _put_masked(self) -> bool:
        """``base.masked_scatter(mask, values)`` with what the same mask picks. Whether it was that."""
        base, mask, values = self.args
        where, put = self._of(mask), self._of(values)
        if where is None or put is None or put.of.picked_from is None or base.shape != self.outs[0].shape:
            return False
        rows = self._of(base) or self._plain(base, replace(where, dim=where.dim + base.dim() - mask.dim()))
        mask = mask.expand(base.shape)
        each = mask.movedim(rows.dim, 0).unsqueeze(-1).flatten(1)
        masks = [mask] if values.dim() == 1 else []
        in_order = rows.dim == put.dim == 0 and values.numel() == put.of.count * each.size(1)
        if in_order and each.size(1) and bool((each == each[:, :1]).all()):
            masks.append(each[:, 0])
        same = any(put.of == self.marks.selection(one, where.of, put.of.count) for one in masks)
        if not rows.of.goes_with(where.of) or not same:
            self._refuse(f"puts rows of {put.of.name} where another mask picks rows")
        self._mark([rows])
        return True

    def _select(self) -> None:
        """The places or values that a mask picks."""
        self._check_sets()
        mask = self.args[-1]
        rows = self._of(mask)
        if rows is None:
            self._refuse("picks entries of single rows")
        picked = self.marks.selection(mask, rows.of, self.outs[0].size(0))
        points_to = rows.of if self.packet is ATEN.nonzero else None
        if points_to is not None and mask.dim() > 1:  # a column of it has the numbers of rows, see `_seen`
            points_to = RowSet(f"places among {rows.of.name}", -1, _Places(rows.of, rows.dim, mask.dim()))
        self._mark([Rows(0, picked, points_to=points_to)])
