"""What of a model is followed as whole functions: what takes rows out of torch, or counts them, or only checks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.following.follow import FollowRows
from shardpass.core.following.row_count import OwnCount, RowCount
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import user_line
from shardpass.errors import RefusedError

_LEAVES_TORCH = frozenset(["tolist", "numpy", "__array__"])
_IN_PLACE_TOO = "add sub mul div true_divide floor_divide remainder fmod pow clamp fill".split()
_TAKES_NUMBERS = frozenset(
    "rsub float_power gt ge lt le eq ne tensor as_tensor full_like scalar_tensor".split()
    + [name + ending for name in _IN_PLACE_TOO for ending in ("", "_")]
)
"""Functions with numbers among their arguments that are no sizes."""


class FollowFunctions(TorchFunctionMode):
    """While it is on, rows cannot leave torch, nothing is computed from their number, and checks of them pass.

    Args:
        follower: knows which tensors hold rows.
    """

    def __init__(self, follower: FollowRows) -> None:
        super().__init__()
        self.follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.follower.is_paused:
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _LEAVES_TORCH and first is not None:
            self._refuse_to_leave(name, first)
        if name == "__len__" and first is not None and (rows := self._rows_of(first)) is not None:
            raise RefusedError(
                f"{user_line()}: `len` gives this rank's number of {rows.of.name} as a plain number, and nobody can "
                f"follow what is computed from it. Write .size(0) in its place, which can be a size, or take the "
                f"number of the whole graph (graph.total_nodes, graph.total_edges)"
            )
        if name in _TAKES_NUMBERS:
            for number in (*args, *kwargs.values()):
                if isinstance(number, OwnCount):
                    number.refuse()
        try:
            out = func(*args, **kwargs) if name != "one_hot" else self._one_hot(func, args, kwargs)
        except IndexError as error:  # indices are checked before an operation runs
            raise self.follower.explained(name, error, [first]) from error
        if first is not None and name == "numel":
            rows = self._rows_of(first)
            return out if rows is None else RowCount.make(out, rows.of)
        if first is not None and (name == "size" or (name == "__get__" and isinstance(out, torch.Size))):
            return self._counted(first, (*args[1:], *kwargs.values()), out)
        return out

    def _rows_of(self, tensor: Tensor) -> Rows | None:
        with self.follower.paused():
            self.follower.marks.adopt(tensor)
        rows: Rows | None = self.follower.marks.rows.get(tensor)
        return rows if rows is not None and rows.fit(tensor) else None

    def _refuse_to_leave(self, name: str, tensor: Tensor) -> None:
        self.follower.marks.check_result(tensor)
        rows = self._rows_of(tensor)
        if rows is not None:
            raise RefusedError(
                f"{user_line()}: `{name}` takes {rows.of.name} out of torch, where nobody can follow what becomes of "
                f"them. This rank holds a part of them, and the result may differ from that of the whole graph"
            )

    def _one_hot(self, func: Any, args: Any, kwargs: Any) -> Any:
        """With a number of classes, it looks at all rows only to check them."""
        rows = self._rows_of(args[0]) if args else None
        if len(args) < 2 and kwargs.get("num_classes", -1) == -1:
            if rows is not None and rows.of.judges:
                raise RefusedError(
                    f"{user_line()}: `one_hot` without num_classes takes the largest number that the {rows.of.name} of "
                    f"this rank have. Pass num_classes, such as graph.num_classes"
                )
            return func(*args, **kwargs)
        with self.follower.paused():
            out = func(*args, **kwargs)
        if rows is not None:
            self.follower.mark(out, rows.of, rows.dim)
        return out

    def _counted(self, tensor: Tensor, dims: Any, out: Any) -> Any:
        rows = self._rows_of(tensor)
        if rows is None or rows.size != rows.of.count:
            return out
        count = RowCount.make(rows.size, rows.of)
        if isinstance(out, torch.Size):
            return torch.Size(count if dim == rows.dim else size for dim, size in enumerate(out))
        return count if dims and dims[0] % tensor.dim() == rows.dim else out
