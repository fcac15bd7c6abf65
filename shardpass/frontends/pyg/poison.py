"""`Poison`: a stand-in for a tensor that must not be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.following import user_line
from shardpass.errors import RefusedError


class Poison(Tensor):
    """A tensor that refuses every use and gives the reason."""

    reason: str

    @staticmethod
    def make(reason: str) -> Any:
        """A stand-in that raises `RefusedError` with `reason` when it is used."""
        out = torch.empty(0).as_subclass(Poison)
        out.reason = reason
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        values = [*args, *(kwargs or {}).values()]
        found = [v for a in values for v in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(v, Poison)]
        raise RefusedError(f"{user_line()}: {found[0].reason}")
