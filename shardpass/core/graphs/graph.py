"""ShardedGraph: one rank's share of a graph, as PyG code expects ``data`` to look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.following import own_number
from shardpass.core.graphs.batch_index import BatchIndex
from shardpass.core.graphs.device import require_device
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.flow import message_flow
from shardpass.core.graphs.given import GivenFields, LoadedGraphs
from shardpass.core.graphs.misread import NOT_WRAPPED, refuse_ambiguous, refuse_of_dgl
from shardpass.core.graphs.relation import OwnFields, Relation
from shardpass.core.graphs.tables import TableWriter
from shardpass.core.graphs.whole import WholeOrder
from shardpass.core.ranks import Options, Ranks, RowSet, takes_followed, unfollowed
from shardpass.core.sharding import EDGE, NODE, EdgeType, NodeType, Ownership
from shardpass.errors import RefusedError


class ShardedGraph:
    """One rank's share of a graph: its own nodes, and the edges that end in them.

    Made by `load`; goes where PyG code expects ``data`` or ``edge_index``. Node tensors hold own rows
    ``[num_own_nodes, ...]``; edge tensors hold own edges ``[num_own_edges, ...]`` in the order of ``edge_index``. There
    is no ``num_nodes`` or ``num_edges``: a script that comes from PyG means the whole graph by them, and a size means
    this rank's share.
    """

    def __init__(
        self,
        comm: Ranks,
        options: Options,
        ownership: dict[NodeType, Ownership],
        node_ids: dict[NodeType, Tensor],
        node_fields: dict[NodeType, OwnFields],
        relations: dict[EdgeType, Relation],
        *,
        total_edges: dict[EdgeType, int],
        num_classes: Mapping[NodeType, int] | None = None,
        fingerprint: str = "",
        partition_fingerprint: str = "",
        contents: str = "",
        tables: TableWriter | None = None,
    ) -> None:
        self.comm, self.options, self.ownership = comm, options, ownership
        self.fingerprint, self.partition_fingerprint, self.contents = fingerprint, partition_fingerprint, contents
        self.relations, self._tables = relations, tables
        self._node_ids, self._node_fields = node_ids, node_fields
        self._batch: BatchIndex | None = None
        self._orders: dict[NodeType | EdgeType | None, WholeOrder] = {}
        self.assigned: dict[str, Any] = {}
        """What models have assigned, as in ``data.x = h``: it stays on the graph, as on PyG's ``data``."""
        self.graph_fields: dict[str, Any] = {}
        """Numbers, strings and tensors that belong to the graph as a whole, the same on every rank."""
        self.column_names: dict[NodeType, dict[str, list[str]]] = {}
        """The names of the columns of node fields that came from a table, by node type: ``{"node": {"x": [...]}}``."""
        self.own_links: dict[EdgeType, dict[str, Any]] = {}
        """This rank's share of stored links to score, by edge type: ``edge_label_index`` and ``edge_label``."""
        self._total_edges, self._num_classes = total_edges, dict(num_classes or {})
        comm.caches.of(LoadedGraphs).graphs.add(self)
        if options.stream_structure and not self.is_homogeneous:
            raise ValueError(
                f"Options(stream_structure=True) is for graphs of one node and one edge type, and this one has "
                f"{len(relations)} edge types: load it without that option"
            )

    def __repr__(self) -> str:
        return (
            f"ShardedGraph(rank {self.comm.rank} of {self.comm.size}: {self.num_own_nodes} of {self.total_nodes} "
            f"nodes, {self.num_own_edges} of {self.total_edges} edges, mode={self.options.mode!r})"
        )

    @property
    def node_types(self) -> list[NodeType]:
        return list(self.ownership)

    @property
    def edge_types(self) -> list[EdgeType]:
        return list(self.relations)

    @property
    def is_homogeneous(self) -> bool:
        return list(self.ownership) == [NODE] and list(self.relations) == [EDGE]

    def _single(self, what: str) -> None:
        if not self.is_homogeneous:
            raise ValueError(
                f"`{what}` is for graphs of one node and one edge type; this one has the node types {self.node_types} "
                f"and the edge types {self.edge_types}: name one, as in graph[type]"
            )

    @property
    def relation(self) -> Relation:
        """The edges, for graphs of one edge type."""
        self._single("relation")
        return self.relations[EDGE]

    @property
    def node(self) -> GivenFields:
        """Every stored node field by name, own rows."""
        self._single("node")
        return GivenFields(self._node_fields[NODE], self.comm)

    @property
    def edge(self) -> GivenFields:
        """Every stored edge field by name, own edges."""
        return GivenFields(self.relation.fields, self.comm)

    @property
    def other_fields(self) -> dict[str, Any]:
        """What is stored and is no field of nodes or edges: fields of the graph, and links with their labels."""
        return {**self.graph_fields, **self.own_links.get(EDGE, {})}

    def __getattr__(self, name: str) -> Any:
        refuse_ambiguous(name)
        if name.startswith("_") or not self.is_homogeneous:
            raise AttributeError(f"ShardedGraph has no attribute {name!r}")
        if name in self.assigned:
            return self.assigned[name]
        for fields in (self.node, self.edge, self.other_fields):
            if name in fields:
                return fields[name]
        refuse_of_dgl(name)
        if hasattr(Tensor, name):
            raise AttributeError(NOT_WRAPPED)
        raise AttributeError(
            f"this graph has no field {name!r}; there are the node fields {self.node.listed()} and the edge fields "
            f"{self.edge.listed()}{self._instead_of(name)}"
        )

    def _instead_of(self, name: str) -> str:
        """What to do where this field is not stored, the end of an error sentence."""
        if name == "adj_t":
            weights = self.relation.plan.weights
            values = f", and its values as edge_weight=graph.{weights}" if weights else ""
            return f". Pass the graph where adj_t went{values}"
        return self._without_features() if name == "x" else ""

    def _without_features(self) -> str:
        """What to do where no ``x`` is stored, the end of an error sentence."""
        if "feat" in self.node:
            return ". Features are stored as 'feat': use graph.node['feat']"
        return ". If the nodes have no features, shardpass.NodeEmbedding(graph, 64) learns a row for each"

    def __getitem__(self, name: Any) -> Any:
        """A stored field by name."""
        if not isinstance(name, str):
            raise RefusedError(NOT_WRAPPED)
        return getattr(self, name)

    def __iter__(self) -> Iterator[Any]:
        raise RefusedError(NOT_WRAPPED)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise RefusedError(NOT_WRAPPED)

    @property
    def edge_index(self) -> ShardedEdgeIndex:
        """The stand-in for ``edge_index``, ``[2, num_edges]``."""
        return self.assigned.get("edge_index", self.relation.edge_index)

    @takes_followed("number")
    def layers(self, nodes: Tensor, num_layers: int) -> list[ShardedEdgeIndex]:
        """An ``edge_index`` for each layer of a model from which you only want the outputs of `nodes`. Collective.

        A layer that is called with its own ``edge_index`` leaves out the nodes and halo rows that none of `nodes`
        needs. If there is only message passing and row-wise code between the layers, the outputs of `nodes` are those
        of the whole graph. The rows of other nodes have no meaning. Norms over all nodes are refused.

        Args:
            nodes: own rows, ``[num_own_nodes]`` bool.
            num_layers: of the model, the same on every rank.
        """
        if nodes.dtype != torch.bool or nodes.shape != (self.num_own_nodes,):
            raise ValueError(
                f"rank {self.comm.rank}: layers takes a mask over own nodes, expected bool [{self.num_own_nodes}], got "
                f"{nodes.dtype} {list(nodes.shape)}"
            )
        relation = self.relation
        if self.options.stream_structure:
            raise ValueError("graph.layers with Options(stream_structure=True) is not supported: load without it")
        with self.comm.unfollowed():
            flows = message_flow(relation.edge_index, self.ownership[NODE], nodes.to(self.comm.device), num_layers)
            return [ShardedEdgeIndex.of_shards(relation.shards, relation.plan, flow) for flow in flows]

    @property
    def batch(self) -> BatchIndex:
        """The graph of each own node: the node field ``batch``, if one is stored, or else zeros. Collective once then.

        Pooling, norms and softmax over it take in the nodes of all ranks; they are collective and differentiable.
        """
        if "batch" in self.assigned:
            return self.assigned["batch"]  # type: ignore[no-any-return]
        if self._batch is None:  # not a cached_property: its lock is shared by ranks that are threads
            with self.comm.unfollowed():  # a model may be the first to ask for it
                self._batch = self._batch_index()
        return self._batch

    def _batch_index(self) -> BatchIndex:
        if not self.is_homogeneous or "batch" not in self.node:
            return BatchIndex.of(self.num_own_nodes, self.comm)  # type: ignore[no-any-return]
        ids = self._node_fields[NODE]["batch"].to(torch.int64)
        last = ids.max().view(1) if ids.numel() else ids.new_full((1,), -1)
        num_graphs = int(self.comm.all_reduce(last, "max", "number of graphs")) + 1
        return BatchIndex.wrap(ids, self.num_own_nodes, self.comm, num_graphs)  # type: ignore[no-any-return]

    def to(self, device: Any, *_: Any, **__: Any) -> ShardedGraph:
        """The graph itself, if it is on `device`; see `require_device`."""
        require_device(device, self.comm.device)
        return self

    @property
    def num_own_nodes(self) -> int:
        """Own nodes of this rank."""
        return self._own_count(o.num_own(self.comm.rank) for o in self.ownership.values())

    @property
    def num_own_edges(self) -> int:
        """Own edges of this rank."""
        return self._own_count(r.shards.num_edges for r in self.relations.values())

    def _own_count(self, counts: Iterable[int]) -> int:
        return sum(counts) if self.comm.size == 1 else own_number(sum(counts))  # type: ignore[no-any-return]

    @property
    def total_nodes(self) -> int:
        """Nodes of the whole graph."""
        return sum(o.num_total for o in self.ownership.values())

    @property
    def total_edges(self) -> int:
        """Edges of the whole graph."""
        return sum(self._total_edges.values())

    @property
    def num_graphs(self) -> int:
        """Graphs that ``batch`` tells apart. Collective once, if such a field is stored."""
        return self.batch.num_graphs

    @property
    def num_halo(self) -> int:
        """Remote source rows that this rank's edges need."""
        return sum(r.plan.num_halo for r in self.relations.values())

    @property
    def num_features(self) -> int:
        """Channels of ``x``."""
        if "x" not in self.node:
            raise KeyError(f"this graph has no field 'x'{self._without_features()}")
        x = self.node["x"]
        return 1 if x.dim() == 1 else x.size(-1)

    @property
    def num_node_features(self) -> int:
        """The same, under PyG's other name."""
        return self.num_features

    @property
    def num_edge_features(self) -> int:
        """Channels of ``edge_attr``; 0 where there is none."""
        if "edge_attr" not in self.edge:
            return 0
        attributes = self.edge["edge_attr"]
        return 1 if attributes.dim() == 1 else attributes.size(-1)

    @property
    def num_classes(self) -> int:
        """Classes of ``y``: columns of a float matrix, or the largest label of the whole graph plus one."""
        if NODE not in self._num_classes:
            named = "; store 'label' under that name, or give the number yourself" if "label" in self.node else ""
            raise ValueError(f"this graph has no labels: no node field 'y' is stored{named}")
        return self._num_classes[NODE]

    @property
    def node_ids(self) -> Tensor:
        """Original id of each own node, ``[num_own_nodes]`` int64."""
        self._single("node_ids")
        return self._node_ids[NODE]

    @property
    def node_ids_dict(self) -> dict[NodeType, Tensor]:
        """Original id of each own node, by type."""
        return dict(self._node_ids)

    @property
    def edge_ids(self) -> Tensor:
        """Original position of each own edge, ``[num_own_edges]`` int64."""
        return self.relation.edge_ids

    @unfollowed(0, gives="rows")
    def own(self, rows: Tensor, of: NodeType | EdgeType | None = None) -> Tensor:
        """This rank's rows of a tensor of the whole graph: ``[num_own, ...]`` of ``[num, ...]``. Differentiable.

        The gradient of `rows` is that of this rank's rows, and 0 elsewhere.

        Args:
            rows: a row for each node or edge, in the order that the graph had before it was sharded.
            of: the type of the nodes or edges. `None` is for graphs of one node type, ``"edges"`` for those of one edge
                type.
        """
        return self._order(of).own(rows)

    @unfollowed(0, gives="alike")
    def whole(self, rows: Tensor, of: NodeType | EdgeType | None = None) -> Tensor:
        """The rows of all ranks, in the order that the graph had before it was sharded: ``[num, ...]``. Collective.

        Every rank gets them, so they must fit its memory. Differentiable: a row's gradient is summed over ranks.

        Args:
            rows: a row for each own node or edge; trailing shape and dtype are the same on every rank.
            of: as in `own`.
        """
        return self._order(of).whole(rows)

    def _order(self, of: NodeType | EdgeType | None) -> WholeOrder:
        if of is None and len(self.node_types) == 1:
            (of,) = self.node_types
        elif of == "edges" and len(self.edge_types) == 1:
            (of,) = self.edge_types
        if of not in self._orders:
            if isinstance(of, str) and of in self.node_types:
                self._orders[of] = WholeOrder(self.comm, *self.ids_of(of), "nodes")
            elif isinstance(of, tuple) and of in self.edge_types:
                ids, total = self.relations[of].edge_ids, self._total_edges[of]
                self._orders[of] = WholeOrder(self.comm, ids, total, "edges")
            else:
                kinds = [*self.node_types, *self.edge_types]
                raise ValueError(f"of={of!r}; expected one of the types of this graph: {kinds}")
        return self._orders[of]

    def fields_of(self, node_type: NodeType) -> OwnFields:
        """Every stored field of the nodes of a type, own rows."""
        return self._node_fields[node_type]

    def total_edges_of(self, edge_type: EdgeType) -> int:
        """Edges of a type in the whole graph."""
        return self._total_edges[edge_type]

    def row_sets(self) -> dict[RowSet, OwnFields]:
        """The sets of own rows, each with its fields."""
        found = {}
        for kind, owned in self.ownership.items():
            rows = node_set(kind, owned.num_own(self.comm.rank))
            found[replace(rows, total=owned.num_total)] = self._node_fields[kind]
        for edge_type, relation in self.relations.items():
            rows = relation.plan.edge_set(relation.shards.num_edges)
            found[replace(rows, total=self._total_edges[edge_type])] = relation.fields
        return found

    def ids_of(self, node_type: NodeType | None = None) -> tuple[Tensor, int]:
        """Original ids of own nodes of a type (None: the only one), and how many nodes the whole graph has of it."""
        node_type = one_type(node_type, self.node_types)
        return self._node_ids[node_type], self.ownership[node_type].num_total

    @property
    def tables(self) -> TableWriter:
        """What writes tables with your own node ids."""
        if self._tables is None:
            raise ValueError("a graph that shardpass.load did not make has no ids of yours: write an .npy file")
        return self._tables


def require_graph(graph: Any, call: str) -> None:
    """Raise unless `graph` is a sharded graph. `call` is how the function is called: ``"gather(graph, rows)"``.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(graph, ShardedGraph):
        remedy = " (keep both: graph = shardpass.load(...), and g = shardpass.dgl.graph(graph))" * hasattr(
            graph, "core"
        )
        raise TypeError(
            f"{call}: `graph` must be what shardpass.load or shard returned, but got {type(graph).__name__}{remedy}"
        )


def one_type(node_type: NodeType | None, types: Sequence[NodeType]) -> NodeType:
    """The node type that is meant; `None` means the only one.

    Raises:
        ValueError: there is no such type, or several and none is named.
    """
    if node_type is None and len(types) == 1:
        return types[0]
    if node_type is None or node_type not in types:
        raise ValueError(f"node_type={node_type!r}; expected one of the types of this graph: {[*types]}")
    return node_type
