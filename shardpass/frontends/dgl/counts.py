"""Counts that are this rank's own as sizes, and those of the whole graph where code branches on them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from shardpass.core.following import OwnCount, over_numpy, own_of
from shardpass.core.ranks import FollowedTensor, torch_private
from shardpass.frontends.dgl.closed import refused

_Number: Any = np.int64  # whose methods are typed too narrowly for ours


@over_numpy
class NodeCount(_Number, OwnCount):  # type: ignore[misc]
    """How many nodes this rank has. Whether there are any, or more than a number, is answered for all ranks together.

    Models branch on that (``if graph.num_nodes() > 1000``), and every rank must take the branch that the whole graph
    takes. ``==`` compares this rank's number, since that is how code checks shapes. It is a number of NumPy's, which
    torch takes for a size, and not an `int`, since ``1.0 / n`` does not ask a subclass of `int` what it makes of that.
    Code that is followed gets a `RowCount`.
    """

    __class__ = property(lambda self: int)  # type: ignore[assignment]

    def __new__(cls, own: int, total: int) -> Any:
        """`own` on this rank, `total` on all ranks."""
        return super().__new__(cls, own)

    def __init__(self, own: int, total: int) -> None:
        self.own, self.total = int(own), total

    def _compared(self, operation: Callable[[Any, Any], bool], other: Any) -> bool:
        return operation(self.own, other.own) if isinstance(other, OwnCount) else operation(self.total, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __bool__(self) -> bool:
        return self.total != 0

    def refuse(self) -> NoReturn:
        """Raise: something is computed from this rank's number of nodes or edges."""
        raise _differs("a number computed from this rank's number of nodes or edges")

    def computed(self, operation: Callable[..., int], *others: int) -> Any:
        totals = (getattr(other, "total", other) for other in others)
        return type(self)(operation(self.own, *map(own_of, others)), operation(self.total, *totals))

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, NodeCount):
            raise _differs("a number of pairs of this rank's nodes or edges")
        if isinstance(other, float):  # a share of the edges, such as edge dropout takes
            return type(self)(int(self.own * other), int(self.total * other))
        return OwnCount.__mul__(self, other)

    __rmul__ = __mul__


class EdgeCount(NodeCount):
    """How many edges this rank has. ``== 0`` asks for all ranks too, since loops skip empty edge types by it."""

    def __eq__(self, other: object) -> bool:
        return self.total == 0 if isinstance(other, int) and other == 0 else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.own)


def _differs(what: str) -> Exception:
    return refused(
        what,
        "it differs from rank to rank. Use the numbers of the whole graph: graph.total_nodes and graph.total_edges",
    )


class InDegrees(Tensor):
    """In-degrees of own nodes. Whether any is zero is answered for the whole graph. A script computes with `given`.

    Layers raise ``if (graph.in_degrees() == 0).any()``, and a model may branch by it, which all ranks must do alike.
    """

    any_is_zero: bool | None
    """`None` once a model has written into them."""
    asks: bool
    """Whether the entries say which degrees are zero."""
    given: Tensor | None
    """The same as code outside of models gets it."""

    @staticmethod
    def of(degrees: Tensor, any_is_zero: bool, asks: bool = False, given: Tensor | None = None) -> Any:
        """The degrees, of which some on some rank is zero or none is."""
        found = degrees.as_subclass(InDegrees)
        found.any_is_zero, found.asks, found.given = any_is_zero, asks, given
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FollowedTensor) for kind in types):
            return NotImplemented
        degrees, name = args[0] if args else None, getattr(func, "__name__", "")
        with torch_private.DisableTorchFunctionSubclass():
            if not isinstance(degrees, InDegrees) or degrees.any_is_zero is None:
                return func(*args, **(kwargs or {}))
            if degrees.asks and name == "any" and len(args) == 1 and not kwargs:
                return torch.tensor(degrees.any_is_zero, device=degrees.device)
            is_question = name in ("eq", "__eq__") and not degrees.asks and args[1:] == (0,)
        if degrees.given is not None and not is_question:
            return func(*(degrees.given if one is degrees else one for one in args), **(kwargs or {}))
        with torch_private.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            if out is degrees or name == "__setitem__":
                degrees.any_is_zero = None
            elif is_question:
                return InDegrees.of(out, degrees.any_is_zero, asks=True)
            return out


_SIZES = ("ones", "zeros", "full", "new_ones", "new_zeros", "new_full")


class NodeCounts(Tensor):
    """What ``graph.batch_num_nodes()`` gives: ``[1]``, the nodes of the one graph.

    Layers use it as a size (of a tensor of ones, as a number of repetitions) or as a divisor (graph norms divide by
    it). As a size it is this rank's number of nodes, as a divisor that of all ranks. Any other use is refused, since it
    could mean either.
    """

    own: int
    total: int

    @staticmethod
    def of(own: int, total: int, scalar: bool = False) -> Any:
        """`own` nodes on this rank, `total` on all."""
        counts = torch.tensor(own if scalar else [own]).as_subclass(NodeCounts)
        counts.own, counts.total = own, total
        return counts

    def __iter__(self) -> Any:
        return iter([NodeCounts.of(self.own, self.total, scalar=True)])

    def __index__(self) -> int:
        return self.own

    def __len__(self) -> int:
        return 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        mine = [a for a in (*args, *kwargs.values()) if isinstance(a, NodeCounts)]
        with torch_private.DisableTorchFunctionSubclass():
            if name in ("true_divide", "div", "__truediv__", "divide") and mine == [args[1]]:
                return func(args[0], mine[0].total, *args[2:], **kwargs)
            if name in _SIZES:
                return func(*(a.own if isinstance(a, NodeCounts) else a for a in args), **kwargs)
            if name == "repeat_interleave" and len(mine) == 1 and args[0] is not mine[0]:
                return func(*(torch.tensor([a.own]) if isinstance(a, NodeCounts) else a for a in args), **kwargs)
            if name in ("__repr__", "__get__", "size", "dim", "is_floating_point", "__format__", "__len__"):
                return func(*args, **kwargs)
        raise refused(
            f"`{name}` on graph.batch_num_nodes()",
            "it is a size on this rank but a divisor over all ranks. For readouts use shardpass.dgl.sum_nodes and its "
            "like, or the modules of dgl.nn in a wrapped model",
        )
