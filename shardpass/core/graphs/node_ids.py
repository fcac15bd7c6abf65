"""Node ids of the whole graph that index tensors of own rows, as ``edge_label_index`` does in a script for one process.

Indexing a tensor of own rows by them is `rows`. So a decoder runs unchanged: ``z[edge_label_index[0]]``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardpass.core.graphs.any_rows import rows
from shardpass.core.graphs.as_data import graph_of
from shardpass.core.graphs.graph import ShardedGraph
from shardpass.core.graphs.stand_in import PRINTS, StandIn, describes
from shardpass.core.ranks import RowSet, describe, takes_followed, torch_private
from shardpass.core.sharding import NodeType
from shardpass.errors import RefusedError

_REARRANGES = frozenset(
    "__getitem__ select index_select unbind view reshape flatten squeeze unsqueeze t T flip chunk split contiguous "
    "clone detach long to cpu cuda view_as alias".split()
)
_JOINS = frozenset("cat concat stack".split())
_READS = frozenset("eq ne __eq__ __ne__ tolist numpy equal".split())


class NodeIds(StandIn):
    """Node ids of the whole graph. They can be selected, rearranged and joined, and they fetch rows as an index."""

    graph: ShardedGraph
    node_type: NodeType | None
    own_dim: int  # in which ranks hold ids of their own, and different numbers of them

    @staticmethod
    def wrap(data: Tensor, graph: ShardedGraph, node_type: NodeType | None, own_dim: int = -1) -> Any:
        """`data` as ids of nodes of a type."""
        out = data.as_subclass(NodeIds)
        out.graph, out.node_type, out.own_dim = graph, node_type, own_dim % max(1, data.dim())
        return out

    @property
    def plain(self) -> Tensor:
        """The ids as an ordinary tensor."""
        return self.as_subclass(Tensor)

    @property
    def row_set(self) -> RowSet:
        """What the rows are that they fetch."""
        return RowSet.fetched(self.size(self.own_dim))

    def _alike(self, data: Tensor, is_turned: bool) -> Tensor:
        """Some of these ids, or all in another order; their values alone if they have become another dtype."""
        if data.dtype != torch.int64:
            return data
        last = self.own_dim == self.dim() - 1
        own_dim = -1 if data.dim() != self.dim() else 1 - self.own_dim if is_turned else -1 if last else self.own_dim
        return NodeIds.wrap(data, self.graph, self.node_type, own_dim)  # type: ignore[no-any-return]

    @classmethod
    def answer(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = torch_private.tree_leaves((args, kwargs))
        mine = next(leaf for leaf in leaves if isinstance(leaf, NodeIds))
        table = args[0] if args else kwargs.get("input")
        if name in ("__getitem__", "index_select") and not isinstance(table, StandIn):
            return _fetched(name, table, args[1:], kwargs)
        with mine.graph.comm.unfollowed(), torch_private.DisableTorchFunctionSubclass():
            plain_args, plain_kwargs = torch_private.tree_map(_plain, (args, kwargs))
            if name in PRINTS | _READS or describes(func):
                return func(*plain_args, **plain_kwargs)
            name = getattr(func.__self__, "__name__", "") if name == "__get__" else name
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            alike = all(isinstance(one, NodeIds) and one.node_type == mine.node_type for one in tensors)
            if name in _REARRANGES or (name in _JOINS and alike):
                out = func(*plain_args, **plain_kwargs)
                is_turned = name in ("t", "T") and mine.dim() == 2
                return torch_private.tree_map(partial(mine._alike, is_turned=is_turned), out)
        raise RefusedError(
            f"`{name}` on ids of the whole graph that shardpass.node_ids made: compute it on the plain ids before"
        )


@takes_followed("number")
def node_ids(graph: ShardedGraph, ids: Tensor, node_type: NodeType | None = None, dim: int = -1) -> Tensor:
    """`ids` as an index into tensors of own rows: ``h[node_ids(graph, ids)]`` is `shardpass.rows`. Not collective.

    Give it to a model where ``edge_label_index`` went. The model may select, rearrange and join the ids. Every index
    into a tensor with a row per own node is collective and differentiable, so every rank makes the same ones in the
    same order, also a rank without ids.

    Args:
        graph: this rank's share, or what stands for it inside a wrapped model.
        ids: integers, such as ``[2, n]``, with the meaning that `shardpass.rows` gives them. Ranks pass their own
            pairs, and may pass different numbers of them.
        dim: the dimension of `ids` that counts what a rank passes of its own: 0 for ``[n, candidates]``.
        node_type: of the nodes, in a graph of several types. Where the ends of pairs have different types, pass the
            model a tuple: ``(node_ids(graph, src, "user"), node_ids(graph, dst, "item"))``.

    Raises:
        ValueError: `ids` are not integers, or have no such dimension; or a node type that is missing or unknown.
    """
    graph = graph_of(graph)
    graph.ids_of(node_type)
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"node_ids: expected integer ids of nodes of the whole graph, found {describe(ids)}")
    if isinstance(ids, StandIn):
        raise ValueError(f"node_ids: expected a plain tensor of ids, found a {type(ids).__name__}")
    if type(dim) is not int or not -max(1, ids.dim()) <= dim < max(1, ids.dim()):
        raise ValueError(f"node_ids: ids of shape {[*ids.shape]} have no dimension {dim!r}")
    return NodeIds.wrap(ids.detach().to(torch.int64), graph, node_type, dim)  # type: ignore[no-any-return]


def _fetched(name: str, table: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    bound = {**dict(zip(("index",) if name == "__getitem__" else ("dim", "index"), rest)), **kwargs}
    ids = bound["index"]
    if not isinstance(ids, NodeIds) or bound.get("dim", 0) not in (0, -table.dim()):
        raise RefusedError(
            "ids of the whole graph that shardpass.node_ids made index dimension 0 of a tensor of own rows, alone"
        )
    comm, plain = ids.graph.comm, ids.plain
    flat = plain.flatten()
    if plain.dim() != 1:
        comm.mark_rows(flat, RowSet.fetched(flat.numel()))
    found = rows(ids.graph, table, flat, ids.node_type)
    if plain.dim() == 1:
        return found
    with comm.unfollowed():
        found = found.reshape(*plain.shape, *found.shape[1:])
    if plain.dim():
        comm.mark_rows(found, ids.row_set, ids.own_dim)
    return found


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, NodeIds) else value
