"""What a model is given where its user passes the graph: ``edge_index``, which is PyG's ``data`` as well.

``model(graph.x, graph)`` has a `forward` that takes ``edge_index``, ``model(graph)`` one that reads ``data.x`` and
``data.edge_index``. Nobody needs to know which of the two a class is: the stand-in for ``edge_index`` has the fields of
the graph under PyG's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.following import user_line
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.graph import ShardedGraph
from shardpass.core.sharding import NODE
from shardpass.errors import RefusedError

_MAY_BE_ABSENT = frozenset("x y pos edge_attr edge_weight time face".split())
"""Attributes that PyG's ``Data`` has in any case: `None` where nothing is stored."""

_STORES = frozenset("stores edge_stores node_stores".split())


class GraphArgument(ShardedEdgeIndex):
    """``edge_index`` of a graph with one type, and its ``data``. Made anew for each call, so a model may set fields."""

    graph: ShardedGraph
    is_data: bool  # as what the model takes it: then a field wins where a tensor has a method of its name, as `norm`

    @staticmethod
    def of(graph: ShardedGraph, is_data: bool = False) -> Any:
        """What stands for `graph` among the arguments of a model, as `data` or as `edge_index`."""
        out = graph.edge_index.as_subclass(GraphArgument)
        vars(out).update(vars(graph.edge_index), graph=graph, is_data=is_data)
        for fields in (graph.relation.fields, graph.fields_of(NODE)) if is_data else ():
            vars(out).update({name: fields[name] for name in fields if hasattr(Tensor, name)})
        return out

    def __copy__(self) -> GraphArgument:
        return self._with(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphArgument:
        out = self._copied(lambda field: field.detach().clone().requires_grad_(field.requires_grad))
        memo[id(self)] = out
        return out

    def _with(self, attributes: dict[str, Any]) -> GraphArgument:
        """Another one of the graph, with the fields that the model has set."""
        out: GraphArgument = GraphArgument.of(self.graph, self.is_data)
        vars(out).update(attributes)
        return out

    def _copied(self, copied: Callable[[Tensor], Tensor]) -> GraphArgument:
        """Another one of the graph. As `data` it has fields of its own, into which the model may write."""
        fields = {**self.graph.relation.fields, **self.graph.fields_of(NODE)} if self.is_data else {}
        fields.pop("batch", None)  # which the graph makes a stand-in of
        own = {name: copied(value) if type(value) is Tensor else value for name, value in (fields | vars(self)).items()}
        return self._with(own)

    @property
    def num_nodes(self) -> Any:
        """Own nodes, which may be a size. Anything else that is computed from their number is refused."""
        return self.plan.comm.count_of(node_set(NODE, self.graph.num_own_nodes))

    @property
    def num_edges(self) -> Any:
        """Own edges, likewise."""
        return self.plan.comm.count_of(self.plan.edge_set(self.graph.num_own_edges))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "graph":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _STORES:
            raise RefusedError(
                f"{user_line()}: `data.{name}` is read, as transforms of PyG do, which change a whole graph. This rank "
                f"holds a part of it. Apply the transform before you partition"
            )
        if name in _MAY_BE_ABSENT and name not in self:
            return None
        return getattr(self.graph, name)

    def __contains__(self, name: Any) -> bool:
        return name in self.keys()

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else super().__getitem__(key)

    def keys(self) -> list[str]:
        """The names of the fields."""
        return ["edge_index", *self.graph.node, *self.graph.edge, *self.graph.other_fields]

    @classmethod
    def answer(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().answer(func, name, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, GraphArgument) and name in ("to", "contiguous", "cpu", "cuda"):
            return first._with(vars(first))
        if isinstance(first, GraphArgument) and name == "clone":
            return first._copied(Tensor.clone)
        return out


def graph_of(given: ShardedGraph | GraphArgument) -> ShardedGraph:
    """The graph itself, where a model passes on what stands for it."""
    return given.graph if isinstance(given, GraphArgument) else given
