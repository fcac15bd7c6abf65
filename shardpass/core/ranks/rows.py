"""Sets of rows, by which the engine says what the rows of its tensors are, and who wants to know."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

from torch import Tensor

_FETCHED = "fetched rows"
_LOOPS_FIRST = "after self-loops"


def loops_first(root: Any) -> Hashable:
    """The root of rows of edges that come after others, where a list of edges has them first."""
    return (*root, _LOOPS_FIRST)


Gives = Literal["rows", "whole", "total", "replicated", "sum", "alike", "number"]


class FollowedTensor(Tensor):
    """What stands for the tensor `plain`, which a wrapped model has returned, while what is made of it is followed."""

    plain: Tensor
    around: ResultWatch


class ResultWatch(Protocol):
    """What follows the results of a wrapped model."""

    def followed(self, value: Any, like: Any = None) -> Any:
        """`value` with tensors that are followed in the place of its tensors."""
        ...

    def returned(self, value: Any, gives: Gives) -> Any:
        """What a function of ours returns that was given followed tensors.

        Args:
            gives: "rows"; a value of the rows of all ranks, with the gradient of this rank's share ("whole"; "total" if
                a row counts as often as ranks give it; "replicated" if all ranks give the same); what all ranks have
                alike, with all of its gradient ("alike", and "sum" if it was given a sum over own rows); or what takes
                no part in gradients ("number").
        """
        ...

    def reduced(self, given: Tensor, op: str, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """What `reduce`, by which a script reduces numbers over ranks itself, makes of a followed tensor."""
        ...

    def tell(self, marks: Any, tensor: Tensor) -> None:
        """Tell the marks of another model what is known of `tensor`."""
        ...

    def met(self, value: Tensor) -> Tensor:
        """What a function of ours takes that finds the followed `value` in a container."""
        ...

    def check_given(self, value: Any, gives: Gives | None = None) -> None:
        """Refuse in `value` what a function that `gives` something, or if that is `None` a model, cannot be given."""
        ...


def plain_of(leaf: Any) -> Any:
    """The tensor that a followed one stands for; anything else as it is."""
    return leaf.plain if isinstance(leaf, FollowedTensor) else leaf


@dataclass(frozen=True)
class RowSet:
    """A set of rows in one order: the own nodes of a type, the own edges of a relation, or rows picked from those.

    Two sets are the same if `root` and `count` are.

    Args:
        name: what error messages call it, such as ``"nodes"``.
        count: how many rows this rank has.
        root: what the rows are rows of. `None` stands for rows that a tensor brought with it, known by their number
            only: they go with every set of that many rows.
        picked_from: how many rows the set has from which these were picked, or `None`.
        total: how many rows all ranks have, or `None` if that does not matter.
        copies: how many of them every rank has, as a parameter that was joined to rows of nodes.
    """

    name: str = field(compare=False)
    count: int
    root: Hashable
    picked_from: int | None = field(default=None, compare=False)
    total: int | None = field(default=None, compare=False)
    copies: int = field(default=0, compare=False)

    @classmethod
    def fetched(cls, count: int) -> RowSet:
        """Rows of any nodes, fetched by ids that this rank was given. They go with what it was given beside them."""
        return cls(_FETCHED, count, None)

    @classmethod
    def one_of(cls, sets: Sequence[RowSet]) -> RowSet:
        """Rows of one of several sets with the same number of rows. The total is the least, to tell whether any are."""
        totals = [known.total for known in sets if known.total is not None]
        return cls("nodes or edges", sets[0].count, None, total=min(totals, default=None))

    @property
    def is_fetched(self) -> bool:
        """Whether these are rows of any nodes, fetched by their ids."""
        return self.root is None and self.name == _FETCHED

    @property
    def is_of_edges(self) -> bool:
        """Whether these are edges. Lists of edges that a layer derives are told by their relation and their number."""
        return isinstance(self.root, tuple) and self.root[0] == "edges"

    @property
    def relation(self) -> Hashable | None:
        """The relation whose edges these are, or of which a layer has derived them; `None` if they are no edges.

        The root of rows of edges is ``("edges", relation, ...)``; what follows tells lists of as many of them.
        """
        return self.root[1] if isinstance(self.root, tuple) and self.is_of_edges else None

    def is_other_than(self, of: RowSet) -> bool:
        """Whether these are known to be other rows than `of`: edges of another relation, or nodes in place of edges.

        Nodes of another type are not: several types may have been put into one tensor.
        """
        if not isinstance(self.root, tuple) or not isinstance(of.root, tuple):
            return False
        kinds = {self.root[0], of.root[0]}
        is_of_others = kinds in ({"edges"}, {"edges", "nodes"}) and self.relation != of.relation
        return is_of_others or (kinds == {"edges"} and (_LOOPS_FIRST in self.root) != (_LOOPS_FIRST in of.root))

    def is_other_type(self, of: RowSet) -> bool:
        """Whether both are known to be all nodes of a type, and not of the same one."""
        are_types = all(isinstance(one.root, tuple) and one.root[0] == "nodes" for one in (self, of))
        return are_types and self.root != of.root

    def goes_with(self, other: RowSet) -> bool:
        """Whether the rows of both are the same nodes or edges, in the same order."""
        return self.count == other.count and (self.root is None or other.root is None or self.root == other.root)


class HoldsEdges:
    """What stands for edges among the arguments of a layer, and says of which relations they are."""

    @property
    def edge_sets(self) -> Sequence[RowSet]:
        """The edges, a set for each relation."""
        raise NotImplementedError

    @property
    def end_sets(self) -> tuple[RowSet, RowSet] | None:
        """The nodes of the first and of the second row of an ``edge_index``; `None` for what is no such list."""
        return None


class RowWatch(Protocol):
    """What follows rows through the operations of a model, while its outermost forward runs."""

    is_paused: bool

    @property
    def has_mixtures(self) -> bool:
        """Whether a tensor that is alive was made of several rows, so that a message function may use one."""
        ...

    def paused(self, is_paused: bool = True) -> AbstractContextManager[None]:
        """A block whose operations are not the model's own; with ``False``, a block within it whose operations are."""
        ...

    def left_to_another(self) -> AbstractContextManager[None]:
        """A block that runs a message function, which another one follows."""
        ...

    def forget(self, tensor: Tensor) -> None:
        """Know nothing of a tensor any more, because the engine has written into it."""
        ...

    def require(self, tensor: Tensor, of: RowSet, is_table: bool = False) -> None:
        """Refuse a tensor that is to have a row for each of `of` along dimension 0, if its rows are made of several."""
        ...

    def set_of_ids(self, ids: Tensor) -> RowSet:
        """What the rows are that are fetched by node ids of the whole graph. Refuse numbers of own rows."""
        ...

    def count_of(self, of: RowSet) -> Any:
        """How many rows of `of` this rank has: a size, with which nothing may be computed."""
        ...

    def note_count(self, count: int) -> None:
        """Note that the model was told the number of own rows as a plain `int`."""
        ...

    def recognise(self, value: Any) -> None:
        """Recognise the tensors in `value`, which the engine made, by their sizes, where nothing is known of them."""
        ...

    def mark_plain(self, tensor: Tensor) -> None:
        """Say that `tensor` holds no rows, whatever its size."""
        ...

    def mark_alike(self, tensor: Tensor, like: Tensor) -> None:
        """Say that `tensor` holds the rows that `like` holds, in the same dimension."""
        ...

    def row_dim(self, tensor: Tensor) -> int | None:
        """The dimension of `tensor` that holds rows; `None` if none does, or if nobody knows."""
        ...

    def copies_in(self, tensor: Tensor) -> int:
        """How many of the rows of `tensor` every rank has, beside rows of its own."""
        ...

    def mark_whole(self, value: Any) -> None:
        """Say that tensors in `value` are values of all rows, with the gradient of this rank's share of them."""
        ...

    def is_sum(self, tensor: Tensor) -> bool:
        """Whether `tensor` was summed over own rows; if not, it may be alike on all ranks. Refuse anything else."""
        ...

    def check_reduced(self, tensor: Tensor, op: str) -> None:
        """Refuse a reduction by `op` over ranks, by which a model reduces itself, that is not that of all rows."""
        ...

    def refuse_alike(self, tensor: Tensor) -> NoReturn:
        """Refuse to add up what all ranks have alike."""
        ...

    def mark(self, tensor: Tensor, of: RowSet, dim: int = 0, points_to: RowSet | None = None) -> None:
        """Say that dimension `dim` of `tensor` holds the rows `of`, whose values may be numbers of other rows."""
        ...
