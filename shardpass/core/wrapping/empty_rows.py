"""A rank without nodes or edges runs the same code as the other ranks, on tensors without rows."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.following import user_line
from shardpass.errors import RefusedError

_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)


class EmptyRows(TorchFunctionMode):
    """A context in which ``h.view(len(h), -1, 4)`` of no rows has the shape that it has of one row.

    Torch alone cannot tell what the -1 stands for. `pdist`, which puts rows together, is refused here too: while other
    ranks refuse it, backward through no rows would kill this process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RESHAPES and args and isinstance(args[0], Tensor) and args[0].numel() == 0:
            args = _with_sizes(args[0], args[1:])
        if func is torch.pdist and len((*args, *(kwargs or {}).values())[0]) == 0:
            raise RefusedError(
                f"{user_line()}: `pdist` puts rows together, and this rank has none of them. Compute distances before "
                f"you partition, or between the ends of edges"
            )
        return func(*args, **(kwargs or {}))


def _with_sizes(tensor: Tensor, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a reshape of `tensor`, with a -1 beside a 0 replaced by its value for a tensor of one row."""
    given = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)
    shape = [int(size) for size in given if isinstance(size, int)]  # plain numbers, also where rows are followed
    if len(shape) < len(given) or shape.count(-1) != 1 or 0 not in shape:
        return (tensor, *sizes)
    one_row = prod(max(1, int(size)) for size in tensor.shape)
    known = prod(max(1, size) for size in shape if size != -1)
    if one_row % known:
        return (tensor, *sizes)
    return (tensor, [one_row // known if size == -1 else size for size in shape])
