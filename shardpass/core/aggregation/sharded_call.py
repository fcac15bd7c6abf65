"""The sharded call as one autograd function: sequential aggregation forward, rematerialisation backward.

Source: Mostafa, "Sequential Aggregation and Rematerialization", MLSys 2022 (arXiv 2111.06483).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.aggregation.agreement import settle
from shardpass.core.aggregation.attention import attention_gradients, run_attention
from shardpass.core.aggregation.backward import needed_values, run_backward, zero_gradients
from shardpass.core.aggregation.call import Call
from shardpass.core.aggregation.constants import ConstantSums
from shardpass.core.aggregation.forward import run_forward
from shardpass.core.aggregation.linear_first import describe_map, transformed_first
from shardpass.core.aggregation.pull import choose_pull, offer_pull, pull_attention, pull_copies
from shardpass.core.aggregation.whole_neighbourhoods import aggregate_at_once
from shardpass.core.exchange import HaloPlan
from shardpass.core.ranks import begin_call, digest, draw_seed, end_call, refuse_double_backward
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import Base, EdgeTrace, Program, Structure, sample_inputs
from shardpass.core.training import Moments
from shardpass.errors import NeedsHaloError


def aggregate(program: Program, plan: HaloPlan, edges: EdgeShards, weight: Tensor | None = None) -> Tensor:
    """What `program` computes over all edges of the graph: ``[num_dst, ...]``, or ``[num_edges, ...]`` for messages.

    Collective, in backward too. Every rank must pass the same program; gradients of its inputs and of every tensor its
    body captures flow as if the whole graph were here.

    Args:
        weight: ``[out_channels, in_channels]`` of a linear map of the result, ``[num_dst, in_channels]``; the map is
            made before or after the sum, whichever is cheaper. Only for a node part that at most scales rows.

    Raises:
        RefusedError: the body cannot be computed one shard at a time (on every rank, before any row is sent).
        DivergenceError: ranks run different bodies.
    """
    journal = plan.comm.order.journal
    if journal is None or program.aggregate is None:
        return _aggregate(program, plan, edges, weight)
    rows: Tensor = journal.result(program.name, lambda: _aggregate(program, plan, edges, weight))
    return rows


def _aggregate(program: Program, plan: HaloPlan, edges: EdgeShards, weight: Tensor | None) -> Tensor:
    number, token = begin_call(plan.comm, program.name)
    streamed_to = plan.comm.device if plan.options.stream_structure else None
    program = replace(program, order=plan.comm.order, streamed_to=streamed_to)
    label = f"call {number} {program.name}"
    sums: dict[int, Tensor] | None = None

    def offer(program: Program, structure: Structure, needs_gradients: bool) -> list[int]:
        nonlocal sums
        sums = None
        if plan.options.cache_constant_inputs and not needs_gradients:
            sums = plan.caches.of(ConstantSums).find(program.of_what_is_read(structure), structure, edges)
        return [int(sums is not None), digest(describe_map(weight)), *offer_pull(plan, edges, structure)]

    try:
        program, structure, gradients, offers = settle(plan.comm, label, program, edges, plan.num_own_src, offer)
    except NeedsHaloError:
        if plan.options.mode != "halo":
            raise
        return _mapped(aggregate_at_once(program, plan, edges, label), weight)
    if not plan.options.fuse_attention:
        structure = replace(structure, attention=None)
    if program.watch is not None:
        program.watch(structure)
    program = program.of_what_is_read(structure)
    keeps_sums = plan.options.cache_constant_inputs
    only_scales = weight is not None
    maps_alike = all(offered[1] == offers[0][1] for offered in offers)  # a hook on one rank keeps its sums as they are
    if (
        weight is not None
        and maps_alike
        and (early := transformed_first(program, structure, gradients, weight, keeps_sums))
    ):
        (program, structure, gradients), weight = early, None
    call = _call_of(program, plan, edges, structure, number, gradients)
    if all(has for has, *_ in offers):
        assert sums is not None
        return _mapped(
            _node_part(program, call, [sums[k] for k in range(len(structure.reductions))], only_scales), weight
        )
    call.pull = choose_pull(call, program, [rest for _, _, *rest in offers])
    outputs = _apply(call, program, token)
    if keeps_sums and not gradients:
        plan.caches.of(ConstantSums).keep(
            program, structure, edges, {k: output.detach() for k, output in enumerate(outputs)}
        )
    for k, (count, mean, variance) in call.norm_moments.items():
        structure.norms[k].track(Moments(count, mean, variance), [count, mean.numel()])
    if structure.edge_output:
        return outputs[0]
    in_place = bool(gradients) and not needed_values(call)[0]  # then nobody else has the sums
    return _mapped(_node_part(program, call, outputs, only_scales, only_scales and in_place), weight)


def _apply(call: Call, program: Program, token: Tensor) -> list[Tensor]:
    """What the call gives: its reductions, or the edge result. Ends the call."""
    *outputs, last = _Aggregate.apply(
        call,
        token,
        *(program.src[name] for name in call.src_names),
        *(program.dst[name] for name in call.dst_names),
        *(program.edge[name] for name in call.edge_names),
        *call.captured,
    )
    end_call(call.plan.comm, last)
    return outputs


def _mapped(rows: Tensor, weight: Tensor | None) -> Tensor:
    return rows if weight is None else F.linear(rows, weight)


def _call_of(
    program: Program, plan: HaloPlan, edges: EdgeShards, structure: Structure, number: int, gradients: frozenset[str]
) -> Call:
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(program.src[name]), name) for name in sorted(program.src)}
    used = structure.sources_of(list(range(len(structure.reductions))), with_edges=True)
    unused = set(canonical.values()) - {canonical[name] for name in used}
    return Call(
        program=replace(program, src={}, dst={}, edge={}),
        plan=plan,
        edges=edges,
        structure=structure,
        number=number,
        canonical=canonical,
        dst_names=sorted(program.dst),
        edge_names=sorted(program.edge),
        gradients=gradients - {f"s:{name}" for name in unused},  # they get none, as in plain autograd: not zeros
        captured=list(structure.captures),
        seed=_seed(program, plan, number, structure.random or structure.drops),
    )


def _seed(program: Program, plan: HaloPlan, number: int, is_random: bool) -> int:
    if program.seed is not None:
        return program.seed
    return draw_seed(plan.comm) if is_random else number


class _Aggregate(torch.autograd.Function):
    """Inputs: call, token, sources, destinations, edges, captures. Outputs: reductions or edge result, then a token."""

    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        operands = call.operands(tensors)
        attention = call.structure.attention
        result = run_forward(call, operands) if attention is None else run_attention(call, operands, attention)
        for k in call.structure.norms:
            mean, variance = result.values[k][0].double().unbind()
            call.norm_moments[k] = (int(result.states[k][0]), mean, variance)
        structure = call.structure
        if result.edges is not None:
            outputs, fixed = [result.edges], [] if structure.edge_differentiable else [result.edges]
        else:
            outputs = [result.values[k] for k in range(len(structure.reductions))]
            fixed = [out for out, reduction in zip(outputs, structure.reductions) if not reduction.differentiable]
        values, states = needed_values(call)
        kept = [rows for name in sorted(operands.kept) for rows in operands.kept[name]]
        flat_states = [part for k in states for part in result.states[k]]
        inputs = tensors
        if not call.reads_sources_again:  # then their shapes will do
            count = len(call.src_names)
            inputs = (*(t.new_empty(()).expand(t.shape) for t in tensors[:count]), *tensors[count:])
        ctx.save_for_backward(token, *inputs, *(result.values[k] for k in values), *flat_states, *kept)
        ctx.counts = (len(tensors), values, [(k, len(result.states[k])) for k in states], sorted(operands.kept))
        ctx.call = call
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return (*outputs, torch.zeros_like(token))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        refuse_double_backward(call.label)
        saved = list(ctx.saved_tensors)  # before communicating: a checkpoint recomputes, and communicates, here
        num_inputs, value_ids, state_sizes, kept_names = ctx.counts
        token, inputs, saved = saved[0], saved[1 : 1 + num_inputs], saved[1 + num_inputs :]
        operands = call.operands(inputs)
        values = dict(zip(value_ids, saved))
        saved = saved[len(value_ids) :]
        states = {}
        for k, size in state_sizes:
            states[k], saved = saved[:size], saved[size:]
        num_blocks = len(call.plan.blocks) - 1
        for name in kept_names:
            operands.kept[name], saved = saved[:num_blocks], saved[num_blocks:]

        structure = call.structure
        grad_edges, by_reduction = None, {}
        if structure.edge_output:
            grad_edges = None if grads[0] is None else grads[0].contiguous()
        else:
            by_reduction = {k: g for k, g in enumerate(grads[:-1]) if g is not None}
        found = zero_gradients(call, operands, by_reduction, grad_edges)
        attention = structure.attention
        if not structure.differentiable:
            pass  # frozen and of constant inputs: here because of the token, and every rank knows that
        elif attention is not None:
            (log_sum,) = states[attention.maximum]
            add_attention = attention_gradients if call.pull is None else pull_attention
            add_attention(call, operands, attention, values[attention.output], log_sum, found)
        elif call.pull is not None:
            pull_copies(call, found)
        else:
            run_backward(call, operands, values, states, found)
        results: list[Tensor | None] = [
            *(found.found(f"s:{name}") for name in call.src_names),
            *(found.found(f"d:{name}") for name in call.dst_names),
            *(found.found(f"e:{name}") for name in call.edge_names),
            *found.captures,
        ]
        needed = ctx.needs_input_grad[2:]
        return (None, torch.zeros_like(token), *(g if need else None for g, need in zip(results, needed)))


class _NodePhase:
    """Gives back the finished reductions, connected to autograd, to the node part of a body."""

    def __init__(self, outputs: list[Tensor], num_dst: int) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, 0, num_dst
        self._outputs = outputs

    def known_base(self, k: int) -> Base | None:
        return Base()

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        return self._outputs[k]


class _DividesInPlace(TorchFunctionMode):
    """Divides `tensors` where they are, in place of making a quotient beside them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("div", "true_divide", "__truediv__") and len(args) == 2 and not kwargs:
            first, second = args
            if any(first is tensor for tensor in self._tensors) and getattr(second, "dtype", None) == first.dtype:
                return first.div_(second)
        return func(*args, **(kwargs or {}))


def _node_part(
    program: Program, call: Call, outputs: list[Tensor], only_scales: bool, in_place: bool = False
) -> Tensor:
    """Run the node part once, with the resolved reductions: ordinary autograd from here on.

    It sees one made-up edge, so that code which branches on there being none behaves as usual; on a rank without
    destinations there is none for it to end in.

    Args:
        only_scales: it does no more than divide the sum that a scatter returns.
        in_place: nothing else has that sum.
    """
    assert program.aggregate is not None
    with torch.no_grad():
        num_edges = min(1, call.edges.num_dst)
        inputs = sample_inputs(program, call.edges, call.plan.num_own_src, grads=False, count=num_edges)
        inputs.num_dst = call.edges.num_dst
    message = call.structure.message
    phase = _NodePhase(outputs, call.edges.num_dst)
    scales = _DividesInPlace(outputs) if in_place else nullcontext()
    sums = [k for k, reduction in enumerate(call.structure.reductions) if only_scales and reduction.form != "ones"]
    with scales, EdgeTrace(program, inputs.index, phase, returned=frozenset(sums)) as trace:
        trace.count = call.structure.num_message
        return program.aggregate(message[:num_edges], inputs)
