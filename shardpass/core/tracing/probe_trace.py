"""What a probe sees: an `EdgeTrace` that follows dependence, simple expressions and captures.

[Note: how dependence is followed]
Dependence is tracked per storage through every call that the trace sees. A tensor of unknown origin that autograd says
was made inside counts as depending on everything. Tensors that require grad and were made outside are captures: they
become inputs of the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shardpass.core.following import user_line, writes_in_place
from shardpass.core.ranks import is_differentiable, torch_private
from shardpass.core.tracing.edge_trace import HARMLESS_OPS, SHAPE_OPS, EdgeTrace, sequence_number
from shardpass.core.tracing.expression import BINARY, KEEPS_VALUES, Expr, apply, opaque, plain
from shardpass.core.tracing.linear_maps import LinearMap, linear_map
from shardpass.core.tracing.program import Inputs, Key, Program
from shardpass.core.tracing.reducers import REDUCERS, Base
from shardpass.errors import RefusedError

EVERYTHING, OUTSIDE = "*", "outside"
Origin = Key | int | str
"""What a tensor depends on: an input, the reduction of this number, a tensor made `OUTSIDE`, or `EVERYTHING`."""
SHAPE_ONLY = frozenset("new_ones new_zeros new_full ones_like zeros_like full_like new_empty".split())
TAMPERS = frozenset("register_hook retain_grad register_post_accumulate_grad_hook set_ requires_grad_ __set__".split())
HARMLESS_USES = frozenset(
    "detach size dim numel __get__ ndimension index_select __getitem__ expand expand_as is_floating_point __len__ "
    "stride element_size".split()
).union(SHAPE_ONLY, KEEPS_VALUES, BINARY)
LEAVES_TORCH = frozenset(
    "numpy tolist __array__ __dlpack__ item __bool__ __int__ __float__ __index__ __complex__".split()
)


class Seen(NamedTuple):
    """A reduction that the probe saw.

    Args:
        op: name of the reducer.
        messages: what was reduced, ``[E, ...]``.
        base: what a destination without a message holds.
        depends: what the messages depended on when they were reduced.
        expr: what the messages were made of.
    """

    op: str
    messages: Tensor
    base: Base
    depends: frozenset[Origin]
    expr: Expr


class ProbePhase:
    """Reduces the sample's own messages and answers with the result as a fresh leaf."""

    def __init__(self, num_dst: int, whole_dst: int) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, 0, whole_dst

    def known_base(self, k: int) -> Base | None:
        return None

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        reducer = REDUCERS[op]
        state = reducer.init(self.num_dst, values.shape[1:], values.detach())
        reducer.accumulate(state, values.detach(), index)
        result = reducer.value(state, base).to(values.dtype)
        return result.requires_grad_() if is_differentiable(result) else result


class ProbeTrace(EdgeTrace):
    """An `EdgeTrace` that also follows dependence, simple expressions, and captures."""

    def __init__(self, program: Program, inputs: Inputs, whole_dst: int, num_edges: int) -> None:
        super().__init__(
            program, inputs, ProbePhase(inputs.num_dst, whole_dst), drops=lambda _, rows, __: torch.ones_like(rows)
        )
        self.seen: list[Seen] = []  # the reductions, in order
        self.captures: dict[int, Tensor] = {}
        self.leaves: dict[int, Origin] = {}  # inputs and results of reductions, by id
        self.used_otherwise: set[int] = set()  # reductions whose result is more than gathered back to edges
        self.reads_values = False  # Python has read numbers of tensors made outside
        self.is_tampered = False  # hooks on tensors, or data exchanged: expressions do not say what is computed
        self.first_node = sequence_number()
        self._num_edges = num_edges
        self.is_rewritten = bool(program.maps)
        self._maps_found: list[tuple[int, LinearMap]] = []  # with the id of the input of each
        self._uses: set[int] = set()  # ids of the tensors that anything else than a linear map has read
        self._depends: dict[int, set[Origin]] = {}
        self._exprs: dict[int, tuple[Expr, Node | None]] = {}  # by id, with the tensor's node of autograd at that time
        self._writes: dict[int, int] = {}  # how often a storage was written to
        self._held: list[Tensor] = []  # keeps ids and storages from being used again
        for key, tensor in inputs.items():
            self._adopt(tensor, {key}, key)
            self._enter(tensor, Expr(key.side, (key.name,), tuple(tensor.shape[1:])))
        self._adopt(inputs.index, set())

    def _base_value(self, base: Tensor, name: str) -> float:
        self.reads_values |= OUTSIDE in self.origin(base)
        return super()._base_value(base, name)

    def _adopt(self, tensor: Tensor, depends: set[Origin], leaf: Origin | None = None) -> None:
        """Enter a tensor made by the probe; `leaf` is what it is if autograd starts there."""
        self._held.append(tensor)
        self._depends.setdefault(_storage(tensor), set()).update(depends)
        if leaf is not None:
            self.leaves[id(tensor)] = leaf

    def _enter(self, tensor: Tensor, expr: Expr, is_detached: bool = False) -> None:
        if is_detached:
            expr = Expr("detach", (expr,), expr.tail)
        self._exprs[id(tensor)] = (expr, tensor.grad_fn)

    def reduce(self, op: str, messages: Tensor, base: Base) -> Tensor:
        number = self.count
        self.seen.append(Seen(op, messages, base, frozenset(self.origin(messages)), self._expr(messages)))
        result = super().reduce(op, messages, base)
        self._adopt(result, {number}, number)
        return result

    def origin(self, tensor: Tensor) -> set[Origin]:
        """What `tensor` depends on; enters captures on the way."""
        key, node = _storage(tensor), tensor.grad_fn
        if key in self._depends:
            if node is not None and torch_private.node_number(node) < self.first_node:  # a view of one seen before
                self._held.append(tensor)
                self.captures[id(tensor)] = tensor
            return self._depends[key]
        self._held.append(tensor)
        if not tensor.requires_grad:
            return {OUTSIDE}
        if node is not None and torch_private.node_number(node) >= self.first_node:
            return self._depends.setdefault(key, {EVERYTHING})
        self.captures[id(tensor)] = tensor
        return {OUTSIDE}

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        origins = [self.origin(operand) for operand in operands]
        if name == "linear" and not self.is_rewritten:
            self._note_linear_map(args, kwargs)
        elif name not in HARMLESS_OPS:
            self._uses.update(id(operand) for operand in operands)
        if name in SHAPE_ONLY:
            origins = []
        elif name in SHAPE_OPS:  # expand_as(other) and the like: a view of the first
            origins = origins[:1]
        depends: set[Origin] = set().union(*origins)
        if name in LEAVES_TORCH and depends <= {OUTSIDE}:
            self.reads_values |= bool(depends)
        elif name in LEAVES_TORCH:
            raise RefusedError(
                f"{self.name}: {user_line()}: `{name}` inside a message takes values of a few edges or nodes out of "
                f"torch, where they cannot be followed; a Python branch on them would differ from piece to piece. "
                f"Use torch.where"
            )
        before, versions = self.count, [_version(operand) for operand in operands]
        out = self._carried_out(func, name, args, kwargs, operands)
        if self.count > before:
            depends = {before}
        changed = False
        for operand, version in zip(operands, versions):
            if version != _version(operand) or (version < 0 and _may_write(name, kwargs, operand, out)):
                self._written(name, operand, depends)
                changed = True
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._adopt(tensor, depends)
        self._note_uses(name, args, operands)
        if self.count > before:
            is_detached = is_differentiable(out) and not out.requires_grad
            self._enter(out, Expr("reduced", (before,), tuple(out.shape[1:])), is_detached)
        elif isinstance(out, Tensor) and id(out) not in self._exprs and not changed:
            self._follow(name, args, kwargs, out, operands)
        return out

    def _is_dropped_by_edge(self, rows: Tensor) -> bool:
        # A weight may have as many rows as there are edges here. The node function, with rows of nodes, runs here too.
        return self.origin(rows) != {OUTSIDE}

    def _note_linear_map(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args = (*args, *kwargs.values()) if list(kwargs) in ([], ["bias"]) else ()
        if len(args) < 2 or not all(isinstance(arg, Tensor) for arg in args if arg is not None):
            return
        is_outside = [arg is None or self._expr(arg).op == "outside" for arg in args[1:]]
        found = linear_map(self.num_linear - 1, self._expr(args[0]), args, is_outside)
        if found is not None:
            self._maps_found.append((id(args[0]), found))

    def linear_maps(self) -> tuple[LinearMap, ...]:
        """The linear maps of rows of the ends whose input nothing else reads, such as a hook."""
        return tuple(one for rows, one in self._maps_found if rows not in self._uses and not self.is_tampered)

    def _carried_out(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        try:
            return super().run(func, name, args, kwargs, operands)
        except RuntimeError as error:
            whole = [t for t in operands if t.dim() and t.size(0) == self._num_edges and self.origin(t) == {OUTSIDE}]
            if whole and self._num_edges != self._index.numel():
                raise RefusedError(
                    f"{self.name}: {user_line()}: `{name}` takes a tensor of shape {[*whole[0].shape]} from outside, "
                    f"with a row for each edge, but a message runs on some edges at a time ({error}). Give it to the "
                    f"message as edge data: an argument of propagate() in PyG, a field of graph.edata in DGL"
                ) from error
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise RefusedError(
                f"{self.name}: {user_line()}: `{name}` changes an input of the message (or a parameter) in place. "
                f"Use the form that returns a new tensor"
            ) from error

    def _written(self, name: str, target: Tensor, depends: set[Origin]) -> None:
        storage = _storage(target)
        if storage not in self._depends:
            raise RefusedError(
                f"{self.name}: {user_line()}: `{name}` inside a message changes a tensor made outside it. Messages "
                f"are computed several times and in pieces; change it in forward() instead"
            )
        self._adopt(target, depends)
        self._writes[storage] = self._writes.get(storage, 0) + 1
        for tensor in self._held:
            if _storage(tensor) == storage:
                self._exprs.pop(id(tensor), None)

    def _note_uses(self, name: str, args: tuple[Any, ...], operands: list[Tensor]) -> None:
        """Note what becomes of reductions, and what hides from expressions."""
        self.is_tampered |= name in TAMPERS
        for operand in operands:
            expr = self._exprs.get(id(operand), (None, None))[0]
            if expr is None or (name in HARMLESS_USES and (name not in BINARY or _adds_a_number(name, args))):
                continue
            expr = plain(expr)
            inner = next((a for a in expr.args if isinstance(a, Expr)), expr) if expr.op == "add" else expr
            if plain(inner).op == "reduced":
                self.used_otherwise.add(plain(inner).args[0])

    def _expr(self, tensor: Tensor) -> Expr:
        """What `tensor` is made of."""
        found, node = self._exprs.get(id(tensor), (None, None))
        if found is not None and node is tensor.grad_fn:  # else a custom Function, or detach_, came between
            return found
        storage = _storage(tensor)
        if found is None and storage not in self._depends:
            self._held.append(tensor)
            return Expr("outside", (id(tensor),), tuple(tensor.shape[1:]))
        return opaque(tensor, storage, self._writes.get(storage, 0))

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, operands: list[Tensor]
    ) -> None:
        gathers = name == "__getitem__" and self.is_index(args[1])
        if name == "index_select" and len(args) == 3 and self.is_index(args[2]):
            gathers = args[1] in (0, -args[0].dim())
        if gathers and args[0].dim() and not kwargs:
            found: Expr | None = Expr("gather", (self._expr(args[0]),), tuple(out.shape[1:]))
        else:
            found = apply(name, args, kwargs, out, self._expr)
        if found is not None:
            # made with gradients switched off; torch says of a view that it requires them even then
            is_detached = found.op != "detach" and out.grad_fn is None and any(t.requires_grad for t in operands)
            self._enter(out, found, is_detached)


def _storage(tensor: Tensor) -> int:
    return torch_private.storage_number(tensor.untyped_storage())


def _version(tensor: Tensor) -> int:
    return torch_private.version_of(tensor)


def _may_write(name: str, kwargs: dict[str, Any], operand: Tensor, out: Any) -> bool:
    """Whether a call may have written into `operand`, where torch keeps no count of it (inference mode)."""
    return writes_in_place(name, kwargs) or (out is operand and name not in KEEPS_VALUES)


def _adds_a_number(name: str, args: tuple[Any, ...]) -> bool:
    return BINARY[name] == "add" and len(args) == 2 and any(isinstance(arg, (int, float)) for arg in args)
