"""Why a model fails on what it was given, where torch names numbers alone: another dtype, or another number of rows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.graphs import GraphArgument, ShardedEdgeIndex, ShardedGraph
from shardpass.core.ranks import HoldsEdges, dtype_name, torch_private

_OF_DTYPES = re.compile(r"dtype|[Ss]calar type|!= ?(float|double|c10)|not implemented for|can't be cast")
_OF_ROWS = re.compile(r"out of (bounds|range)|must match|size mismatch|sizes? of tensor|invalid shape|expanded size")


def explained(error: Exception, model: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """The text of `error` with the argument of the model that explains it, or `None` if none does."""
    text = str(error)
    given = list(_named_rows(function, args, kwargs))
    if _OF_DTYPES.search(text):
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        for name, tensor in given:
            if len(kinds) == 1 and tensor.dtype not in kinds:
                wanted, found = dtype_name(next(iter(kinds))), dtype_name(tensor.dtype)
                other = f", or the model by .to(torch.{found})" if tensor.is_floating_point() else ""
                return (
                    f"`{name}` is {found} and the parameters of {type(model).__name__} are {wanted}: convert it by "
                    f"{name}.to(torch.{wanted}){other} ({text})"
                )
    if _OF_ROWS.search(text):
        counts, edges = set(_own_nodes((args, kwargs))), set(_own_edges((args, kwargs)))
        for name, tensor in given:
            if len(counts) == 1 and tensor.dim() == 2 and tensor.size(0) not in counts | edges:
                count = next(iter(counts))
                return (
                    f"`{name}` has {tensor.size(0)} rows and this rank has {count} own nodes: give "
                    f"{type(model).__name__} one row per own node, as graph.x has ({text})"
                )
    for data in torch_private.tree_leaves((args, kwargs)):
        if isinstance(data, GraphArgument) and data.graph.assigned:
            names = ", ".join(f"data.{name}" for name in data.graph.assigned)
            return (
                f"{text}. An earlier call of {type(model).__name__} has assigned {names}, which stays, as in PyG. If "
                f"it is for one call alone, begin forward with data = copy.copy(data)"
            )
    return None


def _named_rows(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors among the arguments, by the names of the parameters."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = kwargs
    for name, value in bound.items():
        if type(value) in (Tensor, nn.Parameter) and value.dtype != torch.bool:
            yield name, value


def _own_edges(given: Any) -> Iterator[int]:
    """How many own edges the graphs among the arguments have."""
    for leaf in torch_private.tree_leaves(given):
        if isinstance(leaf, HoldsEdges):
            yield from (edges.count for edges in leaf.edge_sets)


def _own_nodes(given: Any) -> Iterator[int]:
    """How many own nodes the graphs of one type among the arguments have."""
    for leaf in torch_private.tree_leaves(given):
        if isinstance(leaf, ShardedGraph) and leaf.is_homogeneous:
            yield leaf.num_own_nodes
        elif isinstance(leaf, ShardedEdgeIndex) and leaf.has_one_type:
            yield leaf.plan.num_own_src
