"""Masks over a rank's edges that tell self-loops from others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan
from shardpass.core.following import user_line
from shardpass.core.ranks import FollowedTensor, torch_private
from shardpass.errors import RefusedError

_COUNTS = frozenset(
    ["any", "all", "sum", "mean", "max", "min", "item", "tolist", "count_nonzero", "__bool__", "__len__"]
)


class EdgeMask(Tensor):
    """Which own edges are self-loops, or are not. It selects edges; whether there are any, no rank knows alone."""

    plan: HaloPlan

    @staticmethod
    def wrap(data: Tensor, plan: HaloPlan) -> EdgeMask:
        """`data`, with the rows that it is known to hold."""
        out = data.as_subclass(EdgeMask)
        out.plan = plan
        plan.comm.mark_rows_alike(out, data)
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, FollowedTensor) for kind in types):
            return NotImplemented
        name = getattr(func, "__name__", "")
        if name in _COUNTS and args and isinstance(args[0], EdgeMask):
            raise RefusedError(
                f"{user_line()}: `{name}` of a mask over this rank's edges (self-loops): other ranks have other edges "
                f"and would get another answer. Compute it before partitioning, or count over all ranks with "
                f"shardpass.total"
            )
        with torch_private.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.bool and type(out) is Tensor and name != "__get__":
            return EdgeMask.wrap(out, next(a.plan for a in args if isinstance(a, EdgeMask)))
        return out
