"""PyG layers that compute something over all nodes or edges in forward: what they lack on a sharded graph is put in."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import get_laplacian

from shardpass.core.graphs import ShardedEdgeIndex
from shardpass.core.ranks import Ranks, all_reduce_sum


class Replacement:
    """Takes the place of a method of one module; deep copies follow the copied module, on the same communicator."""

    def __init__(self, module: nn.Module, comm: Ranks) -> None:
        self.module, self.comm = module, comm

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return type(self)(deepcopy(self.module, memo), self.comm)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method returns."""
        raise NotImplementedError


class _ChebNorm(Replacement):
    """`ChebConv.__norm__` with the largest Laplacian weight of the whole graph for lambda_max (Defferrard 2016)."""

    def __call__(
        self,
        edge_index: Tensor,
        num_nodes: int | None,
        edge_weight: Tensor | None,
        normalization: str | None,
        lambda_max: Tensor | None = None,
        dtype: torch.dtype | None = None,
        batch: Tensor | None = None,
    ) -> Any:
        original = type(self.module).__norm__  # type: ignore[attr-defined]
        if lambda_max is None and isinstance(edge_index, ShardedEdgeIndex):
            weights = edge_weight.clone() if edge_weight is not None else None
            _, weights = get_laplacian(edge_index, weights, normalization, dtype, num_nodes)
            lambda_max = 2.0 * max_over_ranks(weights, self.comm)
        return original(self.module, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)


def max_over_ranks(values: Tensor, comm: Ranks) -> Tensor:
    """The largest of all ranks' `values`, 0-dim; its gradient is shared evenly by ties, as torch does. Collective."""
    flat = values.detach().reshape(-1)
    mine = flat.max() if flat.numel() else flat.new_tensor(float("-inf"))
    largest = comm.all_reduce(mine.view(1), "max", "largest value")
    hits = values == largest
    count = comm.all_reduce(hits.sum().view(1), "sum", "ties of the largest value")
    return all_reduce_sum(torch.where(hits, values, 0).sum() / count[0], comm, "largest value")


class _HypergraphForward(Replacement):
    """`HypergraphConv.forward` that takes the number of own hyperedges from the graph, not from the edges here."""

    def __call__(self, x: Tensor, hyperedge_index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(hyperedge_index, ShardedEdgeIndex) and len(args) < 3 and kwargs.get("num_edges") is None:
            kwargs["num_edges"] = hyperedge_index.plan.num_dst
        out: Tensor = type(self.module).forward(self.module, x, hyperedge_index, *args, **kwargs)
        return out


REPLACED: dict[str, tuple[str, Callable[[nn.Module, Ranks], Replacement]]] = {
    "ChebConv": ("__norm__", _ChebNorm),
    "HypergraphConv": ("forward", _HypergraphForward),
}
"""By the name of a class of PyG: the method to replace, and by what."""


def adapt(module: nn.Module, comm: Ranks) -> None:
    """Replace the method of `module` that looks at all nodes or edges, where its class is one that has one."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch_geometric.") and kind.__name__ in REPLACED:
            name, replacement = REPLACED[kind.__name__]
            setattr(module, name, replacement(module, comm))
            return
