"""Message functions that need whole neighbourhoods at once, such as a median or an LSTM over neighbours.

They cannot be computed in pieces, so they run once on all edges of the rank, with every halo row there at the same
time. This needs the mode ``halo``. Gradients are plain autograd; a differentiable fetch brings the halo rows. Ranks
agree which tensors have a row per edge, as they do for every sharded call, since a table may have the same length.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.aggregation.agreement import settle
from shardpass.core.exchange import HaloPlan, halo_fetch
from shardpass.core.ranks import agree
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import (
    HARMLESS_OPS,
    INDEX_OPS,
    SCATTERS,
    SHAPE_OPS,
    Inputs,
    NeedsMessagesError,
    Program,
    rows_apart,
    tensors_in,
)
from shardpass.errors import NeedsHaloError, RefusedError

Messages = Any  # a tensor, or a tuple or dict of tensors


@dataclass
class AtOnce:
    """All edges of the rank, sorted by destination, and the messages on them.

    Args:
        inputs: what the message function saw. A rank without edges has one made-up edge, into one more destination.
        positions: of the edges in the edge list.
        made_up: whether the edge is made up.
        messages: what the message function returned: a tensor, or a dict of tensors with a row per edge.
    """

    inputs: Inputs
    positions: Tensor
    made_up: bool
    messages: Messages = field(default_factory=dict)

    def padded(self, rows: Tensor) -> Tensor:
        """`rows` of destinations, ``[num_dst, ...]``, with one more where there is a made-up destination."""
        return torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]) if self.made_up else rows


def inputs_at_once(
    program: Program,
    plan: HaloPlan,
    edges: EdgeShards,
    label: str,
    message: Callable[[Inputs], Messages],
    places: Tensor | None = None,
) -> AtOnce:
    """All edges with the rows they need, and what `message` makes of them. Collective, in backward too.

    Args:
        program: says which inputs there are.
        message: the message function. It returns a tensor, or a dict of tensors with a row per edge.
        places: the place of each edge among those of its destination, ``[num_edges]``. `None` keeps the order of the
            edge list.
    """
    program = replace(program, message=lambda inputs: _side_by_side(message(inputs)))
    program = _with_edge_tensors(program, plan, edges, label)
    src_rows, dst_rows, positions = edges_by_destination(edges, places)
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
    found = AtOnce(inputs, positions, src_rows.numel() == 0)
    if found.made_up:
        found.inputs = _with_made_up_edge(inputs)
    with plan.comm.made_up_edge(found.made_up), _Guard(program.name, found.inputs.index):
        found.messages = message(found.inputs)
    return found


def _side_by_side(messages: Messages) -> Any:
    """The tensors of a dict or tuple side by side, ``[E, columns]``, for checks that look at one tensor."""
    if isinstance(messages, Tensor):
        return messages
    messages = messages if isinstance(messages, tuple) else tuple(messages.values())
    kinds = [tensor.dtype for tensor in messages]
    widest = next((kind for kind in kinds if kind.is_floating_point), torch.float64)
    return torch.cat([tensor.reshape(tensor.size(0), -1).to(widest) for tensor in messages], dim=1)


def aggregate_at_once(program: Program, plan: HaloPlan, edges: EdgeShards, label: str) -> Tensor:
    """What `aggregate` returns, from one run of the message function on all edges. Collective, in backward too.

    The message function sees the edges sorted by destination; those of one destination are in the order of the edge
    list. A rank without edges runs it on one made-up edge into a destination of its own, which is dropped afterwards.
    """
    found = inputs_at_once(program, plan, edges, label, program.message)
    out = found.messages
    if program.aggregate is None:
        whole = out.new_zeros((edges.num_edges, *out.shape[1:]))
        return whole if found.made_up else whole.index_copy(0, found.positions, out)
    apart = rows_apart(program.name, out, found.inputs) if plan.comm.size > 1 else nullcontext()
    with plan.comm.made_up_edge(found.made_up), apart:
        out = program.aggregate(out, found.inputs)
    if not isinstance(out, Tensor):  # which may hold rows of edges, and these are in another order here
        raise NeedsMessagesError(f"{program.name}: the node function returns a {type(out).__name__}")
    return out.narrow(program.node_dim, 0, edges.num_dst) if found.made_up else out


class _Guard(TorchFunctionMode):
    """Lets a message function scatter along the destination index, index with it, and take some of it.

    It refuses everything else, since the numbers in the index and the order of the edges are this rank's own.
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
    """`program` with those edge tensors that every rank finds to have a row per edge. Checks the message if it can."""
    try:
        messages = replace(program, aggregate=None)
        agreed = settle(plan.comm, label, messages, edges, plan.num_own_src)
        return replace(program, edge=agreed.program.edge).of_what_is_read(agreed.structure)
    except NeedsHaloError:
        names = sorted(program.edge)
        mine = [int(program.edge[n].dim() > 0 and program.edge[n].size(0) == edges.num_edges) for n in names]
        answers = agree(plan.comm, f"{label}: edge tensors", [len(names), *mine])
        common = [all(flags) for flags in zip(*(answer[1:] for answer in answers))]
        return replace(program, edge={n: program.edge[n] for n, per_edge in zip(names, common) if per_edge})


def edges_by_destination(edges: EdgeShards, places: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
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
    order = torch.argsort(position if places is None else places[position])
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
