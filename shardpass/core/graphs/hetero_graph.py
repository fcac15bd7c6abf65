"""ShardedHeteroGraph: one rank's share of a graph of several types, as PyG code expects a ``HeteroData`` to look."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.graph import ShardedGraph
from shardpass.core.graphs.misread import refuse_ambiguous, refuse_of_dgl
from shardpass.core.graphs.relation import OwnFields, Relation
from shardpass.core.sharding import EdgeType, NodeType


class _OfOneType:
    """Stored fields as attributes and by name."""

    def __init__(self, what: str, fields: OwnFields) -> None:
        self._what, self._fields = what, fields

    def __getattr__(self, name: str) -> Tensor:
        refuse_ambiguous(name)
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(f"{self._what} have no field {name!r}; there are: {self._fields.listed()}")
        return self._fields.given(name)

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name] if name in vars(self) else self._fields.given(name)  # a model may have assigned it

    def __contains__(self, name: str) -> bool:
        return name in vars(self) or name in self._fields

    def keys(self) -> list[str]:
        """The names of the stored fields."""
        return list(self._fields)


class OwnNodes(_OfOneType):
    """This rank's nodes of one type: ``graph["paper"]``. Stored fields are attributes or ``nodes["name"]``.

    Args:
        node_type: their type.
        fields: node tensors, own rows.
        node_ids: original id of each own node, ``[num_own_nodes]`` int64.
        total_nodes: nodes of this type in the whole graph.
        num_classes: classes of ``y`` over all ranks; `None` without ``y``.
    """

    def __init__(
        self, node_type: NodeType, fields: OwnFields, node_ids: Tensor, total_nodes: int, num_classes: int | None
    ) -> None:
        super().__init__(f"nodes of type {node_type!r}", fields)
        self.node_type, self.node_ids, self.total_nodes = node_type, node_ids, total_nodes
        self._num_classes = num_classes

    def __repr__(self) -> str:
        return f"OwnNodes({self.node_type!r}: {self.num_own_nodes} of {self.total_nodes}, fields {self.keys()})"

    @property
    def num_own_nodes(self) -> int:
        """Own nodes of this type."""
        return self.node_ids.numel()

    @property
    def num_features(self) -> int:
        """Channels of ``x``; 0 without ``x``."""
        if "x" not in self:
            return 0
        x = self["x"]
        return 1 if x.dim() == 1 else x.size(-1)

    @property
    def num_classes(self) -> int:
        """Classes of ``y``: columns of a float matrix, or the largest label of all ranks plus one."""
        if self._num_classes is None:
            raise ValueError(f"{self._what} have no labels: no field 'y' is stored")
        return self._num_classes


class OwnEdges(_OfOneType):
    """This rank's edges of one type: ``graph["author", "writes", "paper"]``. Fields as in `OwnNodes`, own edges.

    Args:
        edge_type: (source type, relation, destination type).
        relation: the edges.
        total_edges: edges of this type in the whole graph.
    """

    def __init__(self, edge_type: EdgeType, relation: Relation, total_edges: int) -> None:
        super().__init__(f"edges of type {edge_type}", relation.fields)
        self.edge_type, self.relation, self.total_edges = edge_type, relation, total_edges

    def __repr__(self) -> str:
        return f"OwnEdges({self.edge_type}: {self.num_own_edges} of {self.total_edges}, fields {self.keys()})"

    @property
    def edge_index(self) -> ShardedEdgeIndex:
        """The stand-in for ``edge_index``, ``[2, num_edges]``."""
        return self.relation.edge_index

    @property
    def edge_ids(self) -> Tensor:
        """Original position of each own edge among those of its type, ``[num_edges]`` int64."""
        return self.relation.edge_ids

    @property
    def num_own_edges(self) -> int:
        """Own edges of this type."""
        return self.relation.shards.num_edges


class ShardedHeteroGraph(ShardedGraph):
    """One rank's share of a graph with several node or edge types.

    Made by `load`; goes where PyG code expects a ``HeteroData`` or ``edge_index_dict``. ``graph["paper"]`` is this
    rank's nodes of a type (`OwnNodes`), ``graph["author", "writes", "paper"]`` its edges of a type (`OwnEdges`), and
    ``graph.<field>_dict`` any stored field by type, for the types that have it: ``x_dict``, ``edge_attr_dict``.
    Fields of the whole graph are attributes.
    """

    @cached_property
    def _nodes(self) -> dict[NodeType, OwnNodes]:
        fields, ids, classes = self._node_fields, self._node_ids, self._num_classes
        return {
            kind: OwnNodes(kind, fields[kind], ids[kind], owned.num_total, classes.get(kind))
            for kind, owned in self.ownership.items()
        }

    @cached_property
    def _edges(self) -> dict[EdgeType, OwnEdges]:
        found = {kind: OwnEdges(kind, relation, self._total_edges[kind]) for kind, relation in self.relations.items()}
        for kind, links in self.own_links.items():
            vars(found[kind]).update(links)
        return found

    def __repr__(self) -> str:
        nodes = ", ".join(f"{nodes.num_own_nodes} of {nodes.total_nodes} {kind}" for kind, nodes in self._nodes.items())
        return (
            f"ShardedHeteroGraph(rank {self.comm.rank} of {self.comm.size}: {nodes}; {self.num_own_edges} of "
            f"{self.total_edges} edges of {len(self._edges)} types, mode={self.options.mode!r})"
        )

    def __getitem__(self, key: str | tuple[str, ...]) -> Any:
        """The nodes of a type (`OwnNodes`), or the edges of a type (`OwnEdges`).

        As in PyG, an edge type has three names. Its ends, or its relation alone, will do where they say which it is.
        """
        if isinstance(key, str) and key in self._nodes:
            return self._nodes[key]
        found = [kind for kind in self._edges if key in (kind, kind[1], (kind[0], kind[2]))]
        if len(found) != 1:
            problem = f"is one of {found}" if found else "is not a type of this graph"
            raise KeyError(f"{key!r} {problem}; nodes: {self.node_types}, edges: {self.edge_types}")
        return self._edges[found[0]]

    def __getattr__(self, name: str) -> Any:
        refuse_ambiguous(name)
        if not name.startswith("_") and name in self.graph_fields:
            return self.graph_fields[name]
        refuse_of_dgl(name)
        if name.startswith("_") or not name.endswith("_dict"):
            raise AttributeError(
                f"ShardedHeteroGraph has no attribute {name!r}: a field belongs to a type, as in graph[type].{name} or "
                f"graph.{name}_dict; types: {self.node_types}, {self.edge_types}"
            )
        field = name.removesuffix("_dict")
        owners: dict[Any, _OfOneType] = {**self._nodes, **self._edges}
        found = {kind: owner[field] for kind, owner in owners.items() if field in owner}
        if not found:
            known = {kind: owner.keys() for kind, owner in owners.items() if owner.keys()}
            raise AttributeError(f"no type of this graph has a field {field!r}; there are: {known}")
        return found

    @property
    def edge_index_dict(self) -> dict[EdgeType, ShardedEdgeIndex]:
        """The stand-in for ``edge_index`` of each edge type."""
        return {kind: edges.edge_index for kind, edges in self._edges.items()}

    @property
    def num_features(self) -> dict[NodeType, int]:  # type: ignore[override]
        """Channels of ``x`` of each type; 0 without ``x``, as in PyG's ``HeteroData``."""
        return {kind: nodes.num_features for kind, nodes in self._nodes.items()}

    def metadata(self) -> tuple[list[NodeType], list[EdgeType]]:
        """Node and edge types, as `to_hetero`, `HGTConv` and others take them."""
        return self.node_types, self.edge_types
