"""What puts the two rows of an edge list in another order, or takes one of them: ``edge_index[[1, 0]]``, ``.chunk(2)``.

No table says what these functions do with their arguments. They are run on a made-up list, whose numbers tell which row
and edge they are, and whose edges are more than any number among the arguments: so what takes edges by their position
is never taken for the whole list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following import user_line
from shardpass.core.ranks import torch_private
from shardpass.errors import RefusedError

_MOVES = frozenset(
    "__getitem__ index_select select narrow chunk split split_with_sizes tensor_split hsplit vsplit unbind flip flipud "
    "fliplr roll t adjoint transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze".split()
)
_PROPERTIES = frozenset("T mT H mH".split())
_SHAPES = frozenset("view reshape flatten ravel".split())


@dataclass(frozen=True)
class Part:
    """What of an edge list a tensor is.

    Args:
        rows: the rows that it has, in its order: one of them, or both.
        shape: its shape, with -1 for the number of edges; ``(-1,)`` with both rows, one after the other.
    """

    rows: tuple[int, ...]
    shape: tuple[int, ...]


def rearranged(func: Callable[..., Any], name: str, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A `Part` for each tensor that `func` makes of a list of `count` edges, or None if it is no such function.

    Args:
        args: those after the list.

    Raises:
        RefusedError: it makes something else of the list.
    """
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    leaves = torch_private.tree_leaves((args, kwargs))
    picks = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if name not in _MOVES | _PROPERTIES | _SHAPES or any(one.dtype != torch.int64 or one.numel() > 2 for one in picks):
        return None
    if name in _SHAPES:
        return _reshaped(func, name, count, args, kwargs)
    numbers = [int(leaf) for leaf in leaves if isinstance(leaf, int)]
    numbers += [edge for leaf in leaves if isinstance(leaf, slice) for edge in (leaf.start, leaf.stop) if edge]
    made_up = 3 + max(map(abs, numbers), default=0)
    places = torch.arange(2 * made_up).view(2, made_up)
    out = func(places, *args, **kwargs)
    return torch_private.tree_map(lambda found: _part(found, places, name, args), out)


def _reshaped(func: Callable[..., Any], name: str, count: int, args: Any, kwargs: Any) -> Part:
    shape = tuple(func(torch.empty(2, count, dtype=torch.int64, device="meta"), *args, **kwargs).shape)
    if shape not in ((2, count), (2 * count,)):
        raise refused_shape(name, args)
    return Part((0, 1), (2, -1) if len(shape) == 2 else (-1,))


def _part(found: Tensor, places: Tensor, name: str, args: tuple[Any, ...]) -> Part:
    count = places.size(1)
    lists = found.reshape(-1, count) if found.numel() % count == 0 else found[:0]
    rows = tuple(row for one in lists for row in (0, 1) if torch.equal(one, places[row]))
    if not 0 < len(rows) == len(lists) or (len(rows) > 1 and (len(set(rows)) < 2 or found.shape != places.shape)):
        raise refused_shape(name, args)
    return Part(rows, tuple(-1 if size == count else size for size in found.shape))


def refused_shape(name: str, args: tuple[Any, ...]) -> RefusedError:
    """An error for what is neither the edge list nor one of its rows."""
    what = f"edge_index[{short(args[0])}]" if name == "__getitem__" else name
    return RefusedError(
        f"{user_line()}: `{what}` on the edge_index of a sharded graph gives neither the list [2, num_edges] nor one "
        f"of its rows, and every rank has other edges at other positions. Take rows by src, dst = edge_index, and "
        f"edges by a mask over them: edge_index[:, mask] is edge_index.t()[mask].t(). Or change the edges before you "
        f"partition"
    )


def short(key: Any) -> str:
    """What an index looks like, without the numbers of tensors."""
    if isinstance(key, tuple):
        return ", ".join(map(short, key))
    if isinstance(key, slice):
        return ":".join("" if at is None else str(at) for at in (key.start, key.stop))
    return f"a {type(key).__name__} of shape {[*key.shape]}" if isinstance(key, Tensor) else repr(key)
