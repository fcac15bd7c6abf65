"""Attention in DGL's terms, ``apply_edges``, ``edge_softmax`` and ``update_all``, as one sharded call.

[Note: where edge data wait]
``apply_edges`` leaves its result uncomputed where a softmax over edges is in sight: where the function that calls it,
one that called that, or a method of the same module names DGL's ``edge_softmax``. Elsewhere nothing would be gained.
It depends on the code alone, so ranks that run the same code decide alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import dgl.ops
import torch
from dgl.backend import edge_softmax as dgl_edge_softmax
from dgl.base import ALL, is_all
from torch import Tensor, nn

from shardpass.core.aggregation import aggregate
from shardpass.core.ranks import get_random_state, has_drawn
from shardpass.core.tracing import EdgeTrace, Inputs, ProbePhase, Program, Structure, sample_inputs
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.deferred import (
    Deferred,
    Dropout,
    EdgeCall,
    EdgeField,
    Run,
    Softmax,
    TorchCall,
    conditions,
    lineage,
)
from shardpass.frontends.dgl.functions import is_builtin, message_of, operands
from shardpass.frontends.dgl.lazy import LazyEdges, cannot_wait, ordinary
from shardpass.frontends.dgl.messages import MessagePassing, summed
from shardpass.frontends.dgl.udf import frozen

_CALLERS = 6
_REFUSED = "not an attention"


def softmax_in_sight(frame: FrameType | None) -> bool:
    """Whether the function of `frame`, one that called it, or a method of their module names ``edge_softmax``."""
    for _ in range(_CALLERS):
        if frame is None or frame.f_globals.get("__name__") == nn.Module.__module__:
            return False
        names = _names(frame.f_code)
        if frame.f_code.co_argcount:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(owner, nn.Module):
                names |= _names_in(type(owner))  # type: ignore[arg-type]
        if "edge_softmax" in names or any(frame.f_globals.get(name) is dgl.ops.edge_softmax for name in names):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)


@lru_cache(maxsize=1024)
def _names_in(kind: type) -> frozenset[str]:
    own = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    methods = [method for base in own for method in vars(base).values() if isinstance(method, FunctionType)]
    return frozenset[str]().union(*(_names(method.__code__) for method in methods))


def deferred_fields(passing: MessagePassing, function: Any) -> dict[str, LazyEdges] | None:
    """The fields that ``apply_edges(function)`` sets, not computed yet; None where they have to be computed at once."""
    plan = passing.edges.plan
    if not plan.options.fuse_attention or cannot_wait() or torch.is_autocast_enabled("cuda"):
        return None
    function = function if is_builtin(function) else frozen(function)
    passing = passing.snapshot(function)
    program, body = passing.program_of(function, "edges of ")
    program = replace(program, ranks=plan.comm)
    with plan.comm.random_lock():
        found = _sighted(passing, program, body)
    if found is None:
        return None
    sample, outside = found
    if program.reads is not None:
        src, dst, edge = (
            {name: tensor for name, tensor in tensors.items() if f"{kind}:{name}" in program.reads}
            for kind, tensors in (("s", program.src), ("d", program.dst), ("e", program.edge))
        )
        program = replace(program, src=src, dst=dst, edge=edge)
    call = EdgeCall(passing.edges, program, body, outside, lambda: passing.per_edge(function))
    return {name: LazyEdges.of(EdgeField(call, name, rows)) for name, rows in sample.items()}


def _sighted(passing: MessagePassing, program: Program, body: Any) -> tuple[dict[str, Tensor], list[Tensor]] | None:
    """What `body` gives for some made-up edges, and what it uses of outside; None if it may not wait."""

    def look() -> tuple[Any, _Sighting]:
        inputs = sample_inputs(program, passing.edges.shards, passing.edges.plan.num_own_src, False, 2)
        trace = _Sighting(program, inputs)
        with torch.no_grad(), trace:
            return body(inputs), trace

    state = get_random_state()
    try:
        found, trace = look()
    except RefusedError:
        return None  # and is refused when it is computed, on every rank
    given = [t for rows in (program.src, program.dst, program.edge) for t in rows.values()] + trace.outside
    if has_drawn(state, look) or trace.count or trace.num_drops or any(t.is_inference() for t in given):
        return None
    return (found, trace.outside) if all(rows.is_floating_point() for rows in found.values()) else None


class _Sighting(EdgeTrace):
    """An `EdgeTrace` that notes which tensors come from outside."""

    def __init__(self, program: Program, inputs: Inputs) -> None:
        phase = ProbePhase(inputs.num_dst, inputs.num_dst)
        super().__init__(program, inputs.index, phase, generator=torch.Generator)
        self.outside: list[Tensor] = []
        self._made = [t for rows in (inputs.src, inputs.dst, inputs.edge) for t in rows.values()] + [inputs.index]
        self._known = {id(t) for t in self._made}

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        new = [t for t in operands if id(t) not in self._known]
        self.outside += new
        out = super().run(func, name, args, kwargs, operands)
        made = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, Tensor)]
        self._made += made  # held, so that ids stay theirs
        self._known.update(id(t) for t in [*new, *made])
        return out


class _NotAttentionError(Exception):
    """Ends a call before any row is sent: its body is no attention, so the edge data are computed whole."""


def attended(passing: MessagePassing, message: Any, reducer: Any) -> dict[str, Tensor] | None:
    """What ``update_all(message, reducer)`` gives where it is an attention whose weights wait: computed in one pass.

    ``{field: [num_dst, ...]}``, or None: it is something else. Collective.
    """
    found = _weighted_sum(passing, message, reducer)
    if found is None:
        return None
    field, weight, data = found
    data = data.frozen()
    nodes = list(lineage(data))
    waiting = [node for node in nodes if not node.is_known]
    if not any(isinstance(node, Softmax) for node in waiting) or any(n.conditions != conditions() for n in waiting):
        return None
    for node in waiting:
        node.refuse_changes()
    key = f"{message.name} of {data.describe()} under {conditions()}"
    refused = passing.checked.setdefault(_REFUSED, set())
    if key in refused:
        return None
    program = _program(passing, message, field, weight, data, nodes)
    if not any(isinstance(node, EdgeField) and node.call.program.reads is not None for node in waiting):
        program.checked = passing.checked.setdefault(key, set())
    try:
        return {reducer.out_field: aggregate(program, passing.edges.plan, passing.edges.shards)}
    except _NotAttentionError:
        refused.add(key)
        return None


def _weighted_sum(passing: MessagePassing, message: Any, reducer: Any) -> tuple[str, str, Deferred] | None:
    """``(source field, edge field, edge data)`` of a sum of source rows times edge data that wait."""
    if not is_builtin(message) or reducer.name != "sum" or reducer.msg_field != message.out_field or cannot_wait():
        return None
    names = dict(operands(message))
    if getattr(message, "binary_op", "") != "mul" or set(names) != {"s", "e"}:
        return None
    weights, value = passing.edata.get(names["e"]), passing.src[names["s"]]
    if not isinstance(weights, LazyEdges) or weights.data_of_edges.is_known or value.is_inference():
        return None
    data = weights.data_of_edges
    return (names["s"], names["e"], data) if data.edges is passing.edges else None


def _program(
    passing: MessagePassing, message: Any, field: str, weight: str, data: Deferred, nodes: list[Deferred]
) -> Program:
    src, dst, edge = {"value": passing.src[field]}, dict[str, Tensor](), dict[str, Tensor]()
    names: dict[int, str] = {}
    for node in nodes:
        whole = [node.value()] if node.is_known else node.edge_tensors() if isinstance(node, TorchCall) else []
        for tensor in whole:
            edge[names.setdefault(id(tensor), f"{len(names)}")] = tensor
        if isinstance(node, EdgeField) and not node.is_known and id(node.call) not in names:
            prefix = names[id(node.call)] = f"{len(names)}:"
            given = node.call.program
            for mine, theirs in ((src, given.src), (dst, given.dst), (edge, given.edge)):
                mine.update({prefix + name: tensor for name, tensor in theirs.items()})
    computed = message_of(message)

    def weighted(inputs: Inputs) -> Tensor:
        rows = Run(inputs, names).rows(data)
        return computed(Inputs({field: inputs.src["value"]}, {}, {weight: rows}, inputs.index, inputs.num_dst))

    def watch(structure: Structure) -> None:
        if structure.attention is None:
            raise _NotAttentionError

    where = passing.where
    program = Program(f"attention by {message.name}{where}", src, dst, edge, weighted, summed, watch=watch)
    seeds = [node.seed for node in nodes if isinstance(node, Dropout)]
    program.seed = seeds[0] if seeds else None
    return program


def hand_over(names: dict[str, Any]) -> None:
    """Let kernels of DGL, the globals ``*_internal`` of a module of ``dgl.ops``, know edge data that wait.

    Whatever else they are called with, they do what they did.
    """
    for name, kernel in list(names.items()):
        if name == "edge_softmax_internal":
            names[name] = _edge_softmax
        elif name.endswith("_internal") and not isinstance(kernel, _Kernel):
            names[name] = _Kernel(kernel)


def _edge_softmax(gidx: Any, logits: Any, eids: Any = ALL, norm_by: str = "dst") -> Any:
    if isinstance(logits, LazyEdges):
        data = logits.data_of_edges
        if is_all(eids) and norm_by == "dst" and gidx is data.edges.index and not data.is_known and not cannot_wait():
            return LazyEdges.of(Softmax(data))
    return dgl_edge_softmax(gidx, ordinary(logits), eids=eids, norm_by=norm_by)


class _Kernel:
    """A kernel of DGL that computes edge data first."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(*ordinary(args), **ordinary(kwargs))
