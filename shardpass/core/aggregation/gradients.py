"""The gradients of one sharded call: where backward adds them, and how those of halo rows return to their owners."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, Operands
from shardpass.core.exchange import GradientReturn, HaloPlan, WalkId
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import REDUCERS, Key, Sides


@dataclass
class Gradients(Sides):
    """The gradients of a call's inputs, added up during backward.

    Attributes:
        src, dst, edge: of the inputs that need gradients, by name; source gradients are those of the own rows.
        captures: of the captured tensors; `None` until something is added.
        reductions: of the reductions' results.
        edges: of the edge result, or `None`.
        asked: the captures whose gradients are asked for, by number; `None` means all.
        reached: the reductions to which this rank's loss leads. Of others nothing is computed, as in plain autograd,
            where zero times the infinite slope of a function would be NaN; their rounds are walked for other ranks.
        touched: the edge and destination inputs to which something was added.
        ran: whether this rank had edges to go over.
    """

    captures: list[Tensor | None]
    reductions: dict[int, Tensor]
    edges: Tensor | None
    reached: set[int]
    asked: frozenset[int] | None = None
    touched: set[Key] = field(default_factory=set)
    ran: bool = False

    def touch(self, key: Key) -> Tensor:
        """The gradient of a destination or edge input, to be added to."""
        self.touched.add(key)
        return self[key]

    def add_capture(self, number: int, part: Tensor) -> None:
        """Add to the gradient of a captured tensor, in its shape."""
        old = self.captures[number]
        self.captures[number] = part if old is None else old + part

    def found(self, key: Key) -> Tensor | None:
        """The gradient of an input; `None` where none is needed or none arrived."""
        if key not in self:
            return None
        gradient, is_reached = self[key], bool(self.reached) or self.edges is not None
        if key.side == "src":  # other ranks may have sent some
            return gradient if is_reached or gradient.any() else None
        return gradient if key in self.touched or (is_reached and not self.ran) else None


def needed_values(call: Call) -> tuple[list[int], list[int]]:
    """``(values, states)``: the reductions whose value, and whose state, backward reads."""
    structure = call.structure
    if structure.attention is not None:
        return [structure.attention.output], [structure.attention.maximum]
    values: set[int] = set()
    for reduction in structure.reductions:
        if reduction.differentiable:
            values |= reduction.parents
    if structure.edge_output:
        values |= {k for k, r in enumerate(structure.reductions) if r.depth < structure.edge_depth}
    states = [k for k, r in enumerate(structure.reductions) if r.differentiable and r.op != "sum"]
    return sorted(values | set(states)), states


def is_linear(call: Call) -> bool:
    """Whether kernels do all of backward. They write source gradients before they add, so nothing must be zeroed."""
    structure = call.structure
    differentiable = [r for r in structure.reductions if r.differentiable]
    sources = {call.canonical[r.source] for r in differentiable if r.form in ("copy", "scale")}
    return (
        not structure.edge_output
        and structure.max_depth == 0
        and all(r.form in ("copy", "scale") for r in differentiable)
        and sources == {name for name in call.canonical.values() if Key("src", name) in call.gradients}
    )


def zero_gradients(
    call: Call, operands: Operands, grad_reductions: dict[int, Tensor], grad_edges: Tensor | None
) -> Gradients:
    """Where backward adds: zeros for each input that needs a gradient, and the gradients of the outputs."""
    structure, linear = call.structure, is_linear(call)
    alone = structure.max_depth == 0 or structure.attention is not None
    reductions = {}
    for k, reduction in enumerate(structure.reductions):
        if not reduction.differentiable:
            continue
        if k in grad_reductions:  # deeper reductions add to those they hang on
            reductions[k] = grad_reductions[k] if alone else grad_reductions[k].clone()
        else:
            shape = *REDUCERS[reduction.op].lead(call.edges.num_dst), *reduction.tail
            reductions[k] = torch.zeros(shape, dtype=reduction.dtype, device=call.plan.comm.device)
    needed = [key for key in call.keys if key in call.gradients]
    makers = [torch.empty_like if linear and key.side == "src" else torch.zeros_like for key in needed]
    contiguous = torch.contiguous_format
    zeros = Sides.of((key, make(operands[key], memory_format=contiguous)) for key, make in zip(needed, makers))
    return Gradients(
        src=zeros.src,
        dst=zeros.dst,
        edge=zeros.edge,
        captures=[None] * len(operands.captures),
        reductions=reductions,
        edges=grad_edges,
        reached=set(grad_reductions),
    )


class Returned:
    """Where the gradients of each block's rows go: those of own rows into the result, others back to their owners.

    Args:
        plan, edges: by which the rows came.
        own: where the gradients of own rows are added, by name.
        alias: the names that a part uses, with those in `own`.
        walk: identifies the messages.
    """

    def __init__(self, plan: HaloPlan, edges: EdgeShards, own: dict[str, Tensor], alias: dict[str, str], walk: WalkId):
        self._own, self._alias, self._edges = own, alias, edges
        self._return = GradientReturn(plan, [*own.values()], walk)
        self._position, self._zeroed = 0, True

    def shard(self, number: int, zeroed: bool = True) -> Returned:
        """Itself, to be entered for a shard. The gradients of halo rows start from zero if `zeroed`."""
        self._position, self._zeroed = self._edges.position(number), zeroed
        return self

    def __enter__(self) -> dict[str, Tensor]:
        into = [*self._own.values()] if self._position == 0 else self._return.buffers(self._position, self._zeroed)
        by_name = dict(zip(self._own, into))
        return {name: by_name[of] for name, of in self._alias.items()}

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._position > 0:
            self._return.send(self._position)

    def finish(self) -> None:
        """Return when the last gradients have arrived and are added."""
        self._return.finish()
