"""How many rows a rank has, in the plain numbers that ``len`` and ``int`` give: a script may divide sums by them."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor

from shardpass.core.following.marks import Marks
from shardpass.core.following.refusals import AROUND, refusal

_DIVIDES = frozenset("__truediv__ __itruediv__ div div_ divide true_divide".split())
_MULTIPLIES = frozenset("__mul__ __rmul__ __imul__ mul mul_ multiply".split())


class OwnCounts:
    """The numbers of this rank's rows that the script of a run has been told.

    Attributes:
        counts: by ``len`` and ``int``, as plain numbers.
        sizes: as `OwnInt`, of which floating point numbers that torch or Python computes are plain again.
    """

    def __init__(self) -> None:
        self.counts: set[int] = set()
        self.sizes: set[int] = set()

    def check(self, name: str, args: tuple[Any, ...], marks: Marks) -> None:
        """Refuse the function `name` if it divides a sum over rows by how many of them are own."""
        if name in _DIVIDES:
            self._check_divisor(marks, args[0], args[1], self.counts, may_be_known=True)
        elif name in _MULTIPLIES:
            for value, factor in (args[:2], args[1::-1]):
                if isinstance(factor, float) and 0 < factor < 1 and abs(1 / factor - round(1 / factor)) < 1e-9 / factor:
                    is_any = round(factor, 6) == factor  # such as 0.1
                    known = self.counts if is_any else self.counts | self.sizes
                    self._check_divisor(marks, value, round(1 / factor), known, may_be_known=not is_any)

    @staticmethod
    def _check_divisor(marks: Marks, value: Any, divisor: Any, counts: Set[int], may_be_known: bool) -> None:
        mixture = marks.mixtures.get(value) if isinstance(value, Tensor) else None
        is_whole = isinstance(value, Tensor) and value in marks.whole
        is_number = not isinstance(divisor, Tensor) or (divisor.dim() == 0 and not divisor.requires_grad)
        if not is_number or not (is_whole or (mixture is not None and mixture.is_sum)):
            return
        if mixture is not None and may_be_known:  # a script may know it otherwise, as from a mask of the graph
            counts = counts | {of.count for of in marks.known if not of.is_of_edges}
        if float(divisor) > 1 and float(divisor) in counts:
            of = "rows" if mixture is None else f"own {mixture.of.name}"
            raise refusal(f"a sum over {of} is divided by their number on this rank, {float(divisor):g}", AROUND)
