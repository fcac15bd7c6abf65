"""Functions of the user's that take rows of nodes: they treat rows one by one, in a model and where none runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardpass.core.following import FollowFunctions, FollowRows
from shardpass.core.ranks import Ranks, RowSet, chained, torch_private


class RowFunctions:
    """Runs functions that are given rows of nodes, and refuses one that puts rows together.

    Within a wrapped model they are followed as the model is. Elsewhere they are followed by themselves, in the calls
    whose number is a power of two.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def run(
        self, comm: Ranks, function: Callable[..., Any], given: Any, of: RowSet, marked: dict[str, Tensor] | None = None
    ) -> Any:
        """What ``function(given)`` returns: rows of `of`, in tensors.

        Args:
            marked: tensors that `given` has, which hold rows of `of`.
        """

        def ran() -> Any:
            for tensor in (marked or {}).values():
                comm.mark_rows(tensor, of)
            out = function(given)
            for leaf in torch_private.tree_leaves(out):
                if isinstance(leaf, Tensor):
                    comm.require_rows(leaf, of)
            return out

        if comm.forward is not None:
            with comm.followed():
                return ran()
        name = getattr(function, "__qualname__", type(function).__name__)
        self._calls[name] += 1
        return ran() if self._calls[name] & (self._calls[name] - 1) else _followed_alone(comm, ran, of)


def _followed_alone(comm: Ranks, function: Callable[[], Any], of: RowSet) -> Any:
    follower = FollowRows()
    follower.marks.known = [of]

    def run() -> Any:
        assert comm.forward is not None
        comm.forward.rows = follower
        with follower, FollowFunctions(follower):
            out = function()
        follower.marks.check_refusals()
        return out

    return chained(comm, run)
