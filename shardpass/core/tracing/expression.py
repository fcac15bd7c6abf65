"""What a tensor inside a message function is made of, as far as a few operations go: this is how layers are recognised.

An `Expr` stands for a tensor with one row per edge, or per destination. Its leaves are inputs of the message function,
results of reductions, tensors made outside, and anything whose origin was not followed (`opaque`, equal only to
itself). A change of shape that keeps the order of the values is no operation: it only changes `tail`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shardpass.core.ranks import torch_private
from shardpass.core.tracing.reducers import accumulator_dtype

BINARY = {
    name: op
    for op, names in (
        ("add", "add __add__ __radd__"),
        ("sub", "sub __sub__"),
        ("mul", "mul __mul__ __rmul__"),
        ("div", "div true_divide __truediv__ __div__"),
    )
    for name in names.split()
}
SWAPPED = {"rsub": "sub", "__rsub__": "sub", "__rdiv__": "div", "__rtruediv__": "div"}
"""Operations whose second argument comes first."""
UNARY = frozenset("relu sigmoid tanh exp log log1p sqrt neg abs square silu softplus".split())
SAME_FUNCTIONS = {"__neg__": "neg", "negative": "neg", "__abs__": "abs", "absolute": "abs"}
KEEPS_VALUES = frozenset(["view", "reshape", "unsqueeze", "squeeze", "contiguous", "clone", "to", "view_as", "flatten"])
SOURCE, DESTINATION, EDGE = "src", "dst", "edge"  # the sides of `Key`


@dataclass(frozen=True)
class Expr:
    """One tensor: ``op`` of ``args`` (expressions, numbers, or what names a leaf), with ``tail = shape[1:]``.

    The leaves are `SOURCE`, `DESTINATION` and `EDGE` (name), ``reduced`` (number of the reduction), ``outside`` (id)
    and ``opaque`` (what identifies the tensor). The operations are those of `BINARY` and of `UNARY`, ``leaky_relu`` (x,
    slope), ``clamp`` (x, low, high), ``sum`` over the last dimension, ``gather`` of a row per destination, ``detach``,
    ``dropout`` (x, p), ``cat`` along the last dimension, ``pick`` (x, place) of ``x[:, place]``, and ``cast`` (x, dtype
    of x) to the dtype of the operation that uses it.
    """

    op: str
    args: tuple[Any, ...]
    tail: tuple[int, ...]

    def shaped(self, tail: tuple[int, ...]) -> Expr:
        """The same values in the same order, with another tail."""
        return replace(self, tail=tail)


Known = Callable[[Tensor], Expr]
"""Gives what a tensor is made of."""


def apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, known: Known) -> Expr | None:
    """What `out`, the result of the torch function `name`, is made of; None if that is not followed."""
    first = args[0] if args else None
    if name in ("cat", "concat"):
        return _side_by_side(args, kwargs, out, known)
    if name == "stack" and isinstance(first, (list, tuple)) and len(first) == 1 and out.size(0) == first[0].size(0):
        return known(first[0]).shaped(tuple(out.shape[1:])) if out.dim() > 1 else None
    if not isinstance(first, Tensor) or out.dim() == 0:
        return None
    tail = tuple(out.shape[1:])
    if name in ("__getitem__", "select"):
        return _picked(name, args, out, known)
    if name == "detach":
        return Expr("detach", (known(first),), tail)
    if name in BINARY and not kwargs and len(args) == 2:
        return _binary(BINARY[name], args, out, known)
    if name in SWAPPED and not kwargs and len(args) == 2:
        return _binary(SWAPPED[name], args[::-1], out, known)
    if name in ("exp", "sum") and out.dtype == accumulator_dtype(first.dtype) != first.dtype:  # autocast widens it
        widened = Expr("cast", (known(first), first.dtype), tuple(first.shape[1:]))
        return apply(name, (first.to(out.dtype), *args[1:]), kwargs, out, lambda _: widened)
    if out.dtype != first.dtype:
        return None
    if name in KEEPS_VALUES:
        return known(first).shaped(tail) if first.dim() and out.size(0) == first.size(0) else None
    if name == "dropout":
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        return Expr("dropout", (known(first), float(p)), tail)
    if (function := _function(name, args, kwargs)) is not None:
        return Expr(function[0], (known(first), *function[1:]), tail)
    if name == "leaky_relu":
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01)
        return Expr("leaky_relu", (known(first), float(slope)), tail) if _is_number(slope) else None
    if name == "sum":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        last = dim in (-1, first.dim() - 1) or dim in ([-1], (-1,))
        return Expr("sum", (known(first),), tail) if last and not keep and first.dim() > 1 else None
    return None


def _function(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The function of `UNARY` that a call is, or ``("clamp", low, high)``. What it writes in place is not followed."""
    name, others = SAME_FUNCTIONS.get(name, name), args[1:]
    if name in ("pow", "__pow__"):
        return ("square",) if len(others) == 1 and _is_number(others[0]) and others[0] == 2 and not kwargs else None
    if name == "softplus":
        given = {"beta": 1, "threshold": 20} | dict(zip(("beta", "threshold"), others)) | kwargs
        is_plain = len(given) == 2 and all(map(_is_number, given.values()))
        return (name,) if is_plain and given == {"beta": 1, "threshold": 20} else None
    if name in ("clamp", "clamp_min", "clamp_max") and kwargs.keys() <= {"min", "max"}:
        given = dict(zip({"clamp_min": ("min",), "clamp_max": ("max",)}.get(name, ("min", "max")), args[1:])) | kwargs
        bounds = [given.get("min"), given.get("max")]
        if not all(bound is None or _is_number(bound) for bound in bounds):
            return None
        return ("clamp", *(None if bound is None else float(bound) for bound in bounds))
    return (name,) if name in UNARY and not others and kwargs.keys() <= {"inplace"} else None


def _is_number(value: Any) -> bool:
    """Whether `value` is a number of Python: a tensor may hold another one in the next call, or need a gradient."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _side_by_side(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, known: Known) -> Expr | None:
    parts = args[0] if args else kwargs.get("tensors", ())
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if (
        dim not in (-1, out.dim() - 1)
        or out.dim() < 2
        or any((t.dim(), t.dtype) != (out.dim(), out.dtype) for t in parts)
    ):
        return None
    return Expr("cat", tuple(known(part) for part in parts), tuple(out.shape[1:]))


def _picked(name: str, args: tuple[Any, ...], out: Tensor, known: Known) -> Expr | None:
    """``x[:, place]``, or the same by ``select``."""
    first, where = args[0], args[1:]
    if name == "__getitem__" and isinstance(args[1], tuple) and len(args[1]) == 2 and args[1][0] == slice(None):
        where = (1, args[1][1])
    if len(where) != 2 or where[0] != 1 or type(where[1]) is not int or first.dim() < 2:
        return None
    return Expr("pick", (known(first), where[1]), tuple(out.shape[1:]))


def _binary(op: str, args: tuple[Any, ...], out: Tensor, known: Known) -> Expr | None:
    tail = tuple(out.shape[1:])
    parts: list[Expr | float] = []
    for arg in args:
        if isinstance(arg, Tensor):
            expr = known(arg)
            if arg.dim() != out.dim() and expr.op != "outside":
                return None  # rows would stand where columns do
            parts.append(expr if arg.dtype == out.dtype else Expr("cast", (expr, arg.dtype), expr.tail))
        elif _is_number(arg):
            parts.append(float(arg))
        else:
            return None
    return Expr(op, tuple(parts), tail)


def opaque(tensor: Tensor, storage: int, writes: int) -> Expr:
    """The leaf for a tensor that was not followed; equal for tensors that view the same memory in the same way."""
    version = torch_private.version_of(tensor)
    view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return Expr("opaque", (storage, writes, version, view, tensor.grad_fn is None), tuple(tensor.shape[1:]))


def uncast(expr: Expr) -> Expr:
    """`expr` without a cast that kernels may make before: of an input, or of half precision to a wider dtype."""
    if expr.op != "cast":
        return expr
    inner, dtype = expr.args
    is_wide = accumulator_dtype(dtype) == dtype
    return expr if is_wide and inner.op not in (SOURCE, DESTINATION, EDGE) else inner.shaped(expr.tail)


def plain(expr: Expr) -> Expr:
    """`expr` without `detach` around it: the same values, whatever becomes of gradients."""
    while expr.op == "detach" and isinstance(expr.args[0], Expr):
        expr = expr.args[0].shaped(expr.tail)
    return expr
