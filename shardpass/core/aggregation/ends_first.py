"""Linear maps of what the ends of edges hold, applied to each node once: ``W [x_i, x_j] = W_1 x_i + W_2 x_j``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.exchange import HaloPlan
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import EndSide, Inputs, Key, LinearMap, Program, Sides, Structure, structure_of

Found = tuple[Program, Structure, frozenset[Key]]


def ends_mapped(
    program: Program, structure: Structure, gradients: frozenset[Key], plan: HaloPlan, edges: EdgeShards
) -> Found:
    """The program with the linear maps of its structure applied to nodes, its structure and gradients.

    The message function then finds the mapped rows of the ends among its inputs, and maps the other columns alone. A
    program is left as it is where wider rows would travel.

    Args:
        gradients: the inputs that need gradients on some rank, agreed by all.
    """
    if torch.is_inference_mode_enabled() or plan.comm.kept_calls is not None:
        return program, structure, gradients  # every source would travel, since nothing is known of who reads it
    described, known = (
        f"{[one.describe() for one in structure.maps]} on {plan.comm.size} ranks",
        program.findings.mapped_first,
    )
    if plan.comm.size > 1 and described not in known:
        with torch.no_grad():  # or a checkpoint, whose recomputation tries nothing, would count what it saved
            tried = _with_tables(program, structure)
        found = _structure_of(tried, structure, gradients, plan, edges)[1]
        known[described] = _width(tried, found) <= _width(program, structure)
    if not known.get(described, True):
        return program, structure, gradients
    return _structure_of(_with_tables(program, structure), structure, gradients, plan, edges)


def _with_tables(program: Program, structure: Structure) -> Program:
    """The program that finds the mapped rows of the ends among its inputs."""
    tables = {}
    for one in structure.maps:
        bias = one.bias
        for side in reversed(one.sides):  # the bias goes to the destinations, whose rows do not travel
            tables[Key(side, one.table_name)] = _table(program, one, side, bias)
            bias = None
    names, aggregate = {key.name for key in tables}, program.aggregate
    inputs = Sides.of([*program.inputs.items(), *tables.items()])
    return replace(
        program,
        src=inputs.src,
        dst=inputs.dst,
        message=lambda of_edges: program.message(_given(names, of_edges)),
        aggregate=aggregate and (lambda message, of_edges: aggregate(message, _given(names, of_edges))),
        maps=structure.maps,
        reads=None if program.reads is None else program.reads | set(tables),
    )


def _structure_of(
    mapped: Program, structure: Structure, gradients: frozenset[Key], plan: HaloPlan, edges: EdgeShards
) -> Found:
    """The program `mapped`, its structure, and the inputs that need gradients."""
    needed = set(gradients)
    for one in structure.maps if torch.is_grad_enabled() else ():
        for side in one.sides:
            ends = {Key(side, part.name) for part in one.ends if part.side == side}
            if ends & gradients or any(tensor.requires_grad for tensor in one.tensors):
                needed.add(Key(side, one.table_name))
    with plan.comm.random_lock():
        found, _ = structure_of(mapped, edges, plan.num_own_src, frozenset(needed))
    return mapped, found, frozenset(needed) - found.unread


def _table(program: Program, one: LinearMap, side: EndSide, bias: Tensor | None) -> Tensor:
    """The rows of an end, mapped: ``[num_nodes, ..., out_channels]``."""
    total = None
    for part in one.ends:
        if part.side != side:
            continue
        rows = program.inputs[Key(side, part.name)]
        rows = rows.reshape(rows.size(0), *part.tail)
        for place in part.picks:
            rows = rows.select(1, place)
        mapped = F.linear(rows, one.weight[:, part.start : part.stop], bias if total is None else None)
        total = mapped if total is None else total + mapped
    assert total is not None
    return total


def _width(program: Program, structure: Structure) -> int:
    """Bytes of the rows that travel for each node."""
    rows = {id(program.src[name]): program.src[name] for name in structure.sources}
    return sum(t.shape[1:].numel() * t.itemsize for t in rows.values())


def _given(names: Collection[str], inputs: Inputs) -> Inputs:
    """What the message function of a user may see: without the mapped rows."""
    src, dst = ({name: t for name, t in side.items() if name not in names} for side in (inputs.src, inputs.dst))
    return replace(inputs, src=src, dst=dst)
