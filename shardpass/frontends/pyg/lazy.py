"""Tensors that are computed on their first use: the result of an edge update, and a sum over in-edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.ranks import torch_private
from shardpass.core.sharding import EdgeShards
from shardpass.errors import RefusedError
from shardpass.frontends.pyg.arguments import Arguments


class Lazy(Tensor):
    """A stand-in for a result. Its first use computes the result, which is collective."""

    _compute: Callable[..., Tensor]
    _value: Tensor | None

    def materialise(self) -> Tensor:
        """The result. Collective on the first use."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(computed, args), **{name: computed(value) for name, value in (kwargs or {}).items()})


def computed(value: Any) -> Any:
    """`value` with the results themselves in place of their stand-ins, also inside a list or tuple."""
    if isinstance(value, Lazy):
        return value.materialise()
    return type(value)(map(computed, value)) if type(value) in (list, tuple) else value


class LazyEdges(Lazy):
    """The result of an edge update, ``[num_edges, ...]``, before it is computed.

    When it is passed to `propagate`, the message function computes it edge by edge, and no tensor with a row per edge
    exists. Any other use computes it whole.
    """

    title: str
    arguments: Arguments
    message: Callable[..., Tensor]
    shards: EdgeShards  # of the edges, in the direction of the messages
    with_grad: bool  # whether gradients were enabled when this was made
    versions: list[int]  # of the tensors that it is made of
    _drawn: bool  # a message function has already computed it, with random numbers

    @staticmethod
    def make(
        nothing: Tensor, name: str, arguments: Arguments, message: Callable[..., Tensor],
        compute: Callable[[], Tensor], shards: EdgeShards,
    ) -> Any:  # fmt: skip
        """A stand-in for what `compute` returns, made on `nothing`; `message` returns the rows of some edges."""
        out = nothing.as_subclass(LazyEdges)
        out.title, out.arguments, out.message, out._compute, out._value = name, arguments, message, compute, None
        out.shards, out.with_grad, out._drawn = shards, torch.is_grad_enabled(), False
        out.versions = _versions(arguments)
        return out

    def may_be_fused(self, shards: EdgeShards) -> bool:
        """Whether a message function over `shards` may compute it, with the same result as computing it whole."""
        self._refuse_changes()
        return self._value is None and self.shards is shards and self.with_grad == torch.is_grad_enabled()

    def fused(self, random: bool) -> None:
        """Note that a message function has computed it. If it drew `random` numbers, another use would draw others."""
        self._drawn = self._drawn or random

    def materialise(self) -> Tensor:
        """The edge tensor, ``[num_edges, ...]``. Collective on the first use."""
        if self._value is None:
            self._refuse_changes()
        with torch.set_grad_enabled(self.with_grad):
            return super().materialise()

    def _refuse_changes(self) -> None:
        if self._drawn:
            raise RefusedError(
                f"{self.title}: the result of edge_updater is used a second time, but it holds random numbers "
                f"(dropout) that were drawn inside the message function. Switch dropout off for this call (eval), or "
                f"use the result once"
            )
        if self._value is None and self.versions != _versions(self.arguments):
            raise RefusedError(
                f"{self.title}: a tensor given to edge_updater was changed in place before its result was used. Use "
                f"the form that returns a new tensor"
            )


def _versions(arguments: Arguments) -> list[int]:
    tensors = [t for group in (arguments.src, arguments.dst, arguments.edge) for t in group.values()]
    return [torch_private.version_of(t) for t in tensors if not t.is_inference()]


class LazySums(Lazy):
    """Sums over in-edges, ``[num_dst, channels]``, before they are computed.

    If the first use is `torch.nn.functional.linear`, the engine may apply the linear map before it sums.
    """

    @staticmethod
    def make(nothing: Tensor, compute: Callable[..., Tensor]) -> Any:
        """A stand-in for what ``compute()`` returns; ``compute(weight)`` returns ``F.linear`` of that.

        Args:
            nothing: a tensor without elements, on which it is made.
        """
        out = nothing.as_subclass(LazySums)
        out._compute, out._value = compute, None
        return out

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
        return super().__torch_function__(func, types, args, kwargs)
