"""The part of each node: by KaMinPar or METIS, at random, in contiguous ranges, or as the user assigned it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import require_count
from shardpass.data.file_rows import in_memory
from shardpass.data.kaminpar_parts import kaminpar_parts
from shardpass.data.metis import metis_parts
from shardpass.data.raw import NODE, NodeType, RawGraph, check_ids
from shardpass.data.streaming import Budget

_MOST_THREADS = 4096

METHODS = ("kaminpar", "metis", "random", "range")
GIVEN = "given"
"""The method that a manifest records for a user's own assignment."""


def assign(
    graph: RawGraph,
    parts: int,
    method: str = "kaminpar",
    assignment: Any = None,
    seed: int = 0,
    threads: int = 1,
    budget: Budget | None = None,
    node_weights: Any = None,
) -> dict[NodeType, Tensor]:
    """The part of each node of a validated graph, by original id, int32 [num_nodes], for each node type.

    Parts may be empty. All ranks of the budget are given those that rank 0 has found. The arguments and the errors are
    those of `partition`.
    """
    budget = budget or Budget()
    balances = assignment is None and method in ("kaminpar", "metis")
    _check_arguments(parts, method, assignment, seed, threads, node_weights is not None and not balances)
    weights = None if node_weights is None else _given_weights(graph, node_weights)
    if not balances:  # these two report other stages before
        budget.report("assign", 0, 1)
    if assignment is not None:
        found = _given_parts(graph, parts, assignment)
    elif method == "random":
        found = _random_parts(graph, parts, seed)
    elif method == "range":
        found = _range_parts(graph, parts)
    elif method == "metis":
        found = _over_all_types(graph, parts, partial(metis_parts, graph, parts, budget, seed, weights))
    else:
        found = _over_all_types(graph, parts, partial(kaminpar_parts, graph, parts, budget, seed, threads, weights))
    budget.report("assign", 1, 1)
    return {kind: budget.team.broadcast("the part of each node", part_of) for kind, part_of in found.items()}


def _check_arguments(parts: int, method: str, assignment: Any, seed: Any, threads: int, has_useless: bool) -> None:
    """Raise an error unless these are arguments of `assign`. `has_useless` says that weights are given to no use."""
    if parts < 1:
        raise ValueError(f"{parts} parts; expected at least 1")
    if assignment is None and method not in METHODS:
        raise ValueError(f"unknown partition method {method!r}; the methods are {', '.join(METHODS)}")
    if not isinstance(seed, int):
        raise TypeError(f"partition(seed=): `seed` must be an integer, found {type(seed).__name__}")
    require_count(threads, "threads", "partition(threads=)", 1, _MOST_THREADS)
    if has_useless:
        given = repr(method) if assignment is None else "an assignment"
        raise ValueError(
            f"node_weights are for the methods 'kaminpar' and 'metis', which balance them, not for {given}"
        )


def _over_all_types(graph: RawGraph, parts: int, cut: Callable[[], Tensor]) -> dict[NodeType, Tensor]:
    """The parts that `cut` gives to the nodes of all types, one type after the other."""
    sizes = list(graph.num_nodes.values())
    total = sum(sizes)
    if parts == 1:
        part_of = torch.zeros(total, dtype=torch.int32)
    elif parts >= total:
        part_of = torch.arange(total, dtype=torch.int32)
    else:
        part_of = cut()
    return dict(zip(graph.num_nodes, part_of.int().split(sizes)))


def _random_parts(graph: RawGraph, parts: int, seed: int) -> dict[NodeType, Tensor]:
    """Random parts whose sizes differ by at most one, for each type and for all types together."""
    generator = torch.Generator().manual_seed(seed)
    assigned, dealt = {}, 0
    for node_type, count in graph.num_nodes.items():
        part_of = torch.empty(count, dtype=torch.int32)
        part_of[torch.randperm(count, generator=generator)] = (torch.arange(dealt, dealt + count) % parts).int()
        assigned[node_type] = part_of
        dealt += count
    return assigned


def _range_parts(graph: RawGraph, parts: int) -> dict[NodeType, Tensor]:
    """Contiguous ranges of original ids whose sizes differ by at most one, for each type."""
    return {
        node_type: torch.div(torch.arange(count) * parts, max(1, count), rounding_mode="floor").int()
        for node_type, count in graph.num_nodes.items()
    }


def _by_type(graph: RawGraph, given: Any, what: str) -> Mapping[NodeType, Any]:
    """What was given for the nodes of each type, by type."""
    if not isinstance(given, Mapping):
        if len(graph.num_nodes) != 1:
            raise ValueError(
                f"one {what} for {len(graph.num_nodes)} node types; "
                f"expected a dict with an array for each of {list(graph.num_nodes)}"
            )
        given = {next(iter(graph.num_nodes), NODE): given}
    if set(given) != set(graph.num_nodes):
        raise ValueError(f"the {what} has the node types {sorted(given)}; the graph has {sorted(graph.num_nodes)}")
    return given


def _given_weights(graph: RawGraph, node_weights: Any) -> Tensor:
    """Weights of the nodes of all types, one type after the other, float64 [num_nodes]."""
    given, found = _by_type(graph, node_weights, "array of node weights"), []
    for kind, count in graph.num_nodes.items():
        weights = torch.as_tensor(given[kind]).double()
        if weights.shape != (count,):
            raise ValueError(
                f"the weights of nodes of type {kind!r} have the shape {list(weights.shape)}; expected [{count}], one "
                f"number per node"
            )
        wrong = (~(weights.isfinite() & (weights > 0))).nonzero().flatten()
        if len(wrong):
            node = int(wrong[0])
            raise ValueError(f"node {node} of type {kind!r} weighs {float(weights[node])}; expected a number above 0")
        found.append(weights)
    return torch.cat(found)


def _given_parts(graph: RawGraph, parts: int, assignment: Any) -> dict[NodeType, Tensor]:
    assignment = _by_type(graph, assignment, "assignment")
    given = {}
    for kind, count in graph.num_nodes.items():
        what = f"the parts assigned to nodes of type {kind!r}"
        part_of = in_memory(check_ids(assignment[kind], parts, what, "parts"))
        if len(part_of) != count:
            raise ValueError(f"{what} have the shape [{len(part_of)}]; expected [{count}], one part per node")
        given[kind] = part_of.int()
    return given
