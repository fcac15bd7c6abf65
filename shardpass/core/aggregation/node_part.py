"""The node function of a program: what it makes of the finished reductions, as ordinary autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call
from shardpass.core.ranks import KeptCalls, torch_private
from shardpass.core.tracing import Base, EdgeTrace, Program, sample_inputs


def run_node_part(program: Program, call: Call, outputs: list[Tensor], only_scales: bool) -> Any:
    """What the node function of `program` makes of the reductions `outputs`, ``[num_dst, ...]`` or a tuple.

    It sees one made-up edge, so that code which branches on there being none behaves as usual. On a rank without
    destinations there is none for that edge to end in.

    Args:
        program: with its tensors.
        only_scales: the node function does no more than divide the sum that a scatter returns.
    """
    assert program.aggregate is not None
    if (k := call.structure.returned) is not None:
        return outputs[k].clone()  # the engine reads these values again, and a model may change its own in place
    with torch.no_grad():
        num_edges = min(1, call.edges.num_dst)
        inputs = sample_inputs(program, call.edges, call.plan.num_own_src, grads=False, count=num_edges)
        inputs.num_dst = call.edges.num_dst
    phase = _NodePhase(outputs, call.edges.num_dst)
    sums = [k for k, reduction in enumerate(call.structure.reductions) if only_scales and reduction.form != "ones"]
    trace = _NodeTrace(replace(program, maps=()), inputs, phase, returned=frozenset(sums))
    trace.kept = call.plan.comm.kept_calls
    with call.plan.comm.in_message(), trace:
        trace.count = call.structure.num_message
        message = torch_private.tree_map_only(Tensor, lambda rows: rows[:num_edges], call.structure.message)
        return program.aggregate(message, inputs)


class _NodeTrace(EdgeTrace):
    """Runs a node function. During an inference, what it fills for all nodes needs no memory."""

    kept: KeptCalls | None = None

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        """Carry out one intercepted call."""
        if self.kept is not None and name in ("new_zeros", "new_ones", "new_full"):
            return self.kept.filled(func, args, kwargs)
        return super().run(func, name, args, kwargs, operands)


class _NodePhase:
    """Gives the finished reductions, connected to autograd, to the node function."""

    def __init__(self, outputs: list[Tensor], num_dst: int) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, 0, num_dst
        self._outputs = outputs

    def known_base(self, k: int) -> Base | None:
        return Base()

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        return self._outputs[k]
