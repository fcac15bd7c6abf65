"""A rank without nodes or edges runs the same code as the other ranks, on tensors without rows."""

from __future__ import annotations

from collections.abc import MutableMapping
from math import prod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardpass.core.following import OwnCount, own_of, unfollowed_anywhere, user_line
from shardpass.core.ranks import torch_private
from shardpass.errors import RefusedError

_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)
_FLATTENS = (*_RESHAPES, Tensor.flatten, torch.flatten, Tensor.ravel, torch.ravel)


class EmptyRows(TorchFunctionMode):
    """A context in which functions of no rows give no rows, where torch alone cannot tell or refuses to.

    ``h.view(len(h), -1, 4)`` of no rows has the shape that it has of one row; a convolution, a Fourier transform or a
    quantile within each row gives the rows that it has for one, without that one. `pdist`,
    which puts rows together, is refused here too: while other ranks refuse it, backward through no rows would kill this
    process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._widths: MutableMapping[Tensor, int] = torch_private.WeakTensorKeyDictionary()
        """How many entries of a vector without entries would be those of one row, as ``h.view(-1)`` has them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RESHAPES and args and isinstance(args[0], Tensor) and own_of(args[0].numel()) == 0:
            args = _with_sizes(args[0], args[1:], self._width(args[0]))
        if func is torch.pdist and len((*args, *(kwargs or {}).values())[0]) == 0:
            raise RefusedError(
                f"{user_line()}: `pdist` puts rows together, and this rank has none of them. Compute distances before "
                f"you partition, or between the ends of edges"
            )
        try:
            return self._noted(func, args, func(*args, **(kwargs or {})))
        except (RuntimeError, IndexError) as error:
            is_of_torch = type(error.__cause__ or error) in (RuntimeError, IndexError)  # and not of another rank
            without = _of_made_up_rows(func, args, kwargs or {}) if is_of_torch else None
            if without is None:
                raise
            return without

    def _noted(self, func: Any, args: Any, out: Any) -> Any:
        """`out`, with a note of its width if it is a vector without entries that was made of rows."""
        if isinstance(out, Tensor) and type(args) is tuple and out.dim() == 1 and out.numel() == 0:
            given = [arg for arg in args if isinstance(arg, Tensor)]
            found = [self._width(one) for one in given if one.dim() == 1 or func in _FLATTENS]
            if max(found, default=1) > 1:
                self._widths[out] = max(found)
        return out

    def _width(self, tensor: Tensor) -> int:
        """How many entries `tensor` has for a row, if it has none now."""
        return self._widths.get(tensor, prod(max(1, own_of(size)) for size in tensor.shape))


def _of_made_up_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` gives for a made-up row where a tensor has none, without that row; `None` if that cannot be told."""
    leaves, structure = torch_private.tree_flatten((args, kwargs))
    is_plain = all(type(leaf) in (Tensor, nn.Parameter) for leaf in leaves if isinstance(leaf, Tensor))
    in_place = getattr(func, "__name__", "_").endswith("_")
    if in_place or not is_plain or not any(_is_empty(leaf) for leaf in leaves):
        return None
    results = []
    for count in (1, 2):  # the dimension that grows holds rows
        made = [_with_rows(leaf, count) if _is_empty(leaf) else leaf for leaf in leaves]
        given, named = torch_private.tree_unflatten(made, structure)
        try:
            results.append(func(*given, **named))
        except (RuntimeError, IndexError):
            return None
    one, two = results
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.dim() != two.dim():
        return None
    dims = [dim for dim in range(one.dim()) if one.size(dim) != two.size(dim)]
    return one.narrow(dims[0], 0, 0) if len(dims) == 1 else None


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() == 0


def _with_rows(empty: Tensor, count: int) -> Tensor:
    """`count` rows of zeros for none, connected to it."""
    shape = [count if size == 0 else own_of(size) for size in empty.shape]
    with unfollowed_anywhere():
        rows = empty.new_zeros(shape)
        return rows + empty.sum() if empty.is_floating_point() else rows


def _with_sizes(tensor: Tensor, sizes: tuple[Any, ...], one_row: int) -> tuple[Any, ...]:
    """The arguments of a reshape of `tensor`, with a -1 beside a 0 replaced by its value for a tensor of one row."""
    given = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)
    shape = [own_of(size) for size in given if isinstance(size, (Integral, OwnCount))]
    if len(shape) < len(given) or shape.count(-1) != 1 or 0 not in shape:
        return (tensor, *sizes)
    known = prod(max(1, size) for size in shape if size != -1)
    if one_row % known:
        return (tensor, *sizes)
    return (tensor, [one_row // known if size == -1 else size for size in shape])
