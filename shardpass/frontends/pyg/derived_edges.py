"""Edge lists and weights that functions of PyG derive from edges in each call of a layer, found again in the next.

`add_self_loops`, `gcn_norm` and the like depend on the edges and on a few numbers. Where their arguments are the same,
so is what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn.conv import MessagePassing, gcn_conv

from shardpass.core.graphs import ShardedEdgeIndex
from shardpass.core.ranks import Known, torch_private
from shardpass.core.sharding import Derivation
from shardpass.core.wrapping import with_names

_PLAIN = (int, float, bool, str, torch.dtype)


class _Edges(NamedTuple):
    """An edge list. Its derivation is `None` if it is the very list that the function was given."""

    derivation: Derivation | None
    is_reversed: bool
    shape: Tensor  # without numbers; see `ShardedEdgeIndex.derived`


class _Result(NamedTuple):
    values: list[_Edges | Tensor | None]
    versions: list[int]  # of the tensors


class _Results(Known[_Result]):
    """What was derived from one edge list on this rank."""


class _ResultsOfAll(Known[_Result]):
    """What ranks derived from one edge list together, so that all have it or none."""


def find_edges_again(conv: MessagePassing) -> None:
    """Let the forward of `conv` find again what functions of PyG have derived from the same edges."""
    forward = type(conv).forward
    if "forward" in vars(conv) or not isinstance(forward, FunctionType):
        return
    known = (utils.add_self_loops, utils.remove_self_loops, utils.add_remaining_self_loops, gcn_conv.gcn_norm)
    names = [name for name in forward.__code__.co_names if forward.__globals__.get(name) in known]
    if names:
        conv.forward = partial(_forward, conv, names)  # type: ignore[method-assign]


def _forward(conv: MessagePassing, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    forward: Any = type(conv).forward
    return with_names(forward, **{name: partial(_found_again, forward.__globals__[name]) for name in names})(
        conv, *args, **kwargs
    )


def _found_again(function: Callable[..., Any], edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``function(edge_index, *args, **kwargs)`` returns."""
    given = [*args, *(value for _, value in sorted(kwargs.items()))]
    weights = [value for value in given if isinstance(value, Tensor)]
    if not _is_kept(edge_index, given, weights):
        return function(edge_index, *args, **kwargs)
    of_kinds = [type(value) if isinstance(value, Tensor) else (type(value), value) for value in given]
    key = function, tuple(of_kinds), tuple(sorted(kwargs)), _settings(edge_index)
    comm = edge_index.plan.comm
    known = [comm.caches.of(kind, edge_index.derivation) for kind in (_ResultsOfAll, _Results)]
    result = next((found for results in known if (found := results.find(key, weights)) is not None), None)
    if result is None or result.versions != [torch_private.version_of(one) for one in _tensors(result.values)]:
        calls = comm.calls
        out = function(edge_index, *args, **kwargs)
        _keep(known[comm.calls == calls], key, weights, edge_index, out)
        return out
    return tuple(_restored(value, edge_index) for value in result.values)


def _is_kept(edge_index: Any, given: Sequence[Any], weights: Sequence[Tensor]) -> bool:
    """Whether all that a function reads is known to be the same in another call that is given the same."""
    if not isinstance(edge_index, ShardedEdgeIndex) or edge_index.derivation is None:
        return False
    comm = edge_index.plan.comm
    if edge_index.flow is not None or edge_index.lacks_last or comm.is_followed or comm.kept_calls is not None:
        return False
    if torch_private.saved_tensor_hooks() is not None:  # of `sp.offload`, so that memory is scarce
        return False
    # on several ranks, weights may be written to on one of them, and a function may communicate
    are_constant = all(type(one) is Tensor and one.dim() == 1 and not one.requires_grad for one in weights)
    are_known = all(value is None or type(value) in _PLAIN or isinstance(value, Tensor) for value in given)
    return are_known and are_constant and (comm.size == 1 or not weights)


def _settings(edge_index: ShardedEdgeIndex) -> Hashable:
    return edge_index.is_reversed, torch.is_autocast_enabled(edge_index.plan.comm.device.type)


def _keep(results: _Results, key: Any, weights: Sequence[Tensor], edge_index: ShardedEdgeIndex, out: Any) -> None:
    values: list[_Edges | Tensor | None] = []
    for value in out if type(out) is tuple else ():
        if isinstance(value, ShardedEdgeIndex):
            if value.derivation is None:
                return
            derivation = None if value.derivation is edge_index.derivation else value.derivation
            values.append(_Edges(derivation, value.is_reversed, value.as_subclass(Tensor)))
        elif value is None or (type(value) is Tensor and not value.requires_grad):
            values.append(value)
        else:
            return
    if any(value is one for value in values for one in weights):  # which would be kept alive
        return
    if values:
        versions = [torch_private.version_of(one) for one in _tensors(values)]
        results.keep(key, weights, _Result(values, versions))


def _tensors(values: Sequence[_Edges | Tensor | None]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _restored(value: _Edges | Tensor | None, edge_index: ShardedEdgeIndex) -> Any:
    if not isinstance(value, _Edges):
        return value
    out = ShardedEdgeIndex.wrap(value.shape, edge_index.plan, value.is_reversed)
    out.derivation = edge_index.derivation if value.derivation is None else value.derivation
    return out
