"""One run of a program on a few edges, without communication: which reductions it makes, of what, in which order.

[Note: what the probe decides]
Before the engine communicates it has to know how many passes over the source blocks a program takes, what each pass
must fetch, and what backward will differentiate; and all ranks have to agree. So the program first runs on a few edges
of this rank (on a made-up edge if it has none), under a `ProbeTrace` and with every input a fresh leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.following import user_line
from shardpass.core.ranks import get_random_state, has_drawn, is_differentiable, torch_private
from shardpass.core.sharding import EdgeShards, to_device
from shardpass.core.tracing.edge_trace import tensors_in, transform_refusal
from shardpass.core.tracing.findings import Dependence
from shardpass.core.tracing.formula import Formula, formula_of
from shardpass.core.tracing.probe_trace import EVERYTHING, Origin, ProbeTrace, Seen
from shardpass.core.tracing.program import Inputs, Key, Program
from shardpass.core.tracing.recognise import GENERAL, Tails, attention_of, extremum_form, leading_maximum, simple_form
from shardpass.core.tracing.rowwise import unseen_by_checkpoint
from shardpass.core.tracing.structure import KERNEL_FORMS, Attention, Messages, Reduction, Structure
from shardpass.errors import RefusedError

SAMPLE_EDGES = 16
FORMULA_DTYPES = {torch.float32, torch.float64}


def sample_inputs(
    program: Program, edges: EdgeShards, num_own_src: int, grads: bool, count: int = SAMPLE_EDGES
) -> Inputs:
    """Inputs for `count` edges, or for one made-up edge on a rank without any. Shapes matter, values matter little."""
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
        return sample.requires_grad_() if grads and is_differentiable(sample) else sample

    last = max(0, edges.num_dst - 1)  # no further than tables over own nodes reach
    index = (rows // 2).clamp(max=last).to(program.streamed_to or edges.shards[0].indptr.device)
    return Inputs(
        src={key: take(t, num_own_src) for key, t in program.src.items()},
        dst={key: take(t, edges.num_dst) for key, t in program.dst.items()},
        edge={key: take(t, edges.num_edges, True) for key, t in program.edge.items()},
        index=index,
        num_dst=min((count + 1) // 2, last + 1),
    )


def structure_of(
    program: Program, edges: EdgeShards, num_own_src: int, needs_grad: Collection[Key]
) -> tuple[Structure, str]:
    """The structure of `program` on this rank, and its description. Not collective.

    It is that of an earlier call where nothing differs on which it depends; see `Program.depends_on`.

    Args and errors: as in `probe`.
    """
    key, depends_on = conditions(program, edges, num_own_src, needs_grad), program.depends_on
    known = None if depends_on is None or key is None else program.findings.find(key, depends_on)
    if known is not None:
        return known  # type: ignore[no-any-return]
    structure = probe(program, edges, num_own_src, needs_grad)
    described = structure.describe()
    if depends_on is not None and key is not None and _uses_only(structure, depends_on):
        program.findings.keep(key, depends_on, (structure, described))
    return structure, described


def _uses_only(structure: Structure, depends_on: Dependence) -> bool:
    """Whether a structure uses no other tensors than those of `depends_on`, and does not hang on their numbers."""
    lasting = {id(tensor) for tensor in depends_on.tensors}
    used = [*structure.captures, *structure.outside, *(tensor for one in structure.maps for tensor in one.tensors)]
    return not structure.reads_values and {id(tensor) for tensor in used} <= lasting


def conditions(program: Program, edges: EdgeShards, num_own_src: int, needs_grad: Collection[Key]) -> Hashable | None:
    """What a probe depends on besides `Program.depends_on`; None where a mode of the user's may change anything."""
    if any(not type(mode).__module__.startswith("shardpass.") for mode in torch_private.function_modes()):
        return None
    inputs = ((key, t.shape[1:], t.dtype, t.device, t.is_inference()) for key, t in program.inputs.items())
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (
        *(frozenset(needs_grad), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *(*casts, *inputs),
        *(min(edges.num_edges, SAMPLE_EDGES), edges.num_dst, num_own_src),
        *(program.aggregate is None, program.node_dim, program.streamed_to),
    )


def probe(program: Program, edges: EdgeShards, num_own_src: int, needs_grad: Collection[Key]) -> Structure:
    """The structure of `program` on this rank. Not collective.

    Args:
        needs_grad: keys of the inputs that require grad on some rank.

    Raises:
        RefusedError: the message function does something that cannot be computed one shard at a time.
    """
    state = get_random_state()
    keep_captures = torch.is_grad_enabled()
    grads = not torch.is_inference_mode_enabled()
    with torch.set_grad_enabled(grads), unseen_by_checkpoint():
        look = partial(_traced, program, edges, num_own_src, grads)
        try:
            traced = look()
        except RuntimeError as error:
            if not str(error).startswith("torch.func.{grad"):  # which refuses to run under the hooks
                raise
            raise transform_refusal(program.name, str(user_line(error)), "grad, vjp or jacrev") from error
        structure = _structure(program, traced, needs_grad, random=has_drawn(state, look))
    return structure if keep_captures else replace(structure, captures=())


class _Traced(NamedTuple):
    """One run on a few edges: its trace, the message, its number of reductions, the result of the node function."""

    trace: ProbeTrace
    message: Messages
    num_message: int
    result: Tensor | None


def _traced(program: Program, edges: EdgeShards, num_own_src: int, grads: bool) -> _Traced:
    inputs = sample_inputs(program, edges, num_own_src, grads)
    trace = ProbeTrace(program, inputs, edges.num_dst, edges.num_edges)
    with nullcontext() if program.ranks is None else program.ranks.in_message(), trace:
        message = program.message(inputs)
        num_message = trace.count
        result = None if program.aggregate is None else program.aggregate(message, inputs)
    return _Traced(trace, message, num_message, result if isinstance(result, Tensor) else None)


class _Place(NamedTuple):
    """Where something computed on edges stands among the reductions; the fields are those of `Reduction`."""

    parents: frozenset[int] = frozenset()
    depth: int = -1
    stage: int = 0
    sources: frozenset[str] = frozenset()

    @staticmethod
    def of(depends: Collection[Origin], earlier: Sequence[Reduction], program: Program) -> _Place:
        """The place of what depends on `depends`, given the reductions made before."""
        everything = EVERYTHING in depends
        parents = frozenset(range(len(earlier)) if everything else (k for k in depends if isinstance(k, int)))
        read = [key.name for key in depends if isinstance(key, Key) and key.side == "src"]
        sources = program.src if everything or torch.is_inference_mode_enabled() else read
        depth = 1 + max((earlier[k].depth for k in parents), default=-1)
        stage = 1 + max((earlier[k].stage for k in parents), default=-1)
        return _Place(parents, depth, stage, frozenset(sources))


def _structure(program: Program, traced: _Traced, needs_grad: Collection[Key], random: bool) -> Structure:
    trace, message = traced.trace, traced.message
    reductions: list[Reduction] = []
    with_gradient: set[Origin] = set(needs_grad)
    for k, seen in enumerate(trace.seen):
        differentiable = _differentiable(trace, seen.messages, with_gradient)
        reductions.append(_reduction(program, trace, reductions, seen, differentiable))
        if reductions[-1].form == "ones" and (random or trace.num_drops):
            reductions[-1] = replace(reductions[-1], form="general")  # the ones may be drawn
        if differentiable:
            with_gradient.add(k)
    reductions = _closed(reductions, program)
    result = message if program.aggregate is None and isinstance(message, Tensor) else None
    is_result = result is not None
    place = _Place() if result is None else _Place.of(trace.origin(result), reductions, program)
    edge_differentiable = result is not None and _differentiable(trace, result, with_gradient)
    captures = tuple(trace.captures.values())
    attention = None if random or is_result else _attention(program, trace, reductions, captures)
    mix = None if attention is None or attention.score is None else attention.score.mix
    formula = None if random or is_result or trace.num_drops else _formula(program, trace, reductions, captures)
    return Structure(
        reductions=tuple(reductions),
        num_message=traced.num_message,
        num_stages=1 + max([r.stage for r in reductions] + [place.stage] * is_result, default=0),
        edge_tail=None if result is None else tuple(result.shape[1:]),
        edge_dtype=None if result is None else result.dtype,
        edge_depth=place.depth,
        edge_sources=place.sources,
        edge_differentiable=edge_differentiable,
        captures=captures,
        drops=trace.num_drops > 0,
        random=random,
        norms=trace.norms,
        message=torch_private.tree_map_only(Tensor, Tensor.detach, message),
        attention=attention,
        mix=None if mix is None else captures[mix].detach(),
        reads_values=trace.reads_values,
        maps=trace.linear_maps(),
        unread=_unread(program, traced),
        formula=formula,
        outside=captures if formula is not None and any(leaf.kind == "outside" for leaf in formula.leaves) else (),
    )


def _formula(
    program: Program, trace: ProbeTrace, reductions: Sequence[Reduction], captures: Sequence[Tensor]
) -> Formula | None:
    """The formula of all messages that are not counted only, if message functions would have to run for them."""
    members = {k: r for k, r in enumerate(reductions) if r.form != "ones"}
    if trace.is_tampered or all(r.form in KERNEL_FORMS for r in members.values()):
        return None
    if not all(r.op in ("sum", "max", "min") for r in members.values()):
        return None
    messages = {k: trace.seen[k].expr for k in members}
    rows: dict[tuple[str, str], int] = {
        (key.side, key.name): tensor.shape[1:].numel() for key, tensor in program.inputs.items()
    }
    captured = {id(tensor): (number, tuple(tensor.shape)) for number, tensor in enumerate(captures)}
    found = formula_of(messages, {k: r.op for k, r in members.items()}, rows, captured)
    if found is None:
        return None
    dtypes = {r.dtype for r in members.values()}
    for leaf in found.leaves:
        if leaf.kind in ("src", "dst", "edge"):
            dtypes.add(program.inputs[Key(leaf.kind, leaf.name)].dtype)
        elif leaf.kind == "reduced":
            dtypes.add(reductions[leaf.number].dtype)
        elif leaf.kind == "outside":
            dtypes.add(captures[leaf.number].dtype)
    return found if len(dtypes) == 1 and dtypes <= FORMULA_DTYPES else None


def _unread(program: Program, traced: _Traced) -> frozenset[Hashable]:
    """The inputs of which nothing was made, now that linear maps have been applied to them."""
    trace = traced.trace
    message = traced.message.values() if isinstance(traced.message, dict) else [traced.message]
    results = tensors_in([*message, traced.result])
    read: set[Origin] = set().union(*(seen.depends for seen in trace.seen), *(trace.origin(t) for t in results))
    if not program.maps or EVERYTHING in read or torch.is_inference_mode_enabled():
        return frozenset()
    return frozenset(key for key, _ in program.inputs.items()) - read


def _closed(reductions: list[Reduction], program: Program) -> list[Reduction]:
    """`reductions`, where rows are wider than their source only if kernels compute all that is read of it.

    The message function must not see other dtypes than those of the inputs.
    """

    def is_wider(reduction: Reduction) -> bool:
        return reduction.form == "scale" and program.src[reduction.source].dtype != reduction.dtype

    wide = {reduction.source: reduction.dtype for reduction in reductions if is_wider(reduction)}
    alone = program.aggregate is not None and all(
        r.form == "ones" or (r.form in KERNEL_FORMS and wide.get(r.source, r.dtype) == r.dtype) for r in reductions
    )
    general, _, _ = GENERAL
    return [r if alone or not is_wider(r) else replace(r, form=general, source="", weight="") for r in reductions]


def _attention(
    program: Program, trace: ProbeTrace, reductions: list[Reduction], captures: Sequence[Tensor]
) -> Attention | None:
    if trace.is_tampered:
        return None
    messages = [seen.expr for seen in trace.seen]
    found = attention_of(reductions, messages, _tails(program), trace.num_drops, captures)
    return found if found is not None and not trace.used_otherwise & {found.maximum, found.total} else None


def _reduction(
    program: Program, trace: ProbeTrace, earlier: list[Reduction], seen: Seen, differentiable: bool
) -> Reduction:
    place = _Place.of(seen.depends, earlier, program)
    op, values, expr = seen.op, seen.messages, seen.expr
    form, source, weight = GENERAL
    leader = None
    if trace.is_tampered or values.is_complex():
        pass  # the expression does not say what is computed; the gradients of complex factors are conjugated
    elif op in ("max", "min"):
        form, source, weight = extremum_form(expr, _tails(program))
    elif op == "sum" and not seen.base.value:
        form, source, weight = simple_form(expr, _tails(program))
        leader = leading_maximum(expr, [other.expr for other in trace.seen], earlier)
        leader = leader if place.parents == {leader} else None
    if form == "general" and op == "sum" and not seen.base.value and not seen.depends and bool((values == 1).all()):
        form = "ones"
    return Reduction(
        op=op,
        base=seen.base,
        tail=tuple(values.shape[1:]),
        dtype=values.dtype,
        stage=place.stage if leader is None else earlier[leader].stage,
        depth=place.depth,
        sources=place.sources,
        parents=place.parents,
        leader=leader,
        differentiable=differentiable,
        form=form,
        source=source,
        weight=weight,
    )


def _tails(program: Program) -> Tails:
    return {name: tuple(tensor.shape[1:]) for name, tensor in program.src.items()}


def _differentiable(trace: ProbeTrace, value: Tensor, with_gradient: set[Origin]) -> bool:
    """Whether gradients flow from `value` to an input that needs them or to a capture; finds hidden captures."""
    if value.grad_fn is None:
        return trace.leaves.get(id(value)) in with_gradient or id(value) in trace.captures
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
            reached |= known is None or known in with_gradient
        elif torch_private.node_number(node) < trace.first_node:
            raise RefusedError(
                f"{trace.name}: the message uses a tensor computed outside it ({node.name()}) in a way that cannot be "
                f"followed (a custom autograd Function or TorchScript). Pass it to the layer as an argument"
            )
        else:
            stack += [parent for parent, _ in node.next_functions if parent is not None]
    return reached
