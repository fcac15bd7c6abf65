"""Node functions on whole neighbourhoods, of which a rank has some: averages over all of them are refused.

A median or an LSTM over neighbours sorts all edges at once, so not every function that puts rows together is wrong.
Refused are those by whose name they are averages of a kind. A product of matrices, or a maximum, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.following.user_line import is_asked_by, user_line
from shardpass.core.ranks import torch_private
from shardpass.errors import RefusedError

_PUT_TOGETHER = frozenset(
    "mean nanmean sum nansum std var std_mean var_mean prod norm linalg_vector_norm logsumexp softmax log_softmax "
    "batch_norm".split()
)


class Apart(TorchFunctionMode):
    """Refuses averages over the rows of all edges, or of all nodes: a rank has its own ones only.

    Args:
        name: of the program.
        messages: what the node function is given, a row for each edge.
        counts: the numbers of the rank's edges and nodes.
    """

    def __init__(self, name: str, messages: Iterable[Tensor], counts: tuple[int, int]) -> None:
        super().__init__()
        self._name, self._counts = name, [(count,) for count in counts]
        self._made: Any = torch_private.WeakTensorKeyDictionary()  # of messages
        self._made.update(dict.fromkeys(messages, True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not any(isinstance(one, Tensor) and one in self._made for one in torch_private.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        is_of_rows = isinstance(first, Tensor) and first in self._made and first.shape[:1] in self._counts
        puts_together = is_of_rows and name in _PUT_TOGETHER and _is_over_rows(name, first, args, kwargs)
        if puts_together and not is_asked_by("shardpass"):  # whose norms are over all ranks
            raise RefusedError(
                f"{self._name}: {user_line()}: `{name}` in aggregate() puts rows of this rank together, and other "
                f"ranks have the rest. Compute it outside of the layer, where it is taken over all ranks"
            )
        out = func(*args, **kwargs)
        self._made.update({one: True for one in torch_private.tree_leaves(out) if isinstance(one, Tensor)})
        return out


def _is_over_rows(name: str, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of `_PUT_TOGETHER` goes over the first dimension of its `first` argument."""
    place = 2 if name.endswith("norm") else 1
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    dims = [dim] if type(dim) is int else dim if isinstance(dim, (tuple, list)) else []
    return name == "batch_norm" or not dims or 0 in dims or -first.dim() in dims
