"""What we use of PyG beyond its documented interface, in one place: `tests/frontends/test_pyg_private.py` says which of
these a release of PyG no longer has."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch_geometric.nn.conv import MessagePassing

MESSAGE_PASSING = frozenset(
    "inspector special_args explain decomposed_layers node_dim flow _edge_user_args _message_forward_pre_hooks "
    "_message_forward_hooks _propagate_forward_pre_hooks _propagate_forward_hooks _aggregate_forward_pre_hooks "
    "_aggregate_forward_hooks _edge_update_forward_pre_hooks _edge_update_forward_hooks".split()
)
"""Attributes of a `torch_geometric.nn.MessagePassing` layer."""

INSPECTOR = frozenset("collect_param_data get_flat_param_names implements".split())
"""Methods of its `inspector`."""

METHODS: dict[str, frozenset[str]] = {
    "torch_geometric.nn.aggr:Aggregation": frozenset(["to_dense_batch"]),
    "torch_geometric.nn.aggr:QuantileAggregation": frozenset(["forward"]),
    "torch_geometric.nn.conv:ChebConv": frozenset(["__norm__"]),
    "torch_geometric.nn.conv:HGTConv": frozenset(["forward"]),
    "torch_geometric.nn.conv:HANConv": frozenset(["forward"]),
}
"""Methods that are replaced or called, by ``module:class``."""

GLOBALS: dict[str, frozenset[str]] = {
    "torch_geometric.nn.conv:HGTConv.forward": frozenset(["construct_bipartite_edge_index"]),
    "torch_geometric.nn.conv:HANConv.forward": frozenset(["group"]),
    "torch_geometric.nn.conv:GPSConv.forward": frozenset(["to_dense_batch"]),
}
"""Global names that a method uses and that are exchanged in it, by ``module:class.method``."""

CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")
"""Where layers with ``cached=True`` keep a graph."""


def with_hooks(conv: MessagePassing, step: str, given: tuple[Any, ...], run: Callable[..., Any]) -> Any:
    """What ``run(*given)`` returns, between the hooks of `conv` for that step, called as PyG calls them."""
    for hook in getattr(conv, f"_{step}_forward_pre_hooks").values():
        changed = hook(conv, given)
        if changed is not None:
            given = changed if isinstance(changed, tuple) else (changed,)
    out = run(*given)
    for hook in getattr(conv, f"_{step}_forward_hooks").values():
        changed = hook(conv, given, out)
        out = out if changed is None else changed
    return out


def exchanged(function: Any, **helpers: Any) -> Callable[..., Any]:
    """A copy of `function` in which global names, listed in `GLOBALS`, mean `helpers`; its module stays as it is."""
    names = {**function.__globals__, **helpers}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
