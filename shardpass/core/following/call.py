"""One call of a primitive operation, and what is known of its operands: what the rules of `table.py` look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from torch import Tensor

from shardpass.core.following.rows import Rows
from shardpass.core.ranks import torch_private


class Made(Enum):
    """What a result without rows of its own was made of."""

    SUM = "a sum over own rows"
    MIXED = "several rows"


Found = Rows | Made | None
"""Where a tensor holds rows; or what it was made of; `None` if it has nothing of rows."""


class Call:
    """One call of a primitive operation.

    Args:
        func: the operation, as a dispatch mode sees it.
        args, kwargs: what it was given.
        outs: the tensors that it returned, or others of their shapes.
        of: what is known of an operand.
        is_zero: whether an operand is known to hold zeros, so that what is added to it is a sum.
        is_of_script: a script runs it, which may have tensors of own rows that nobody knows.

    Attributes:
        name: of the operation, without its overload.
        given: what it was given, by name.
        plain: operands without rows that have an entry for each row nevertheless, with the dimension.
    """

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor],
        of: Callable[[Tensor], Found], is_zero: Callable[[Tensor], bool] = lambda tensor: False,
        is_of_script: bool = False,
    ) -> None:  # fmt: skip
        self.func, self.outs, self.of, self.is_zero, self.is_of_script = func, outs, of, is_zero, is_of_script
        self.given = torch_private.bound_arguments(func, args, kwargs)
        self.name: str = func.overloadpacket.__name__
        read = [value for name, value in self.given.items() if name != "out"]
        self.tensors = [leaf for leaf in torch_private.tree_leaves(read) if isinstance(leaf, Tensor)]
        self.plain: list[tuple[Tensor, int]] = []

    def __getitem__(self, name: str) -> Any:
        """The argument of this name in the schema of the operation."""
        return self.given[name]

    def is_alike(self, tensor: Any, dim: int) -> None:
        """Note that an operand without rows must be the same for each row, if it has as many entries along `dim`."""
        if isinstance(tensor, Tensor) and self.of(tensor) is None and 0 <= dim < tensor.dim() and tensor.size(dim) != 1:
            self.plain.append((tensor, dim))

    def rows(self, *tensors: Any) -> list[tuple[Tensor, Rows]]:
        """The operands with rows; of `tensors`, if any are given."""
        pairs = [(one, self.of(one)) for one in tensors or self.tensors if isinstance(one, Tensor)]
        return [(one, found) for one, found in pairs if isinstance(found, Rows)]

    def row_of(self, tensor: Any) -> Rows | None:
        """Where one operand holds rows."""
        found = self.of(tensor) if isinstance(tensor, Tensor) else None
        return found if isinstance(found, Rows) else None


Rule = Callable[[Call], Any]
"""What holds for each result of a call of some kind, or a list of that for all of them."""


def dims_of(call: Call, dim: Any, like: Tensor) -> set[int]:
    """The dimensions that an argument names, of a tensor like `like`; all if it names none."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return set(range(like.dim()))
    return {int(one) % max(1, like.dim()) for one in (dim if isinstance(dim, (list, tuple)) else [dim])}


def aligned(call: Call, out: Tensor, *tensors: Any) -> Found:
    """Where `out` holds rows, if operands are broadcast against each other and each entry stays at its place."""
    rows = call.rows(*tensors)
    from_end = {found.dim - one.dim() for one, found in rows}
    if len(from_end) > 1 or len({(found.outer, found.inner) for _, found in rows}) > 1:
        return Made.MIXED
    first, at = rows[0][1], from_end.pop()
    for one in tensors or call.tensors:
        if isinstance(one, Tensor):
            call.is_alike(one, one.dim() + at)
    return replace(first, dim=out.dim() + at, points_to=None)
