"""What a probe sees: an `EdgeTrace` that follows dependence, simple expressions and captures.

[Note: how dependence is followed]
Dependence is tracked per storage through every call the trace sees; a tensor of unknown origin that autograd says was
made inside counts as depending on everything. Tensors that require grad and were made outside are captures: they become
inputs of the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.tracing.edge_trace import SHAPE_OPS, EdgeTrace, sequence_number
from shardpass.core.tracing.expression import (
    BINARY,
    DESTINATION,
    EDGE,
    KEEPS_VALUES,
    SOURCE,
    Expr,
    apply,
    opaque,
    plain,
)
from shardpass.core.tracing.program import Inputs, Program
from shardpass.core.tracing.reducers import REDUCERS, Base
from shardpass.errors import RefusedError

EVERYTHING = "*"
KINDS = {"s": SOURCE, "d": DESTINATION, "e": EDGE}
SHAPE_ONLY = frozenset(["new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like", "new_empty"])
TAMPERS = frozenset(["register_hook", "retain_grad", "register_post_accumulate_grad_hook", "set_", "requires_grad_"])
HARMLESS_USES = frozenset(
    "detach size dim numel __get__ ndimension index_select __getitem__ expand expand_as is_floating_point __len__ "
    "stride element_size".split()
).union(SHAPE_ONLY, KEEPS_VALUES, BINARY)
LEAVES_TORCH = frozenset(
    "numpy tolist __array__ __dlpack__ item __bool__ __int__ __float__ __index__ __complex__".split()
)


class ProbePhase:
    """Reduces the sample's own messages and hands the result back as a fresh leaf."""

    def __init__(self, num_dst: int, whole_dst: int) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, 0, whole_dst
        self.found: list[tuple[str, Tensor, Base, Tensor]] = []

    def known_base(self, k: int) -> Base | None:
        return None

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        reducer = REDUCERS[op]
        state = reducer.init(self.num_dst, values.shape[1:], values.detach())
        reducer.accumulate(state, values.detach(), index)
        result = reducer.value(state, base).to(values.dtype)
        if result.is_floating_point():
            result = result.requires_grad_()
        self.found.append((op, values, base, result))
        return result


class ProbeTrace(EdgeTrace):
    """An `EdgeTrace` that also follows dependence, simple expressions, and captures."""

    def __init__(self, program: Program, inputs: Inputs, phase: ProbePhase) -> None:
        device = inputs.index.device
        super().__init__(program, inputs.index, phase, generator=lambda: torch.Generator(device).manual_seed(0))
        self.depends: dict[int, set[str]] = {}
        self.exprs: dict[int, tuple[Expr, Any]] = {}  # of tensors, by id, with the node of autograd they had then
        self.writes: dict[int, int] = {}  # how often a storage was written to
        self.used_otherwise: set[int] = set()  # reductions whose result is more than gathered back to edges
        self.is_tampered = False  # hooks on tensors, or data exchanged: expressions do not say what is computed
        self.messages: dict[int, Expr] = {}  # of reductions, by number, as they were when they were reduced
        self.captures: dict[int, Tensor] = {}
        self.norms: dict[int, Any] = {}
        self.reduced: list[set[str]] = []  # what the messages of each reduction depended on when it was made
        self.held: list[Tensor] = []  # keeps ids and storages from being used again
        self.leaves: dict[int, str] = {}
        self.first_node = sequence_number()
        for kind, rows in (("s", inputs.src), ("d", inputs.dst), ("e", inputs.edge)):
            for key, tensor in rows.items():
                self.adopt(tensor, {f"{kind}:{key}"}, f"{kind}:{key}")
                self._enter(tensor, Expr(KINDS[kind], (key,), tuple(tensor.shape[1:])))
        self.adopt(inputs.index, set(), "")

    def adopt(self, tensor: Tensor, depends: set[str], leaf: str) -> None:
        """Enter a tensor made by the probe."""
        self.held.append(tensor)
        self.depends.setdefault(_storage(tensor), set()).update(depends)
        if leaf:
            self.leaves[id(tensor)] = leaf

    def edge_moments(self, norm: Any, rows: Tensor) -> Tensor:
        k = self.count
        with torch._C.DisableTorchFunction():
            self.reduced.append(set(self.origin(rows)))
        moments = super().edge_moments(norm, rows)
        self.norms[k] = norm
        with torch._C.DisableTorchFunction():
            self.adopt(self.phase.found[k][3], {f"r:{k}"}, f"r:{k}")  # type: ignore[attr-defined]
            self.adopt(moments, {f"r:{k}"}, "")
        return moments

    def first_extremum(self, op: str, values: Tensor, places: Tensor, base: float = 0.0) -> Tensor:
        k = self.count
        with torch._C.DisableTorchFunction():
            self.reduced.append(set(self.origin(values)))
        result = super().first_extremum(op, values, places, base)
        with torch._C.DisableTorchFunction():
            self.adopt(self.phase.found[k][3], {f"r:{k}"}, f"r:{k}")  # type: ignore[attr-defined]
            self.adopt(result, {f"r:{k}"}, "")
        return result

    def origin(self, tensor: Tensor) -> set[str]:
        """What `tensor` depends on; enters captures on the way."""
        key = _storage(tensor)
        if key in self.depends:
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() < self.first_node:  # shares memory with one seen before
                self.held.append(tensor)
                self.captures[id(tensor)] = tensor
            return self.depends[key]
        self.held.append(tensor)
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= self.first_node:
                self.depends[key] = {EVERYTHING}
                return self.depends[key]
            self.captures[id(tensor)] = tensor
        return set()

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        depends: set[str] = set()
        for operand in operands:
            depends |= self.origin(operand)
        if name in SHAPE_ONLY:
            depends = set()
        elif name in SHAPE_OPS:  # expand_as(other) and the like: a view of the first
            depends = self.origin(operands[0]) if operands else set()
        origins = {_storage(operand): set(self.origin(operand)) for operand in operands}
        if name in LEAVES_TORCH and depends:
            raise RefusedError(
                f"{self.name}: `{name}` inside a message takes values of a few edges or nodes out of torch, where they "
                f"cannot be followed; a Python branch on them would differ from piece to piece. Use torch.where"
            )
        before = self.count
        versions = [_version(operand) for operand in operands]
        try:
            out = super().run(func, name, args, kwargs, operands)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise RefusedError(
                f"{self.name}: `{name}` changes an input of the message (or a parameter) in place. Use the form that "
                f"returns a new tensor"
            ) from error
        if self.count > before:
            values, result = self.phase.found[-1][1::2]  # type: ignore[attr-defined]
            self.reduced.append(origins[_storage(values)])
            self.messages[before] = self.expr(values)
            self.adopt(result, {f"r:{before}"}, f"r:{before}")
            depends = {f"r:{before}"}
        changed = False
        for operand, version in zip(operands, versions):
            if version != _version(operand) or (version < 0 and _may_write(name, kwargs, operand, out)):
                self._written(name, operand, depends)
                changed = True
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.adopt(tensor, depends, "")
        self._note_uses(name, args, operands)
        if self.count > before:
            expr, cut = Expr("reduced", (before,), tuple(out.shape[1:])), result.requires_grad and not out.requires_grad
            self._enter(out, Expr("detach", (expr,), expr.tail) if cut else expr)
        elif isinstance(out, Tensor) and id(out) not in self.exprs and not changed:
            self._follow(name, args, kwargs, out, operands)
        return out

    def _enter(self, tensor: Tensor, expr: Expr) -> None:
        self.exprs[id(tensor)] = (expr, tensor.grad_fn)

    def _note_uses(self, name: str, args: tuple[Any, ...], operands: list[Tensor]) -> None:
        """Note what becomes of reductions, and what hides from expressions."""
        if name in TAMPERS or name == "__set__":
            self.is_tampered = True
        for operand in operands:
            expr = self.exprs.get(id(operand), (None, None))[0]
            if expr is None or (name in HARMLESS_USES and (name not in BINARY or _adds_a_number(name, args))):
                continue
            expr = plain(expr)
            inner = next((a for a in expr.args if isinstance(a, Expr)), expr) if expr.op == "add" else expr
            if plain(inner).op == "reduced":
                self.used_otherwise.add(plain(inner).args[0])

    def _written(self, name: str, target: Tensor, depends: set[str]) -> None:
        if _storage(target) not in self.depends:
            raise RefusedError(
                f"{self.name}: `{name}` inside a message changes a tensor made outside it. Messages are computed "
                f"several times and in pieces; change it in forward() instead"
            )
        self.adopt(target, depends, "")
        self._forget(target)
        self.writes[_storage(target)] = self.writes.get(_storage(target), 0) + 1

    def expr(self, tensor: Tensor) -> Expr:
        """What `tensor` is made of."""
        found, node = self.exprs.get(id(tensor), (None, None))
        if found is not None and node is tensor.grad_fn:  # else a custom Function, or detach_, came between
            return found
        storage = _storage(tensor)
        if found is None and storage not in self.depends:
            self.held.append(tensor)
            return Expr("outside", (id(tensor),), tuple(tensor.shape[1:]))
        return opaque(tensor, storage, self.writes.get(storage, 0))

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, operands: list[Tensor]
    ) -> None:
        gathers = name == "__getitem__" and self.is_index(args[1])
        if name == "index_select" and len(args) == 3 and self.is_index(args[2]):
            gathers = args[1] in (0, -args[0].dim())
        if gathers and args[0].dim() and not kwargs:
            found: Expr | None = Expr("gather", (self.expr(args[0]),), tuple(out.shape[1:]))
        else:
            found = apply(name, args, kwargs, out, self.expr)
        if found is not None:
            if not out.requires_grad and found.op != "detach" and any(t.requires_grad for t in operands):
                found = Expr("detach", (found,), found.tail)  # made with gradients switched off
            self._enter(out, found)

    def _forget(self, target: Tensor) -> None:
        storage = _storage(target)
        for tensor in self.held:
            if _storage(tensor) == storage:
                self.exprs.pop(id(tensor), None)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _may_write(name: str, kwargs: dict[str, Any], operand: Tensor, out: Any) -> bool:
    """Whether a call may have written into `operand`, where torch keeps no count of it (inference mode)."""
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return in_place or kwargs.get("out") is operand or (out is operand and name not in KEEPS_VALUES)


def _adds_a_number(name: str, args: tuple[Any, ...]) -> bool:
    return BINARY[name] == "add" and len(args) == 2 and any(isinstance(arg, (int, float)) for arg in args)
