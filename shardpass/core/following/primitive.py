"""What is known of one primitive operation that has rows among its operands, and what can be said of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from shardpass.core.following.call import Found, Made
from shardpass.core.following.marks import Marks
from shardpass.core.following.origin import Origin
from shardpass.core.following.refusals import MEAN_OF_COLUMNS, Mixture, check_plain, refusal
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import RowSet, torch_private


class Primitive:
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

    def _of(self, value: Any) -> Rows | None:
        """Where an operand holds rows."""
        return next((self.rows[i] for i, leaf in enumerate(self.leaves) if leaf is value and i in self.rows), None)

    def _note_plain(self, origin: Origin = Origin.CONSTANT) -> None:
        for out in self.outs:
            self.marks.origins[out] = origin

    def _mark(self, found: Sequence[Found], outs: list[Tensor] | None = None) -> None:
        """Note where the results, or `outs` of them, hold rows; without rows they were made of several."""
        for out, rows in zip(self.outs if outs is None else outs, found):
            if not isinstance(rows, Rows) or not rows.fit(out):
                self.marks.forget(out)
                is_of_columns = self.name == "mean" and out.dim() > 0 and self.marks.is_around
                remedy = MEAN_OF_COLUMNS if is_of_columns else self.marks.remedy
                made = Mixture(self.name, user_line(), self.first.of, rows is Made.SUM, remedy)
                self.marks.mixtures.add(out, made)
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

    def rows_of(self, operand: Tensor) -> Rows:
        """Where an operand holds rows, which is known."""
        found = self._of(operand)
        assert found is not None
        return found

    def _check_plain(self, tensor: Tensor, dim: int, of: RowSet) -> None:
        if self.marks.is_around:
            return  # a script has own rows of its own, such as labels that it has made
        origin, values = self.marks.origins.get(tensor), self.before.get(id(tensor), tensor)
        rows = self.first
        if rows.outer * rows.inner > 1 and of.count and values.size(dim) == rows.size:
            values, dim = values.unflatten(dim, (rows.outer, of.count, rows.inner)), dim + 1
        check_plain(origin, values, dim, of)

    def _plain(self, tensor: Tensor, rows: Rows) -> Rows:
        self._check_plain(tensor, rows.dim, rows.of)
        return replace(rows, points_to=None)

    def _refuse(self, what: str, of: RowSet | None = None, remedy: str = "") -> NoReturn:
        raise refusal(f"`{self.name}` {what}, over the {(of or self.first.of).name}", remedy or self.marks.remedy)
