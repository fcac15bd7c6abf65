"""One sharded call as an autograd function: the forward and backward loops between autograd's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardpass.core.aggregation.attention import AttentionAdjoint, run_attention
from shardpass.core.aggregation.backward import run_backward
from shardpass.core.aggregation.call import Call, ForwardResult, Operands
from shardpass.core.aggregation.execute import Push, execute
from shardpass.core.aggregation.forward import run_forward
from shardpass.core.aggregation.gradients import Gradients, needed_values, zero_gradients
from shardpass.core.aggregation.pull import pull_attention, pull_copies
from shardpass.core.aggregation.second_order import differentiable_gradients
from shardpass.core.ranks import begin_call, check_backward, derived, end_call, torch_private
from shardpass.core.tracing import Base, Key, Sides


def run_call(call: Call, inputs: Sides, token: Tensor) -> list[Tensor]:
    """The reductions of a call, ``[num_dst, ...]`` each, or its edge result alone. Collective. Ends the call.

    Args:
        inputs: its tensors.
        token: that `begin_call` gave.
    """
    *outputs, last = _ShardedCall.apply(
        call,
        token,
        *(inputs[key] for key in call.keys),
        *call.captured,
    )
    end_call(call.plan.comm, last)
    if call.structure.attention is None:
        return outputs
    return [out.to(reduction.dtype) for out, reduction in zip(outputs, call.structure.reductions)]


class _ShardedCall(torch.autograd.Function):
    """Inputs: call, token, sources, destinations, edges, captures. Outputs: reductions or edge result, then a token."""

    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        structure, operands = call.structure, call.operands(tensors)
        if structure.attention is None:
            result = run_forward(call, operands)
        else:
            result = run_attention(call, operands, structure.attention)
        for k in structure.norms:
            mean, variance = result.values[k][0].to(torch.float64, copy=True).unbind()  # no views of an output
            call.norm_moments[k] = (int(result.states[k][0]), mean, variance)
        _save(ctx, call, token, tensors, operands, result)
        if result.edges is not None:
            outputs, fixed = [result.edges], [] if structure.edge_differentiable else [result.edges]
        else:
            outputs = [result.values[k] for k in range(len(structure.reductions))]
            fixed = [out for out, reduction in zip(outputs, structure.reductions) if not reduction.differentiable]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return (*outputs, torch.zeros_like(token))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        check_backward(call.plan.comm, grads)
        if torch.is_grad_enabled():
            tensors = ctx.saved_tensors[1 : 1 + ctx.layout[0]]
            needed = [torch_private.is_asked_for(node) for node, _ in ctx.next_functions[1:]]
            return (None, *derived(call.plan.comm, grads[-1], partial(_derivative, call, tensors, grads[:-1], needed)))
        token, operands, results = _saved(ctx)
        grad_edges, by_reduction = None, {}
        if call.structure.edge_output:
            grad_edges = None if grads[0] is None else grads[0].contiguous()
        else:
            by_reduction = {k: g for k, g in enumerate(grads[:-1]) if g is not None}
        found = zero_gradients(call, operands, by_reduction, grad_edges)
        nodes = ctx.next_functions[1 + len(call.keys) :]
        found.asked = frozenset(i for i, (node, _) in enumerate(nodes) if torch_private.is_asked_for(node))
        _add_gradients(call, operands, results, found)
        of_inputs = [*(found.found(key) for key in call.keys), *found.captures]
        needed = ctx.needs_input_grad[2:]
        zero = torch.zeros_like(token) if grads[-1] is None else grads[-1]
        return (None, zero, *(g if need else None for g, need in zip(of_inputs, needed)))


def _derivative(
    call: Call, tensors: Sequence[Tensor], results: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of `tensors` that are `needed` where backward is differentiated itself. Collective."""
    if call.reads_sources_again:
        return differentiable_gradients(call, tensors, results, needed)
    _, token = begin_call(call.plan.comm, call.label)
    given = {k: grad for k, grad in enumerate(results) if grad is not None}
    *of_sources, token = _Transposed.apply(call, token, tensors, [*given], *given.values())
    end_call(call.plan.comm, token)
    by_key = dict(zip(_linear_keys(call), of_sources))
    return [*(by_key.get(key) for key in call.keys), *[None] * len(call.captured)]


def _linear_keys(call: Call) -> list[Key]:
    return [key for key in call.keys if key.side == "src" and key in call.gradients]


class _Transposed(torch.autograd.Function):
    """The gradients of sums of copies, which are linear. Inputs: call, token, its tensors, which results; gradients.

    Outputs: the gradients of the sources, and a token. Backward is the call itself.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, token: Tensor, tensors: Sequence[Tensor], given: list[int], *grads: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token, *tensors)
        ctx.call, ctx.given = call, given
        operands = call.operands(tensors)
        found = zero_gradients(call, operands, {k: grad.contiguous() for k, grad in zip(given, grads)}, None)
        _add_gradients(call, operands, ForwardResult(), found)
        return (*(found.src[key.name] for key in _linear_keys(call)), torch.zeros_like(token))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        token, *tensors = ctx.saved_tensors
        call: Call = ctx.call
        comm = call.plan.comm
        arrived = dict(zip(_linear_keys(call), grads))
        rows = []
        for key, tensor in zip(call.keys, tensors):
            if key.side == "src":
                grad = arrived.get(key)
                tensor = tensor.new_zeros(tensor.shape) if grad is None else grad
            rows.append(tensor)
        structure = call.structure
        linear = replace(structure, reductions=tuple(replace(r, base=Base()) for r in structure.reductions))
        call = replace(call, structure=linear)

        def again() -> list[Tensor]:
            _, latest = begin_call(comm, call.label)
            *outputs, last = _ShardedCall.apply(call, latest, *rows, *tensors[len(rows) :])
            end_call(comm, last)
            return [outputs[k] for k in ctx.given]

        found = derived(comm, grads[-1], again) if torch.is_grad_enabled() else [torch.zeros_like(token), *again()]
        return (None, found[0], None, None, *found[1:])


def _add_gradients(call: Call, operands: Operands, results: ForwardResult, into: Gradients) -> None:
    """Run backward in the way that was chosen. Collective."""
    structure, attention = call.structure, call.structure.attention
    if not structure.differentiable:
        return  # frozen, and of constant inputs: autograd comes here because of the token, on every rank
    if attention is not None:
        (log_sum,) = results.states[attention.maximum]
        given = call, operands, attention, results.values[attention.output], log_sum, into
        if call.pull is None:
            execute(Push(call, operands, into), AttentionAdjoint(*given))
        else:
            pull_attention(*given)
    elif call.pull is not None:
        pull_copies(call, into)
    else:
        run_backward(call, operands, results, into)


def _save(
    ctx: Any, call: Call, token: Tensor, tensors: tuple[Tensor, ...], operands: Operands, result: ForwardResult
) -> None:
    inputs = tensors
    if not call.reads_sources_again:  # then their shapes will do
        count = sum(key.side == "src" for key in call.keys)
        shapes = (t.new_empty_strided(t.shape, [0] * t.dim()) for t in tensors[:count])
        inputs = (*shapes, *tensors[count:])
    values, states = needed_values(call)
    parts = {k: result.states[k] for k in states}
    many = [*parts.values(), *operands.kept.values()]
    ctx.save_for_backward(token, *inputs, *(result.values[k] for k in values), *(one for some in many for one in some))
    ctx.layout = len(inputs), values, _lengths(parts), _lengths(operands.kept)


def _saved(ctx: Any) -> tuple[Tensor, Operands, ForwardResult]:
    saved = iter(ctx.saved_tensors)  # before communicating: a checkpoint recomputes, and communicates, here
    num_inputs, values, states, kept = ctx.layout
    token, operands = next(saved), ctx.call.operands([*islice(saved, num_inputs)])
    found = ForwardResult({k: next(saved) for k in values}, {k: [*islice(saved, n)] for k, n in states.items()})
    operands.kept.update({name: [*islice(saved, n)] for name, n in kept.items()})
    return token, operands, found


def _lengths(lists: Mapping[Any, Sized]) -> dict[Any, int]:
    return {key: len(some) for key, some in lists.items()}
