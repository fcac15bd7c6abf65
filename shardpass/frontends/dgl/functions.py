"""DGL's built-in message functions for the engine: which operands they read and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dgl import DGLError
from torch import Tensor

from shardpass.core.tracing import Inputs, Key, Side
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.private import BinaryMessageFunction, BuiltinFunction, CopyMessageFunction, TargetCode

_SIDES: dict[int, Side] = {TargetCode.SRC: "src", TargetCode.DST: "dst", TargetCode.EDGE: "edge"}
REDUCERS = ("sum", "mean", "max", "min")


def is_builtin(function: Any) -> bool:
    """Whether `function` is one of ``dgl.function``."""
    return isinstance(function, BuiltinFunction)


def is_extremum(function: Any) -> bool:
    """Whether `function` is the reduce function ``max`` or ``min`` of ``dgl.function``."""
    return is_builtin(function) and function.name in ("max", "min")


def operands(function: Any) -> list[Key]:
    """The keys of the operands of a built-in message function."""
    if isinstance(function, CopyMessageFunction):
        return [Key(_SIDES[function.target], function.in_field)]
    if isinstance(function, BinaryMessageFunction):
        return [Key(_SIDES[function.lhs], function.lhs_field), Key(_SIDES[function.rhs], function.rhs_field)]
    raise RefusedError(
        f"{function!r} is not a built-in message function that shardpass knows. Write it as a function of edges"
    )


def reducer_of(function: Any, out_field: str | None) -> str:
    """The name of a built-in reduce function. It must read the field `out_field`, unless that is `None`."""
    if function.name not in REDUCERS:
        raise RefusedError(f"the reduce function {function.name!r} is not supported; known are {', '.join(REDUCERS)}")
    if out_field is not None and out_field != function.msg_field:
        raise DGLError(
            f"Invalid message and reduce function pair: the message is written to {out_field!r}, but "
            f"{function.name} reads {function.msg_field!r}. They must be the same field"
        )
    return str(function.name)


def message_of(function: Any) -> Callable[[Inputs], Tensor]:
    """The function that computes a built-in message on some edges, ``[E, ...]``."""
    reads = operands(function)

    def message(inputs: Inputs) -> Tensor:
        rows = [inputs[key] for key in reads]
        if len(rows) == 1:
            return rows[0]
        return _OPERATIONS[function.binary_op](*_same_dims(*rows))

    return message


def _same_dims(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors with as many dimensions. DGL puts ones after the first dimension of the one that has fewer."""
    if left.dim() == right.dim():
        return left, right
    dims = max(left.dim(), right.dim())

    def padded(tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.size(0), *[1] * (dims - tensor.dim()), *tensor.shape[1:])

    return padded(left), padded(right)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1).unsqueeze(-1)


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "dot": _dot,
}
