"""What users' reduce functions make of messages, and cross reducers of the results of several edge types.

A reduce function sees all messages of a node at once, and nodes of one degree together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from dgl import DGLError
from torch import Tensor

from shardpass.core.aggregation import AtOnce, inputs_at_once
from shardpass.core.ranks import Ranks, RowSet, begin_call
from shardpass.frontends.dgl.followed import RowFunctions
from shardpass.frontends.dgl.frames import LazyFields
from shardpass.frontends.dgl.messages import Fields, MessagePassing
from shardpass.frontends.dgl.udf import ShardedNodeBatch


def reduced_by_user(
    passing: MessagePassing, message: Any, reducer: Callable[[Any], dict[str, Tensor]], functions: RowFunctions
) -> dict[str, Tensor]:
    """What `reducer` makes of the messages in each node's mailbox: ``{field: [num_dst, ...]}``. Collective.

    All halo rows are fetched at once. Nodes of one in-degree are reduced together; the messages of a node are in the
    order of original edge ids; a node without messages holds 0.
    """
    edges, plan = passing.edges, passing.edges.plan
    program, computed = passing.program_of(message, "mailbox of ")
    number, _ = begin_call(plan.comm, program.name)
    everything = inputs_at_once(program, plan, edges.shards, f"call {number} {program.name}", computed, edges.places)
    messages, index = everything.messages, everything.inputs.index
    assert isinstance(messages, dict)
    degrees = torch.bincount(index, minlength=everything.inputs.num_dst)
    starts = torch.cumsum(degrees, 0) - degrees
    canonical = edges.canonical
    found: list[dict[str, Tensor]] = []
    nodes: list[Tensor] = []
    for degree in torch.unique(degrees[degrees > 0]).tolist():
        chosen = (degrees == degree).nonzero().view(-1)
        rows = (starts[chosen].unsqueeze(1) + torch.arange(degree, device=chosen.device)).view(-1)
        mail = {name: value[rows].view(len(chosen), degree, *value.shape[1:]) for name, value in messages.items()}
        alike = RowSet("nodes of one in-degree", len(chosen), ("in-degree", degree))
        data = _rows_of(passing.dst, everything, chosen, plan.comm, alike)
        batch = ShardedNodeBatch(None, chosen, canonical[2], data, msgs=mail)
        batch.alike, batch.is_group, batch.comm = alike, True, plan.comm
        with plan.comm.made_up_edge(everything.made_up):
            found.append(dict(functions.run(plan.comm, reducer, batch, alike, mail)))
        nodes.append(chosen)
    order = torch.cat(nodes)
    result = {}
    for name in found[0]:
        rows = torch.cat([part[name] for part in found])
        whole = rows.new_zeros((everything.inputs.num_dst, *rows.shape[1:])).index_copy(0, order, rows)
        result[name] = whole[: edges.plan.num_dst]
    return result


def _rows_of(frame: Fields, everything: AtOnce, chosen: Tensor, comm: Ranks, alike: RowSet) -> LazyFields:
    def rows_of(rows: Tensor) -> Tensor:
        with comm.unfollowed():
            out = everything.padded(rows)[chosen]
        comm.mark_rows(out, alike)
        return out

    return LazyFields(frame, rows_of)


def warn_once(passing: MessagePassing, warned: set[str]) -> None:
    """Warn, once per edge type and on rank 0, what a user-defined reduce function costs."""
    plan = passing.edges.plan
    key = str(passing.edges.canonical)
    if key in warned or plan.comm.rank != 0 or plan.options.mode == "halo":
        return
    warned.add(key)
    warnings.warn(
        f"a user-defined reduce function needs all messages of a node at once: rank 0 fetches {plan.num_halo} halo "
        f"rows together and holds {passing.edges.num} messages, whatever the mode. Built-in reduce functions do not",
        stacklevel=5,
    )


_MERGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0)[0],
    "min": lambda stacked: stacked.min(0)[0],
}


def merged(
    parts: list[tuple[int, dict[str, Tensor]]], cross_reducer: Any, comm: Ranks, functions: RowFunctions, of: RowSet
) -> dict[str, Tensor]:
    """One result of `parts`, the results and the number of the edge type that gave each, for `multi_update_all`.

    Raises:
        DGLError: there is no such `cross_reducer`.
    """
    if len(parts) == 1 and cross_reducer != "stack":
        return parts[0][1]
    if not callable(cross_reducer) and cross_reducer not in (*_MERGERS, "stack"):
        raise DGLError(
            f"the cross type reducer is {cross_reducer!r}; expected {', '.join(_MERGERS)}, stack or a function"
        )
    if cross_reducer == "stack":
        parts = sorted(parts, key=lambda part: part[0])
    whole = {}
    for name in dict.fromkeys(name for _, fields in parts for name in fields):
        found = [fields[name] for _, fields in parts if name in fields]
        if callable(cross_reducer):
            whole[name] = functions.run(comm, cross_reducer, found, of)
        elif cross_reducer == "stack":
            whole[name] = torch.stack(found, 1)
        else:
            whole[name] = _MERGERS[cross_reducer](torch.stack(found)) if len(found) > 1 else found[0]
    return whole
