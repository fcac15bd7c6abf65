"""Which part each node goes to: METIS, LDG, Fennel, random, contiguous ranges, or the user's own assignment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardpass.data.metis import metis_parts
from shardpass.data.raw import NODE, NodeType, RawGraph
from shardpass.data.rows import as_tensor
from shardpass.data.streaming import PASSES, STREAMING, Budget, streamed_parts

GIVEN = "given"
"""The method a manifest records for a user's own assignment."""


def random_parts(graph: RawGraph, parts: int, seed: int) -> dict[NodeType, Tensor]:
    """Random parts; per type, and over all types, their sizes differ by at most one."""
    generator = torch.Generator().manual_seed(seed)
    assigned, dealt = {}, 0
    for node_type, count in graph.num_nodes.items():
        part_of = torch.empty(count, dtype=torch.int32)
        part_of[torch.randperm(count, generator=generator)] = (torch.arange(dealt, dealt + count) % parts).int()
        assigned[node_type] = part_of
        dealt += count
    return assigned


def range_parts(graph: RawGraph, parts: int, seed: int) -> dict[NodeType, Tensor]:
    """Contiguous ranges of original ids; per type, their sizes differ by at most one."""
    return {
        node_type: torch.div(torch.arange(count) * parts, max(1, count), rounding_mode="floor").int()
        for node_type, count in graph.num_nodes.items()
    }


METHODS: dict[str, Callable[[RawGraph, int, int], dict[NodeType, Tensor]]] = {
    "metis": metis_parts,
    "random": random_parts,
    "range": range_parts,
}


def assign(
    graph: RawGraph,
    parts: int,
    method: str = "metis",
    assignment: Any = None,
    seed: int = 0,
    passes: int = PASSES,
    budget: Budget | None = None,
) -> dict[NodeType, Tensor]:
    """The part of each node by original id, int32 [num_nodes], per node type. Empty parts are legal.

    Args:
        graph: a validated graph.
        parts: number of parts; may be larger than the number of nodes.
        method: one of "metis", "ldg", "fennel", "random", "range"; ignored with an `assignment`.
        assignment: parts in `[0, parts)`, one integer per node: an array, or per node type a dict of arrays.
        seed: of the random choices; the same seed gives the same parts.
        passes: of "ldg" and "fennel" over all nodes.
        budget: memory for the edges of a graph in files.

    Raises:
        ValueError: an unknown method, no parts, or an assignment of another length or out of range.
        TypeError: an assignment that is not of integers.
        MissingDependencyError: "metis" without pymetis.
    """
    if parts < 1:
        raise ValueError(f"{parts} parts; expected at least 1")
    if assignment is not None:
        return _given_parts(graph, parts, assignment)
    if method in STREAMING:
        return streamed_parts(graph, parts, method, budget or Budget(), passes)
    if method not in METHODS:
        known = ", ".join(sorted((*METHODS, *STREAMING)))
        raise ValueError(f"unknown partition method {method!r}; the methods are {known}")
    return METHODS[method](graph, parts, seed)


def _given_parts(graph: RawGraph, parts: int, assignment: Any) -> dict[NodeType, Tensor]:
    if not isinstance(assignment, Mapping):
        if len(graph.num_nodes) != 1:
            raise ValueError(
                f"one assignment for {len(graph.num_nodes)} node types; "
                f"expected a dict with an array for each of {list(graph.num_nodes)}"
            )
        assignment = {next(iter(graph.num_nodes), NODE): assignment}
    if set(assignment) != set(graph.num_nodes):
        raise ValueError(
            f"the assignment has the node types {sorted(assignment)}; the graph has {sorted(graph.num_nodes)}"
        )
    return {kind: _checked(assignment[kind], kind, count, parts) for kind, count in graph.num_nodes.items()}


def _checked(values: Any, node_type: NodeType, count: int, parts: int) -> Tensor:
    what = f"the assignment of nodes of type {node_type!r}"
    part_of = as_tensor(values, what).cpu()
    if tuple(part_of.shape) != (count,):
        raise ValueError(f"{what} has the shape {list(part_of.shape)}; expected [{count}], one part per node")
    if count == 0:
        return torch.empty(0, dtype=torch.int32)
    if part_of.dtype is torch.bool or part_of.is_floating_point() or part_of.is_complex():
        raise TypeError(f"{what} is {part_of.dtype}; expected integers: convert it to int64")
    part_of = part_of.long()
    wrong = torch.nonzero((part_of < 0) | (part_of >= parts))
    if wrong.numel():
        node = int(wrong[0])
        raise ValueError(
            f"{what}: node {node} has the part {int(part_of[node])}, outside the valid interval [0, {parts}); "
            "correct it, or pass the true number of parts"
        )
    return part_of.int()
