"""One trace of a body on a few edges, without communication: which reductions it makes, of what, in which order.

[Note: what the probe decides]
The engine has to know before it communicates how many passes over the source blocks a body takes, what each pass must
fetch, and what backward will differentiate; and all ranks have to agree. So the body first runs on a few edges of this
rank (on a made-up edge where it has none) with every input a fresh leaf, under a `ProbeTrace`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardpass.core.ranks import get_random_state, has_drawn
from shardpass.core.sharding import EdgeShards, to_device
from shardpass.core.tracing.probe_trace import EVERYTHING, ProbePhase, ProbeTrace
from shardpass.core.tracing.program import Attention, Inputs, MixedScore, Program, Reduction, Structure
from shardpass.core.tracing.recognise import GENERAL, attention_of, extremum_form, leading_maximum, simple_form
from shardpass.core.tracing.reducers import Base
from shardpass.errors import RefusedError

SAMPLE_EDGES = 16


def sample_inputs(
    program: Program, edges: EdgeShards, num_own_src: int, grads: bool, count: int = SAMPLE_EDGES
) -> Inputs:
    """Inputs for `count` edges, or for one made-up edge on a rank without any. Values matter little, shapes do."""
    count = max(min(1, count), min(count, edges.num_edges))
    rows = torch.arange(count)

    def take(tensor: Tensor, limit: int, is_of_edges: bool = False) -> Tensor:
        tensor = tensor.detach()
        if limit == 0:
            sample = tensor.new_zeros((count, *tensor.shape[1:]))
        else:
            sample = tensor.index_select(0, (rows % limit).to(tensor.device))
        if is_of_edges and program.streamed_to is not None:
            sample = to_device(sample, program.streamed_to)
        return sample.requires_grad_() if grads and sample.is_floating_point() else sample

    last = max(0, edges.num_dst - 1)  # no further than tables over own nodes reach
    index = (rows // 2).clamp(max=last).to(program.streamed_to or edges.shards[0].indptr.device)
    return Inputs(
        src={key: take(t, num_own_src) for key, t in program.src.items()},
        dst={key: take(t, edges.num_dst) for key, t in program.dst.items()},
        edge={key: take(t, edges.num_edges, True) for key, t in program.edge.items()},
        index=index,
        num_dst=min((count + 1) // 2, last + 1),
    )


def probe(program: Program, edges: EdgeShards, num_own_src: int, needs_grad: set[str]) -> Structure:
    """The structure of `program`'s body on this rank. Not collective.

    Args:
        needs_grad: the inputs (``"s:x"``, ``"d:x"``, ``"e:w"``) that require grad on some rank.

    Raises:
        RefusedError: the body does something that cannot be computed one shard at a time.
    """
    state = get_random_state()
    keep_captures = torch.is_grad_enabled()
    grads = not torch.is_inference_mode_enabled()
    with torch.set_grad_enabled(grads):
        look = partial(_traced, program, edges, num_own_src, grads)
        trace, phase, message, num_message = look()
        random = has_drawn(state, look)
        structure = _structure(program, trace, phase, message, num_message, needs_grad, random)
    if structure.attention is not None and isinstance(structure.attention.score, MixedScore):
        structure.mix = structure.captures[structure.attention.score.mix].detach()
    if not keep_captures:
        structure.captures.clear()
    return structure


def _traced(
    program: Program, edges: EdgeShards, num_own_src: int, grads: bool
) -> tuple[ProbeTrace, ProbePhase, Tensor, int]:
    """The body's trace on a few edges, the reductions found, its message, and how many of them the edge part made."""
    inputs = sample_inputs(program, edges, num_own_src, grads)
    phase = ProbePhase(inputs.num_dst, edges.num_dst)
    trace = ProbeTrace(program, inputs, phase)
    with trace:
        message = program.message(inputs)
        num_message = trace.count
        if program.aggregate is not None:
            program.aggregate(message, inputs)
    return trace, phase, message, num_message


def _structure(
    program: Program,
    trace: ProbeTrace,
    phase: ProbePhase,
    message: Tensor,
    num_message: int,
    needs_grad: set[str],
    random: bool,
) -> Structure:
    reductions: list[Reduction] = []
    gradient_sources = set(needs_grad)
    for k, (op, values, base, _) in enumerate(phase.found):
        depends = trace.reduced[k]
        differentiable = _differentiable(trace, values, gradient_sources)
        reductions.append(_reduction(program, trace, reductions, op, values, base, depends, differentiable))
        if differentiable:
            gradient_sources.add(f"r:{k}")
    edge_tail, edge_dtype, depth, stage, sources = None, None, -1, 0, frozenset[str]()
    differentiable = False
    if program.aggregate is None:
        depends = trace.origin(message)
        parents = _parents(depends, len(reductions))
        depth = 1 + max((reductions[k].depth for k in parents), default=-1)
        stage = 1 + max((reductions[k].stage for k in parents), default=-1)
        edge_tail, edge_dtype = tuple(message.shape[1:]), message.dtype
        sources = _sources(depends, program)
        differentiable = _differentiable(trace, message, gradient_sources)
    last = max([r.stage for r in reductions] + ([stage] if program.aggregate is None else []), default=0)
    return Structure(
        reductions=reductions,
        num_message=num_message,
        num_stages=last + 1,
        edge_tail=edge_tail,
        edge_dtype=edge_dtype,
        edge_depth=depth,
        edge_sources=sources,
        edge_differentiable=differentiable,
        captures=list(trace.captures.values()),
        drops=trace.num_drops > 0,
        random=random,
        norms=trace.norms,
        message=message.detach(),
        attention=None if random or program.aggregate is None else _attention(program, trace, reductions),
    )


def _attention(program: Program, trace: ProbeTrace, reductions: list[Reduction]) -> Attention | None:
    tails = {name: tuple(tensor.shape[1:]) for name, tensor in program.src.items()}
    messages = [trace.messages.get(k) for k in range(len(reductions))]
    if trace.is_tampered:
        return None
    found = attention_of(reductions, messages, tails, trace.num_drops, list(trace.captures.values()))
    return found if found is not None and not trace.used_otherwise & {found.maximum, found.total} else None


def _parents(depends: set[str], count: int) -> frozenset[int]:
    if EVERYTHING in depends:
        return frozenset(range(count))
    return frozenset(int(d[2:]) for d in depends if d.startswith("r:"))


def _sources(depends: set[str], program: Program) -> frozenset[str]:
    if EVERYTHING in depends or torch.is_inference_mode_enabled():
        return frozenset(program.src)
    return frozenset(d[2:] for d in depends if d.startswith("s:"))


def _reduction(
    program: Program,
    trace: ProbeTrace,
    earlier: list[Reduction],
    op: str,
    values: Tensor,
    base: Base,
    depends: set[str],
    differentiable: bool,
) -> Reduction:
    parents = _parents(depends, len(earlier))
    depth = 1 + max((earlier[k].depth for k in parents), default=-1)
    stage = 1 + max((earlier[k].stage for k in parents), default=-1)
    expr = None if trace.is_tampered else trace.messages.get(len(earlier))
    tails = {name: tuple(tensor.shape[1:]) for name, tensor in program.src.items()}
    form, source, weight = simple_form(expr, tails) if op == "sum" and not base.value else GENERAL
    if op in ("max", "min"):
        form, source, weight = extremum_form(expr, tails)
    if form == "general" and op == "sum" and not base.value and not depends and bool((values == 1).all()):
        form = "ones"
    leader = None
    if op == "sum" and not base.value:
        leader = leading_maximum(expr, [trace.messages.get(k) for k in range(len(earlier))], earlier)
        leader = leader if parents == {leader} else None
    return Reduction(
        op=op,
        base=base,
        tail=tuple(values.shape[1:]),
        dtype=values.dtype,
        stage=earlier[leader].stage if leader is not None else stage,
        depth=depth,
        sources=_sources(depends, program),
        parents=parents,
        leader=leader,
        differentiable=differentiable,
        form=form,
        source=source,
        weight=weight,
    )


def _differentiable(trace: ProbeTrace, value: Tensor, gradient_sources: set[str]) -> bool:
    """Whether gradients flow from `value` to an input that needs them or to a capture; finds hidden captures."""
    if value.grad_fn is None:
        return trace.leaves.get(id(value), "") in gradient_sources or id(value) in trace.captures
    captured_nodes = {t.grad_fn for t in trace.captures.values() if t.grad_fn is not None}
    reached, stack, seen = False, [value.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in captured_nodes:
            reached = True
        elif hasattr(node, "variable"):
            leaf = node.variable
            known = trace.leaves.get(id(leaf))
            if known is None:
                trace.captures.setdefault(id(leaf), leaf)
            reached |= known is None or known in gradient_sources
        elif node._sequence_nr() < trace.first_node:
            raise RefusedError(
                f"{trace.name}: the message uses a tensor computed outside it ({node.name()}) in a way that cannot be "
                f"followed (a custom autograd Function or TorchScript). Pass it to the layer as an argument"
            )
        else:
            stack += [parent for parent, _ in node.next_functions if parent is not None]
    return reached
