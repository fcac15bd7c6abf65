"""Tensor stand-ins of the PyG frontend: a deferred edge update, and a value that must not be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardpass.errors import RefusedError

if TYPE_CHECKING:
    from shardpass.frontends.pyg.propagate import Parts


class LazyEdges(Tensor):
    """The result of an edge update, not computed yet.

    Handed to `propagate` it is computed edge by edge inside the message, and no tensor with a row per edge exists.
    Any other use computes it whole.
    """

    parts: Parts
    message: Callable[..., Tensor]
    _compute: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def make(parts: Parts, message: Callable[..., Tensor], compute: Callable[[], Tensor]) -> Any:
        """A stand-in for what `compute` returns; `message` gives its rows for some edges."""
        out = torch.empty(0).as_subclass(LazyEdges)
        out.parts, out.message, out._compute, out._value = parts, message, compute, None
        return out

    def materialise(self) -> Tensor:
        """The edge tensor, ``[num_edges, ...]``. Collective on the first use."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, LazyEdges):
                return value.materialise()
            if type(value) in (list, tuple):
                return type(value)(real(v) for v in value)
            return value

        return func(*(real(a) for a in args), **{k: real(v) for k, v in (kwargs or {}).items()})


class Poison(Tensor):
    """A tensor whose every use is refused, with the reason."""

    reason: str

    @staticmethod
    def make(reason: str) -> Any:
        """A stand-in that raises `RefusedError` with `reason` when used."""
        out = torch.empty(0).as_subclass(Poison)
        out.reason = reason
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        values = [*args, *(kwargs or {}).values()]
        found = [v for a in values for v in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(v, Poison)]
        raise RefusedError(found[0].reason)
