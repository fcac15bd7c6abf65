"""The tensor that stands for edge data which are not computed yet, and which functions leave it so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.ranks import draw_seed
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.deferred import Deferred, Dropout, RowsOf, TorchCall

_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_cuda",
    "is_sparse",
    "requires_grad",
    "itemsize",
    "nbytes",
)
_METHODS = frozenset("size dim numel nelement ndimension __len__ is_floating_point is_complex".split())
"""What is known of a tensor before it is computed."""

_ENTRYWISE = frozenset(
    "abs neg exp log sqrt square sin cos tanh sigmoid relu relu6 leaky_relu elu selu celu gelu silu mish softplus "
    "softsign logsigmoid hardtanh clamp float double __neg__".split()
)
_PAIRWISE = frozenset(
    "add sub mul div true_divide pow maximum minimum __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
    "__rtruediv__ __div__ __rdiv__ __pow__".split()
)
_SUMS = frozenset(["sum", "mean"])
_SHAPES = frozenset(["unsqueeze", "squeeze"])


class LazyEdges(Tensor):
    """Edge data ``[num_edges, ...]`` that are not computed yet.

    What takes its entries, or rows, one by one leaves it so (see `recorded`). ``update_all`` computes the weights of an
    attention on the way, and no tensor with a row per edge exists. Any other use computes it whole, which is
    collective: the same code has to run on every rank. Looking at its shape, dtype or ``repr`` is no use.
    """

    data_of_edges: Deferred

    @staticmethod
    def of(data: Deferred) -> LazyEdges:
        """The tensor that stands for `data`."""
        out: LazyEdges = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            LazyEdges,
            (data.edges.num, *data.sample.shape[1:]),
            dtype=data.sample.dtype,
            device=data.sample.device,
            requires_grad=data.requires_grad,
        )
        out.data_of_edges = data
        return out

    def materialise(self) -> Tensor:
        """The edge data as an ordinary tensor. Collective on the first use."""
        return self.data_of_edges.value()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        data = self.data_of_edges
        if data.is_known:
            return repr(data.value())
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyEdges({list(self.shape)}, {self.dtype}, not computed yet)"

    def __format__(self, spec: str) -> str:
        return format(self.data_of_edges.value(), spec) if self.data_of_edges.is_known else repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_of_torch(func, _METHODS) or any(func == getattr(Tensor, name).__get__ for name in _PROPERTIES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _refuse_inside_function((*args, *kwargs.values()))
        data = recorded(func, args, kwargs)
        if data is not None:
            return LazyEdges.of(data)
        return func(*ordinary(args), **ordinary(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise RefusedError(
            f"edge data that are not computed yet (from apply_edges or edge_softmax) were handed to `{func}` in a way "
            f"that cannot be followed (TorchScript, or C++). Pass graph.edata[...].clone()"
        )


def _refuse_inside_function(values: Iterable[Any]) -> None:
    """Refuse edge data that were given to an autograd Function before they were computed: their gradient is lost."""
    mine = {id(value) for value in values if isinstance(value, LazyEdges) and value.data_of_edges.requires_grad}
    frame = sys._getframe(2) if mine else None
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    while frame is not None:
        if frame.f_code is apply and any(id(given) in mine for given in frame.f_locals.get("args", ())):
            raise RefusedError(
                f"edge data that are not computed yet (from apply_edges or edge_softmax) were given to the autograd "
                f"Function {frame.f_locals['cls'].__name__}, which would lose their gradient. Pass "
                f"graph.edata[...].clone()"
            )
        frame = frame.f_back


def ordinary(value: Any) -> Any:
    """`value` with the edge data in it computed; lists, tuples and dicts are looked through. Collective."""
    if isinstance(value, LazyEdges):
        return value.materialise()
    if type(value) in (list, tuple):
        return type(value)(ordinary(item) for item in value)
    if type(value) is dict:
        return {key: ordinary(item) for key, item in value.items()}
    return value


def recorded(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred | None:
    """What `function` makes of edge data, if it can wait; None where they have to be computed."""
    lazy = [a.data_of_edges for a in (*args, *kwargs.values()) if isinstance(a, LazyEdges)]
    edges = lazy[0].edges if lazy else None
    if edges is None or any(data.is_known or data.edges is not edges for data in lazy) or cannot_wait():
        return None
    if function is F.dropout:
        return _dropped(*args, **kwargs)
    rule = next((rule for names, rule in _RULES if _is_of_torch(function, names)), None)
    if rule is None or kwargs.get("out") is not None or kwargs.get("inplace"):
        return None
    known = [_operand(a, lazy[0]) for a in args], {name: _operand(a, lazy[0]) for name, a in kwargs.items()}
    given = [*known[0], *known[1].values()]
    if not isinstance(known[0][0] if args else None, Deferred) and rule is not _pair:
        return None
    if any(a is NotImplemented for a in given) or not rule(lazy[0].sample.dim(), *args, **kwargs):
        return None
    return TorchCall(edges, function, tuple(known[0]), known[1])


def _is_of_torch(function: Any, names: frozenset[str]) -> bool:
    """Whether `function` is one of torch, of its tensors or of its functional interface, with one of the `names`."""
    name = getattr(function, "__name__", "")
    return name in names and any(function == getattr(home, name, None) for home in (torch, Tensor, F))


def cannot_wait() -> bool:
    """Whether torch keeps no count of changes now, so that a later use could not tell that something was changed."""
    return torch.is_inference_mode_enabled()


def _operand(value: Any, beside: Deferred) -> Any:
    """`value` as an argument of a `TorchCall`; NotImplemented if rows cannot be told from it."""
    if isinstance(value, LazyEdges):
        data = value.data_of_edges
        return data if data.sample.dim() == beside.sample.dim() else NotImplemented
    if not isinstance(value, Tensor):
        return value
    if type(value) not in (Tensor, torch.nn.Parameter) or value.is_inference():
        return NotImplemented
    dims = beside.sample.dim()
    if value.dim() < dims:
        return value
    if value.dim() > dims or value.size(0) not in (1, beside.edges.num):
        return NotImplemented
    return RowsOf(value)


def _dropped(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Deferred | None:
    data: Deferred = input.data_of_edges
    if not training or p == 0:
        return data
    return None if inplace or not 0 < p < 1 else Dropout(data, p, draw_seed(data.edges.plan.comm))


def _entry(dims: int, *args: Any, **kwargs: Any) -> bool:
    return True


def _pair(dims: int, *args: Any, **kwargs: Any) -> bool:
    return len(args) == 2 and not kwargs


def _sum(dims: int, input: Any, *args: Any, **kwargs: Any) -> bool:
    """Not over all entries, nor over the edges."""
    dim = kwargs.get("dim", args[0] if args else None)
    chosen = dim if isinstance(dim, (tuple, list)) else [dim]
    return bool(chosen) and all(isinstance(d, int) and -dims < d < dims and d != 0 for d in chosen)


def _shape(dims: int, input: Any, *args: Any, **kwargs: Any) -> bool:
    """Not in front of the edges."""
    dim = kwargs.get("dim", args[0] if args else None)
    return isinstance(dim, int) and dim not in (0, -dims, -dims - 1)


_RULES: tuple[tuple[frozenset[str], Callable[..., bool]], ...] = (
    (_ENTRYWISE, _entry),
    (_PAIRWISE, _pair),
    (_SUMS, _sum),
    (_SHAPES, _shape),
)
