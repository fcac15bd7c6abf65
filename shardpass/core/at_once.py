"""A program run once on all of the rank's edges, every halo row here at the same time: for bodies that see whole
neighbourhoods (a median, an LSTM over neighbours) and so cannot be computed in pieces. ``halo`` mode only.

Ordinary autograd throughout; the halo rows come by a differentiable fetch. The row of a program's edge tensors must be
told from tables of the same length, so ranks agree on them as they do for sharded calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.agreement import agree, settle
from shardpass.core.halo import HaloPlan
from shardpass.core.program import Inputs, Program
from shardpass.core.shard import EdgeShards
from shardpass.core.tracing import HARMLESS_OPS, INDEX_OPS, SCATTERS, SHAPE_OPS, tensors_in
from shardpass.core.transfer import halo_fetch
from shardpass.errors import NeedsHaloError, RefusedError


def aggregate_at_once(program: Program, plan: HaloPlan, edges: EdgeShards, label: str) -> Tensor:
    """What `aggregate` returns, from one run of the body on all edges. Collective, in backward too.

    The body sees the edges sorted by destination, those of one destination in the order of the edge list. A rank
    without edges runs it on one made-up edge into a destination of its own, which is dropped afterwards.
    """
    program = _with_edge_tensors(program, plan, edges, label)
    src_rows, dst_rows, positions = _edges_by_destination(edges)
    degree = edges.largest_degree
    most = degree if degree is not None else (int(edges.degrees().max()) if edges.num_edges else 0)
    most = max(answer[0] for answer in agree(plan.comm, f"{label}: largest in-degree", [most]))
    fetched = {name: halo_fetch(t, plan, f"{program.name}: {name}") for name, t in sorted(program.src.items())}
    inputs = Inputs(
        src={name: t.index_select(0, src_rows) for name, t in fetched.items()},
        dst={name: t.index_select(0, dst_rows) for name, t in program.dst.items()},
        edge={name: t.index_select(0, positions) for name, t in program.edge.items()},
        index=dst_rows,
        num_dst=edges.num_dst,
        max_degree=most,
    )
    made_up = src_rows.numel() == 0
    if made_up:
        inputs = _with_made_up_edge(inputs)
    plan.comm.order.made_up = made_up
    try:
        with _Guard(program.name, inputs.index):
            out = program.message(inputs)
        if program.aggregate is not None:
            out = program.aggregate(out, inputs)
    finally:
        plan.comm.order.made_up = False
    if program.aggregate is None:
        whole = out.new_zeros((edges.num_edges, *out.shape[1:]))
        return whole if made_up else whole.index_copy(0, positions, out)
    return out.narrow(program.node_dim, 0, edges.num_dst) if made_up else out


class _Guard(TorchFunctionMode):
    """Lets a message scatter along the destination index, look up by it and take some of it, and nothing else.

    Its numbers, and the order of the edges, are this rank's own.
    """

    def __init__(self, name: str, index: Tensor) -> None:
        super().__init__()
        self._name, self._aliases = name, {id(index): index}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not any(id(t) in self._aliases for t in tensors_in((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        first_is_index = bool(args) and id(args[0]) in self._aliases
        looks_up = name in SCATTERS or name in INDEX_OPS or (name == "__setitem__" and not first_is_index)
        if not (looks_up or name in SHAPE_OPS or name in HARMLESS_OPS or (name == "max" and len(args) == 1)):
            raise RefusedError(
                f"{self._name}: `{name}` on the destination index inside message(): its numbers, and the order of the "
                f"edges, differ from those on the whole graph. What needs a whole neighbourhood goes into aggregate()"
            )
        out = func(*args, **kwargs)
        if first_is_index and isinstance(out, Tensor) and (name in SHAPE_OPS or name == "__getitem__"):
            self._aliases[id(out)] = out
        return out


def _with_edge_tensors(program: Program, plan: HaloPlan, edges: EdgeShards, label: str) -> Program:
    """`program` with those tensors as edge tensors that every rank finds to be so; its message is checked if it can."""
    try:
        messages = replace(program, aggregate=None)
        return replace(program, edge=settle(plan.comm, label, messages, edges, plan.num_own_src)[0].edge)
    except NeedsHaloError:
        names = sorted(program.edge)
        mine = [int(program.edge[n].dim() > 0 and program.edge[n].size(0) == edges.num_edges) for n in names]
        answers = agree(plan.comm, f"{label}: edge tensors", [len(names), *mine])
        common = [all(flags) for flags in zip(*(answer[1:] for answer in answers))]
        return replace(program, edge={n: program.edge[n] for n, per_edge in zip(names, common) if per_edge})


def _edges_by_destination(edges: EdgeShards) -> tuple[Tensor, Tensor, Tensor]:
    """``(source rows, destination rows, positions in the edge list)``, ``[num_edges]`` int64 each."""
    src, dst, positions = [], [], []
    for shard in edges.shards:
        src.append(shard.src_rows.to(torch.int64) + shard.block.start)
        dst.append(shard.dst_rows())
        rows = shard.edge_rows
        positions.append(
            torch.arange(rows.start, rows.stop, device=dst[-1].device) if isinstance(rows, slice) else rows
        )
    src_rows, dst_rows, position = torch.cat(src), torch.cat(dst), torch.cat(positions)
    order = torch.argsort(position)
    order = order[torch.argsort(dst_rows[order], stable=True)]
    return src_rows[order], dst_rows[order], position[order]


def _with_made_up_edge(inputs: Inputs) -> Inputs:
    def one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.cat([t, t.new_zeros((1, *t.shape[1:]))]) for name, t in tensors.items()}

    return Inputs(
        src=one(inputs.src),
        dst=one(inputs.dst),
        edge=one(inputs.edge),
        index=inputs.index.new_full((1,), inputs.num_dst),
        num_dst=inputs.num_dst + 1,
        max_degree=max(1, inputs.max_degree or 0),
    )
