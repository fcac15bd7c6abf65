"""The arguments of a layer's message functions: which are rows of nodes, which are rows of edges, which are neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardpass.core.tracing import Inputs
from shardpass.frontends.pyg.poison import Poison

_NO_IDS = (
    "node ids inside message() are numbered per rank. Pass the node tensor you want to index to propagate() and take "
    "it as an argument ending in _j or _i"
)
_NO_SIZE = (
    "size_j and size[0] inside message() are the number of source nodes, and a message function sees some of them. "
    "Pass the number of the whole graph (graph.total_nodes) to propagate() as an argument"
)


class Arguments:
    """The arguments of one call, sorted.

    Args:
        src, dst: rows of the source and destination nodes, nodes along dimension 0.
        edge: what may have a row per edge.
        rest: everything else.
        dims: the dimension along which each node tensor had its nodes.
    """

    def __init__(self) -> None:
        self.src: dict[str, Tensor] = {}
        self.dst: dict[str, Tensor] = {}
        self.edge: dict[str, Tensor] = {}
        self.rest: dict[str, Any] = {}
        self.dims: dict[str, int] = {}
        self._read: set[str] = set()  # the edge tensors that the engine cut into rows in the latest run

    def absorb(self, prefix: str, other: Arguments) -> None:
        """Add the tensors of a deferred edge update, with `prefix` before their names."""
        for mine, theirs in ((self.src, other.src), (self.dst, other.dst), (self.edge, other.edge)):
            mine.update({prefix + name: tensor for name, tensor in theirs.items()})

    def collected(self, inputs: Inputs, prefix: str = "") -> dict[str, Any]:
        """What PyG's `_collect` would return for the edges of `inputs`, from the tensors whose names have `prefix`."""
        given = dict(self.rest)
        for suffix, rows in (("_j", inputs.src), ("_i", inputs.dst)):
            for name, tensor in _under(prefix, rows).items():
                given[name + suffix] = moved(tensor, 0, self.dims[name])
        edge = _under(prefix, inputs.edge)
        self._read = set(edge)
        given |= self.edge | edge
        given.update(index=inputs.index, edge_index_i=inputs.index, ptr=None, dim_size=inputs.num_dst)
        given.update(size_i=inputs.num_dst, edge_index=Poison.make(_NO_IDS), edge_index_j=Poison.make(_NO_IDS))
        size_j = Poison.make(_NO_SIZE)
        given.update(adj_t=None, size_j=size_j, size=[size_j, inputs.num_dst])
        return given

    def release(self) -> None:
        """Drop the edge tensors that are inputs of the call: what a message function holds lives until backward."""
        self.edge = {name: tensor for name, tensor in self.edge.items() if name not in self._read}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names have `prefix`, and no further one, by the name after it."""
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in named.items() if ":" not in name}


def moved(tensor: Tensor, start: int, end: int) -> Tensor:
    """`tensor` with dimension `start` moved to `end`; the tensor itself where they are the same."""
    return tensor if start == end else tensor.movedim(start, end)


def rows_first(messages: Any, node_dim: int) -> Any:
    """What a layer's `message` returned, a tensor or a tuple of them, with dimension `node_dim` in front."""
    if isinstance(messages, (tuple, list)):
        return tuple(rows_first(part, node_dim) for part in messages)
    return moved(messages, node_dim % messages.dim(), 0) if isinstance(messages, Tensor) else messages


def rows_back(messages: Any, node_dim: int) -> Any:
    """The inverse of `rows_first`."""
    if isinstance(messages, tuple):
        return tuple(rows_back(part, node_dim) for part in messages)
    return moved(messages, 0, node_dim % messages.dim()) if isinstance(messages, Tensor) else messages
