"""The node function of a program: what it makes of the finished reductions, as ordinary autograd."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call
from shardpass.core.aggregation.node_steps import NodeSteps, NodeStepsWriter
from shardpass.core.ranks import KeptCalls, torch_private
from shardpass.core.tracing import Base, EdgeTrace, Program, conditions, sample_inputs, tensors_in


def run_node_part(program: Program, call: Call, outputs: list[Tensor], only_scales: bool) -> Any:
    """What the node function of `program` makes of the reductions `outputs`, ``[num_dst, ...]`` or a tuple.

    It sees one made-up edge, so that code which branches on there being none behaves as usual. On a rank without
    destinations there is none for that edge to end in. Where what it did in an earlier call is known, it does not run.

    Args:
        program: with its tensors.
        only_scales: the node function does no more than divide the sum that a scatter returns.
    """
    assert program.aggregate is not None
    key, depends_on = _found_by(program, call, outputs), program.depends_on
    if key is None or depends_on is None:
        return _run(program, call, outputs, only_scales, None)
    steps: NodeSteps | None = program.findings.find(key, depends_on)
    if steps is not None:
        return steps.run(outputs)
    writer = NodeStepsWriter(depends_on.tensors, len(outputs))
    out = _run(program, call, outputs, only_scales, writer)
    if (steps := writer.finish(out)) is not None:
        program.findings.keep(key, depends_on, steps)
    return out


def _found_by(program: Program, call: Call, outputs: list[Tensor]) -> Hashable | None:
    """What the steps of the node function hang on besides `Program.depends_on`; `None` where they are not kept."""
    if program.depends_on is None or call.structure.random or call.plan.comm.kept_calls is not None:
        return None
    known = conditions(program, call.edges, call.plan.num_own_src, call.gradients)
    kinds = tuple((rows.shape, rows.dtype, rows.requires_grad) for rows in outputs)
    return None if known is None else ("node steps", known, kinds)


def _run(
    program: Program, call: Call, outputs: list[Tensor], only_scales: bool, writer: NodeStepsWriter | None
) -> Any:  # fmt: skip
    assert program.aggregate is not None
    with torch.no_grad():
        num_edges = min(1, call.edges.num_dst)
        inputs = sample_inputs(program, call.edges, call.plan.num_own_src, grads=False, count=num_edges)
        inputs.num_dst = call.edges.num_dst
    sums = [k for k, reduction in enumerate(call.structure.reductions) if only_scales and reduction.form != "ones"]
    phase = _NodePhase(outputs, call.edges.num_dst)
    trace = _NodeTrace(replace(program, maps=()), inputs, phase, returned=frozenset(sums))
    trace.kept, trace.writer = call.plan.comm.kept_calls, writer
    message = torch_private.tree_map_only(Tensor, lambda rows: rows[:num_edges], call.structure.message)
    if writer is not None:
        of_edge = (rows for _, rows in inputs.items())
        writer.begin([*tensors_in(torch_private.tree_leaves(message)), inputs.index, *of_edge])
    with call.plan.comm.in_message(), trace:
        trace.count = call.structure.num_message
        return program.aggregate(message, inputs)


class _NodeTrace(EdgeTrace):
    """Runs a node function. During an inference, what it fills for all nodes needs no memory."""

    kept: KeptCalls | None = None
    writer: NodeStepsWriter | None = None

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        """Carry out one intercepted call."""
        if self.kept is not None and name in ("new_zeros", "new_ones", "new_full"):
            return self.kept.filled(func, args, kwargs)
        number = self.count
        out = super().run(func, name, args, kwargs, operands)
        if self.writer is not None and self.count == number:
            self.writer.note(func, name, args, kwargs, out)
        elif self.writer is not None:
            self.writer.note_reduction(number, args, kwargs, out)
        return out


class _NodePhase:
    """Gives the finished reductions, connected to autograd, to the node function."""

    def __init__(self, outputs: list[Tensor], num_dst: int) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, 0, num_dst
        self._outputs = outputs

    def known_base(self, k: int) -> Base | None:
        return Base()

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        return self._outputs[k]
