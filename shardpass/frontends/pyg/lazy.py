"""Tensor stand-ins of the PyG frontend: a deferred edge update or sum, and a value that must not be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.sharding import EdgeShards
from shardpass.errors import RefusedError

if TYPE_CHECKING:
    from shardpass.frontends.pyg.body import Parts


class LazyEdges(Tensor):
    """The result of an edge update, not computed yet.

    Handed to `propagate` it is computed edge by edge inside the message, and no tensor with a row per edge exists.
    Any other use computes it whole.
    """

    title: str
    parts: Parts
    message: Callable[..., Tensor]
    shards: EdgeShards  # of the edges, in the direction of the messages
    with_grad: bool  # whether gradients were enabled when it was made
    versions: list[int]  # of the tensors it is made of
    _compute: Callable[[], Tensor]
    _value: Tensor | None
    _drawn: bool  # computed once already, inside a message, with random numbers

    @staticmethod
    def make(
        name: str, parts: Parts, message: Callable[..., Tensor], compute: Callable[[], Tensor], shards: EdgeShards
    ) -> Any:
        """A stand-in for what `compute` returns; `message` gives its rows for some edges."""
        out = torch.empty(0).as_subclass(LazyEdges)
        out.title, out.parts, out.message, out._compute, out._value = name, parts, message, compute, None
        out.shards, out.with_grad, out._drawn = shards, torch.is_grad_enabled(), False
        out.versions = _versions(parts)
        return out

    def may_be_fused(self, shards: EdgeShards) -> bool:
        """Whether a message over `shards` may compute it on the way: then it has the same value as computed before."""
        self._refuse_changes()
        return self._value is None and self.shards is shards and self.with_grad == torch.is_grad_enabled()

    def fused(self, random: bool) -> None:
        """Note that a message has computed it; `random`: with random numbers, which another use would draw anew."""
        self._drawn = self._drawn or random

    def materialise(self) -> Tensor:
        """The edge tensor, ``[num_edges, ...]``. Collective on the first use."""
        if self._value is None:
            self._refuse_changes()
            with torch.set_grad_enabled(self.with_grad):
                self._value = self._compute()
        return self._value

    def _refuse_changes(self) -> None:
        if self._drawn:
            raise RefusedError(
                f"{self.title}: the result of edge_updater is used a second time, but it holds random numbers "
                f"(dropout) that were drawn inside the message. Switch dropout off for this call (eval), or use it once"
            )
        if self._value is None and self.versions != _versions(self.parts):
            raise RefusedError(
                f"{self.title}: a tensor given to edge_updater was changed in place before its result was used. Use "
                f"the form that returns a new tensor"
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(_real(a) for a in args), **{k: _real(v) for k, v in (kwargs or {}).items()})


def _real(value: Any) -> Any:
    if isinstance(value, (LazyEdges, LazySums)):
        return value.materialise()
    if type(value) in (list, tuple):
        return type(value)(_real(v) for v in value)
    return value


class LazySums(Tensor):
    """The result of a sum over in-edges, not computed yet, so that a linear map after it can be made before it.

    Any use but `torch.nn.functional.linear` computes it as it is.
    """

    _compute: Callable[[Tensor | None], Tensor]
    _value: Tensor | None

    @staticmethod
    def make(compute: Callable[[Tensor | None], Tensor]) -> Any:
        """A stand-in for what ``compute(None)`` returns; ``compute(weight)`` is that after ``F.linear``."""
        out = torch.empty(0).as_subclass(LazySums)
        out._compute, out._value = compute, None
        return out

    def materialise(self) -> Tensor:
        """The sums, ``[num_dst, channels]``. Collective on the first use."""
        if self._value is None:
            self._value = self._compute(None)
        return self._value

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear`` of the sums, ``[num_dst, out_channels]``. Collective unless they were computed before."""
        if self._value is not None:
            return F.linear(self._value, weight, bias)
        out = self._compute(weight)
        return out if bias is None else out.add_(bias)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and args and isinstance(args[0], LazySums):
            return args[0].linear(*args[1:], **(kwargs or {}))
        return func(*(_real(a) for a in args), **{k: _real(v) for k, v in (kwargs or {}).items()})


def _versions(parts: Parts) -> list[int]:
    tensors = [t for group in (parts.src, parts.dst, parts.edge) for t in group.values()]
    return [t._version for t in tensors if not t.is_inference()]


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
