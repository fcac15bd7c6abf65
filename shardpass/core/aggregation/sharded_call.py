"""The sharded call: sequential aggregation forward, rematerialization backward.

Source: Mostafa, "Sequential Aggregation and Rematerialization", MLSys 2022 (arXiv 2111.06483).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardpass.core.aggregation.agreement import settle
from shardpass.core.aggregation.autograd import run_call
from shardpass.core.aggregation.call import Call
from shardpass.core.aggregation.choice import OwnOffer, Way, choose_way, constant_sums
from shardpass.core.aggregation.node_part import run_node_part
from shardpass.core.aggregation.whole_neighbourhoods import aggregate_at_once
from shardpass.core.exchange import HaloPlan
from shardpass.core.ranks import begin_call
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import Program, tensors_in
from shardpass.core.training import DistributedBatchNorm, Moments
from shardpass.errors import NeedsHaloError


def aggregate(program: Program, plan: HaloPlan, edges: EdgeShards, weight: Tensor | None = None) -> Any:
    """What `program` computes over all edges of the graph: ``[num_dst, ...]``, or ``[num_edges, ...]`` for messages.

    If the node function returns a tuple, so does this.

    Collective, in backward too. Every rank must pass the same program. Gradients of its inputs, and of every tensor
    that its message function captures, flow as if the whole graph were here.

    Args:
        weight: ``[out_channels, in_channels]`` of a linear map of the result, ``[num_dst, in_channels]``. The map is
            applied before or after the sum, whichever is cheaper. Only for a node function that at most scales
            rows.

    Raises:
        RefusedError: the message function cannot be computed one shard at a time (on every rank, before any row is
            sent).
        DivergenceError: ranks run different message functions.
    """
    comm, kept = plan.comm, plan.comm.kept_calls
    compute = partial(_aggregate, program, plan, edges, weight)
    if kept is not None and program.aggregate is not None:
        compute = partial(kept.result, program.name, compute)
    if comm.is_followed:
        _require_rows(program, plan, edges)
    with comm.unfollowed():
        out = compute()
    if not comm.is_followed:
        return out
    rows = plan.edge_set(edges.num_edges) if program.aggregate is None else plan.dst_set
    for tensor in tensors_in([out]):
        dim = 0 if program.aggregate is None else program.node_dim
        if -tensor.dim() <= dim < tensor.dim() and tensor.size(dim) == rows.count:
            comm.mark_rows(tensor, rows, dim)
        elif tensor.dim() and tensor.size(0) == edges.num_edges:  # what an aggregation returns beside its rows
            comm.mark_rows(tensor, plan.edge_set(edges.num_edges))
    return out


def _require_rows(program: Program, plan: HaloPlan, edges: EdgeShards) -> None:
    """Refuse operands whose rows are not those of the graph."""
    edge_set = plan.edge_set(edges.num_edges)
    for tensors, of in ((program.src, plan.source_set), (program.dst, plan.dst_set), (program.edge, edge_set)):
        for tensor in tensors.values():
            plan.comm.require_rows(tensor, of, is_table=of is edge_set)


def _aggregate(program: Program, plan: HaloPlan, edges: EdgeShards, weight: Tensor | None) -> Any:
    kept = plan.comm.kept_calls
    if kept is not None:
        src, dst, edge = kept.operands(program.src, program.dst, program.edge)
        program = replace(program, src=src, dst=dst, edge=edge)
    number, token = begin_call(plan.comm, program.name)
    label = f"call {number} {program.name}"
    streamed_to = plan.comm.device if plan.options.stream_structure else None
    program = replace(program, ranks=plan.comm, streamed_to=streamed_to)
    offer = OwnOffer(plan, edges, weight)
    agreed = None
    try:
        agreed = settle(plan.comm, label, program, edges, plan.num_own_src, offer)
    except NeedsHaloError:
        if plan.options.mode != "halo":
            raise
    if agreed is None:  # not in the handler: a refusal there would be told as "needs the mode halo"
        return _mapped(aggregate_at_once(program, plan, edges, label), weight)
    for tensor in agreed.program.edge.values() if plan.comm.is_followed else ():
        plan.comm.require_rows(tensor, plan.edge_set(edges.num_edges))
    way = choose_way(agreed, plan, edges, number, weight, offer.sums)
    if way.sums is not None:
        return _finish(way, [way.sums[k] for k in range(len(way.sums))])
    outputs = run_call(way.call, way.inputs, token)
    _note_results(way.call, way.program, outputs)
    return _finish(way, outputs if kept is None else kept.deferred(outputs))


def _note_results(call: Call, program: Program, outputs: list[Tensor]) -> None:
    """Keep sums of inputs that do not change, and update the running statistics of batch norms."""
    if call.plan.options.cache_constant_inputs and not call.gradients and call.plan.comm.kept_calls is None:
        found = {k: output.detach() for k, output in enumerate(outputs)}
        constant_sums(call.plan).keep(program, call.structure, call.edges, found)
    for k, (count, mean, variance) in call.norm_moments.items():
        norm = call.structure.norms[k]
        assert isinstance(norm, DistributedBatchNorm)
        norm.track(Moments(count, mean, variance), [count, mean.numel()])


def _finish(way: Way, outputs: list[Tensor]) -> Any:
    if way.call.structure.edge_output:
        return outputs[0]
    return _mapped(run_node_part(way.program, way.call, outputs, way.only_scales), way.weight)


def _mapped(rows: Any, weight: Tensor | None) -> Any:
    return rows if weight is None else F.linear(rows, weight)
