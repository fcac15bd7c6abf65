"""What one primitive operation makes of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, product
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardpass.core.following.marks import Marks
from shardpass.core.following.origin import Origin
from shardpass.core.following.refusals import NUMBERS, Mixture, check_plain, refusal
from shardpass.core.following.rows import Rows, reshaped, viewed
from shardpass.core.following.trial import try_rows
from shardpass.core.following.user_line import is_called_by, user_line
from shardpass.core.ranks import RowSet, torch_private
from shardpass.errors import RefusedError

ATEN = torch.ops.aten
_PICKS = frozenset([ATEN.index, ATEN.nonzero, ATEN.masked_select])
_REAL_OR_COMPLEX = frozenset([ATEN.view_as_real, ATEN.view_as_complex])  # the last dimension comes or goes
_RESHAPES = frozenset([ATEN.view, ATEN._unsafe_view, ATEN._reshape_alias])
_FACTORIES = frozenset([ATEN.new_zeros, ATEN.new_ones, ATEN.new_full, ATEN.new_empty, ATEN.new_empty_strided])
_SCATTERS = frozenset(
    [
        ATEN.scatter_add, ATEN.scatter_add_, ATEN.index_add, ATEN.index_add_, ATEN.scatter_reduce, ATEN.scatter_reduce_,
        ATEN.scatter, ATEN.scatter_, ATEN.index_reduce, ATEN.index_reduce_,
    ]
)  # fmt: skip
_KEEP_VALUES = frozenset(
    [ATEN.clone, ATEN._to_copy, ATEN.cat, ATEN.stack, ATEN.copy_, ATEN.repeat, ATEN.masked_select, ATEN.view]
)
"""Operations whose results are numbers of rows if their operands are."""

_SOFTMAX = "torch_geometric.utils._softmax"
"""It counts destinations up to the last with an edge, and returns a row per edge, which does not depend on that."""


def needs_values(func: Any) -> bool:
    """Whether an operation returns a number, or a tensor of a size, that depends on values."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func.overloadpacket is ATEN.is_nonzero or (
        not tags.isdisjoint(func.tags) and func.overloadpacket not in _PICKS
    )


def _is_every_row(index: Tensor, count: int) -> bool:
    """Whether an index takes all rows in their order, as ``torch.arange`` does."""
    return index.numel() == count and bool((index.flatten() == torch.arange(count, device=index.device)).all())


class Operation:
    """One primitive operation that has rows among its operands, after it ran.

    Args:
        marks: what is known of tensors, and is told of the results.
        func: the operation.
        leaves, structure: its arguments, as `tree_flatten` gives them for ``(args, kwargs)``.
        rows: where the leaves hold rows, by position.
        outs: the tensors that it returned.
        before: copies of operands without rows, from before it wrote into them, by id.
        in_pieces: only some in-edges of a node are here.
    """

    def __init__(
        self, marks: Marks, func: Any, leaves: list[Any], structure: Any, rows: dict[int, Rows], outs: list[Tensor],
        before: dict[int, Tensor], in_pieces: bool,
    ) -> None:  # fmt: skip
        self.marks, self.func, self.leaves, self.structure = marks, func, leaves, structure
        self.rows, self.outs, self.before, self.in_pieces = rows, outs, before, in_pieces
        self.packet = func.overloadpacket
        self.name = self.packet.__name__.strip("_")
        self.args: tuple[Any, ...] = torch_private.tree_unflatten(leaves, structure)[0]
        self.first = next(iter(rows.values()))

    def follow(self) -> None:
        """Note where the results hold rows.

        Raises:
            RefusedError: a result has no rows, or rows that are made of several.
        """
        try:
            self._follow()
        except RefusedError:
            if not self.shows_little:
                raise
            self._note_plain()

    @property
    def shows_little(self) -> bool:
        """Whether this rank has no rows or one, which are not told from dimensions of that size: others will judge."""
        return not any(rows.of.judges for rows in self.rows.values())

    def _follow(self) -> None:
        packet = self.packet
        if packet is ATEN.bincount and self._count():
            return None
        if needs_values(self.func):
            self._refuse("needs the values of rows, as a branch on a tensor does")
        if packet in (ATEN.view_as_real, ATEN.view_as_complex):
            return self._mark([self.first])
        if packet in _FACTORIES:
            return self._note_plain()
        if packet is ATEN.empty_like:
            return self._mark([replace(self.first, points_to=None)])
        if packet is ATEN.index and self._index():
            return None
        if packet in (ATEN.index_put, ATEN.index_put_) and self._put():
            return None
        if packet in (ATEN.nonzero, ATEN.masked_select):
            return self._select()
        if packet in (ATEN.index_select, ATEN.gather) and self._gather(self.args[1], self.args[2]):
            return None
        if packet in _SCATTERS and self._scatter(*self.args[:4]):
            return None
        if packet is ATEN.embedding and self._gather(0, self.args[1]):
            return None
        if packet is ATEN.cat and self._join():
            return None
        self._check_sets()
        if packet in _RESHAPES and isinstance(self.args[1], (list, tuple)):
            return self._mark([reshaped(self.first, self.leaves[0].shape, self.outs[0].shape)])
        if packet in _REAL_OR_COMPLEX:
            return self._mark([self.first])
        if torch_private.is_view(self.func):
            return self._view()
        return self._try()

    def _of(self, value: Any) -> Rows | None:
        """Where an operand holds rows."""
        return next((self.rows[i] for i, leaf in enumerate(self.leaves) if leaf is value and i in self.rows), None)

    def _note_plain(self) -> None:
        for out in self.outs:
            self.marks.origins[out] = Origin.CONSTANT

    def _mark(self, found: list[Rows | None]) -> None:
        for out, rows in zip(self.outs, found):
            if rows is None or not rows.fit(out):
                self.marks.forget(out)
                if self.shows_little:
                    self.marks.origins[out] = Origin.CONSTANT
                    continue
                self.marks.mixtures.add(out, Mixture(self.name, user_line(), self.first.of))
                continue
            self.marks.mark(out, rows)
            base = torch_private.base_of(out)
            if base is not out and base not in self.marks.rows:  # made without rows, and a view was written into
                alike = [d for d in range(base.dim()) if base.stride(d) == out.stride(rows.dim)]
                if alike and base.size(alike[0]) == rows.size:
                    self.marks.mark(base, replace(rows, dim=alike[0]))

    def _check_sets(self) -> None:
        sets = [rows.of for rows in self.rows.values()]
        known = next((one for one in sets if one.root is not None), sets[0])
        for one in sets:
            if not one.goes_with(known):
                self._refuse(f"puts rows of {known.name} beside rows of {one.name}")
        self.first = replace(self.first, of=known)

    def _view(self) -> None:
        position = next(iter(self.rows))

        def view(numbers: Tensor) -> Any:
            leaves = [*self.leaves]
            leaves[position] = numbers
            args, kwargs = torch_private.tree_unflatten(leaves, self.structure)
            return self.func(*args, **kwargs)

        try:
            found = viewed(self.first, self.leaves[position], view)
        except RuntimeError:  # a size among the arguments that one made-up row more does not fit
            found = [None for _ in self.outs]
        if all(found):
            self._mark(found)
        elif self.first.of.judges:
            self._refuse("takes some rows by their position")
        else:
            self._note_plain()

    def _try(self) -> None:
        targets = {rows.points_to for rows in self.rows.values()}
        compares = self.packet in (ATEN.eq, ATEN.ne) and len(targets) == 1
        if targets != {None} and not compares and self.packet not in _KEEP_VALUES:
            if self.packet is ATEN.max and is_called_by(_SOFTMAX):
                return self._note_plain()
            self._refuse("computes with the numbers of rows, which are other numbers on every rank")
        found = self._verdict()
        if isinstance(found, str):
            self._refuse(f"cannot be followed ({found})")
        points_to = self.first.points_to if self.packet in _KEEP_VALUES else None
        self._mark([one and Rows(one.dim, self.first.of, one.outer, one.inner, points_to) for one in found])

    def _verdict(self) -> Any:
        """Where the results hold rows. It is known for operands of these shapes, or the operation is tried."""
        key = (self.func, *(self._described(i, leaf) for i, leaf in enumerate(self.leaves)))
        if key in self.marks.verdicts:
            return self.marks.verdicts[key]
        found = try_rows(self.func, self.leaves, self.structure, self.rows)
        if isinstance(found, str) or not all(found):
            fewest = -1 if isinstance(found, str) else sum(one is not None for one in found)
            for plain in self._plain_operands():
                again = try_rows(self.func, self.leaves, self.structure, self.rows | plain)
                if not isinstance(again, str) and sum(one is not None for one in again) > fewest:
                    for i, rows in plain.items():
                        if not (self.packet is ATEN.copy_ and i == 0):  # whose values do not matter
                            self._check_plain(self.leaves[i], rows.dim, rows.of)
                    return again  # which depends on their values, and is not remembered
        self.marks.verdicts[key] = found
        return found

    def _described(self, position: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        rows = self.rows.get(position)
        return tuple(leaf.shape), leaf.dtype, rows and (rows.dim, rows.outer, rows.inner)

    def _plain_operands(self) -> Iterator[dict[int, Rows]]:
        """Operands that the model made without rows but with a row each, such as ``torch.zeros(num_nodes, 8)``."""
        plain: dict[int, list[int]] = {}
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and i not in self.rows and self.first.size in leaf.shape:
                plain[i] = [dim for dim, size in enumerate(leaf.shape) if size == self.first.size]
        for dims in islice(product(*plain.values()), 16 if plain else 0):
            yield {i: replace(self.first, dim=dim, points_to=None) for i, dim in zip(plain, dims)}

    def _check_plain(self, tensor: Tensor, dim: int, of: RowSet) -> None:
        check_plain(self.marks.origins.get(tensor), self.before.get(id(tensor), tensor), dim, of)

    def _index(self) -> bool:
        """``table[index]`` along rows: by a mask, or by numbers that point to rows. Whether it was that."""
        table, indices = self.args
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        (first, one), rows = given[0], self._of(table)
        if one.dtype in (torch.bool, torch.uint8):
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

    def _check_beside(self, pointer: Rows, dims: int, others: list[Tensor]) -> None:
        """Refuse other indices beside one that points to rows, if they depend on where rows are."""
        for other in others:
            beside, dim = self._of(other), pointer.dim - dims + other.dim()
            if beside is not None and beside.points_to is not None:
                self._refuse("takes entries of a row by the numbers of rows", beside.points_to, NUMBERS)
            if beside is not None and not beside.of.goes_with(pointer.of):
                self._refuse(f"puts rows of {pointer.of.name} beside rows of {beside.of.name}")
            if beside is None and -1 < dim < other.dim() and other.size(dim) > 1:
                self._check_plain(other, dim, pointer.of)

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

    def _pointer(self, index: Tensor, table: Rows) -> Rows:
        """Where the rows stand in an index, whose values are numbers of rows of a table."""
        found = self._of(index)
        if found is not None and found.points_to is not None:
            if found.points_to.goes_with(table.of) or table.of.root == ("reached", found.points_to.root):
                return found
        if found is None and self.marks.origins.get(index) == Origin.NUMBERS and _is_every_row(index, table.of.count):
            return Rows([*index.shape].index(table.of.count), table.of)
        if found is None and self.marks.origins.get(index) == Origin.FREE and index.dim() == 1 and table.of.is_of_edges:
            drawn = RowSet(f"drawn {table.of.name}", index.numel(), ("drawn", object()), table.of.count)
            self.marks.mark(index, Rows(0, drawn, points_to=table.of))  # torch.randperm: what edge dropout keeps
            return Rows(0, drawn)
        self._refuse("takes rows by numbers that do not come from the graph", table.of, NUMBERS)

    def _is_looked_up(self, table: Tensor, dim: int, index: Tensor) -> bool:
        """Whether entries of a table without rows are taken by numbers of rows, for each of which it has the same."""
        found = self._of(index)
        if found is None or found.points_to is None or self._of(table) is not None:
            return False
        if table.size(dim) != found.points_to.count:
            self._refuse("takes entries of another tensor by the numbers of rows", found.points_to, NUMBERS)
        self._check_plain(table, dim, found.points_to)
        return True

    def rows_of(self, operand: Tensor) -> Rows:
        """Where an operand holds rows, which is known."""
        found = self._of(operand)
        assert found is not None
        return found

    def _scatter(self, base: Tensor, dim: int, index: Tensor, source: Any) -> bool:
        """A scatter onto rows, by numbers that point to them. Whether it was that."""
        pointer, rows = self._of(index), self._of(base)
        dim = dim % max(1, base.dim())
        if pointer is None or pointer.points_to is None:
            return False
        target = pointer.points_to
        if self.in_pieces:
            self._refuse("scatters by destination in a way that the engine does not see", target)
        if base.size(dim) < target.count and is_called_by(_SOFTMAX):
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
        (dim, index), rows, where = given[0], self._of(base), self._of(given[0][1])
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

    def _plain(self, tensor: Tensor, rows: Rows) -> Rows:
        self._check_plain(tensor, rows.dim, rows.of)
        return replace(rows, points_to=None)

    def _select(self) -> None:
        """The places or values that a mask picks."""
        self._check_sets()
        mask = self.args[-1]
        rows = self._of(mask)
        if rows is None:
            self._refuse("picks entries of single rows")
        picked = self.marks.selection(mask, rows.of, self.outs[0].size(0))
        is_pointer = self.packet is ATEN.nonzero and mask.dim() == 1
        self._mark([Rows(0, picked, points_to=rows.of if is_pointer else None)])

    def _join(self) -> bool:
        """``torch.cat`` along rows of different sets, as of edges and the self-loops of nodes. Whether it was that."""
        pieces, dim = self.args[0], (self.args[1] if len(self.args) > 1 else 0)
        found = [(self._of(piece), piece) for piece in pieces]
        found = [(rows, piece) for rows, piece in found if rows is not None or piece.numel() or piece.dim() > 1]
        along = [rows for rows, piece in found if rows is not None and rows.dim == dim % piece.dim()]
        if not along or (len({rows.of for rows in along}) == 1 and len(along) == len(found) and len(found) > 1):
            return False
        roots = tuple(rows.of.root if rows is not None else piece.size(dim) for rows, piece in found)
        edges = next((rows.of for rows in along if rows.of.is_of_edges), None)
        count = self.outs[0].size(dim)
        joined = along[0].of if len(found) == 1 else RowSet("joined rows", count, ("joined", roots))
        if edges is not None:
            joined = RowSet(edges.name, count, edges.root)
        targets = {rows.points_to for rows in along}
        points_to = targets.pop() if len(targets) == 1 else None
        self._mark([Rows(dim % self.outs[0].dim(), joined, points_to=points_to)])
        return True

    def _refuse(self, what: str, of: RowSet | None = None, remedy: str = "") -> NoReturn:
        raise refusal(f"`{self.name}` {what}, over the {(of or self.first.of).name}", remedy)
