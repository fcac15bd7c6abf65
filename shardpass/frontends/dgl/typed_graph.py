"""Types, counts and degrees of a sharded graph, under the names that DGLGraph has for them."""

from __future__ import annotations

from typing import Any

import torch
from dgl import DGLError
from torch import Tensor

from shardpass.core.graphs import as_given, require_device
from shardpass.core.ranks import HoldsEdges, Ranks, RowSet, unfollowed
from shardpass.frontends.dgl.chosen import chosen_rows
from shardpass.frontends.dgl.closed import Closed
from shardpass.frontends.dgl.counts import EdgeCount, InDegrees, NodeCount, NodeCounts
from shardpass.frontends.dgl.private import ALL, is_all
from shardpass.frontends.dgl.structure import CanonicalType, Edges, Nodes, NodeType


class TypedGraph(Closed, HoldsEdges):
    """What a sharded graph says about its structure. Nothing here communicates, and nothing changes."""

    comm: Ranks
    is_block = False
    shows_part = False
    """Whether code sees the part of this rank, as SAR has it: numbers are own rows, and original ids are listed."""
    node_count: type[NodeCount] = NodeCount
    edge_count: type[EdgeCount] = EdgeCount
    _sources: dict[NodeType, Nodes]
    _destinations: dict[NodeType, Nodes]
    _edges: dict[CanonicalType, Edges]
    _ntypes: list[NodeType]

    def nodes_type(self, ntype: NodeType | None) -> NodeType:
        """The type of nodes that `ntype` means; `None` means the only one. Those of a block are destinations."""
        kind: NodeType = self._one(self._nodes, ntype, "Node")
        return kind

    def nodes_of(self, ntype: NodeType | None) -> Nodes:
        """The nodes of a type; `None` means the only type. Those of a block are destinations."""
        return self._nodes[self.nodes_type(ntype)]

    @property
    def _nodes(self) -> dict[NodeType, Nodes]:
        return self._destinations if self.is_block else {**self._sources, **self._destinations}

    def edges_of(self, etype: Any) -> Edges:
        """The structure of the edges of a type; `None` means the only type."""
        return self._edges[self.to_canonical_etype(etype)]

    @property
    def edge_sets(self) -> list[RowSet]:
        """The edges of this rank, a set for each type."""
        return [edges.plan.edge_set(edges.num) for edges in self._edges.values()]

    @property
    def end_sets(self) -> tuple[RowSet, RowSet] | None:
        """The nodes at which edges begin and end, if they are of one type."""
        plans = [edges.plan for edges in self._edges.values()]
        return (plans[0].source_set, plans[0].dst_set) if len(plans) == 1 else None

    # ---- types

    @property
    def srctypes(self) -> list[NodeType]:
        """Types of source nodes."""
        return list(self._sources)

    @property
    def dsttypes(self) -> list[NodeType]:
        """Types of destination nodes."""
        return list(self._destinations)

    @property
    def ntypes(self) -> list[NodeType]:
        """Types of nodes. Those of a block are the types of its sources, then of its destinations, as in DGL."""
        return list(self._ntypes)

    @property
    def canonical_etypes(self) -> list[CanonicalType]:
        """(source type, edge type, destination type) of each type of edges."""
        return list(self._edges)

    @property
    def etypes(self) -> list[str]:
        """The edge types, in the order of `canonical_etypes`."""
        return [kind[1] for kind in self._edges]

    def metagraph(self) -> Any:
        """The types of nodes as a `networkx.MultiDiGraph` whose edges are the types of edges."""
        from networkx import MultiDiGraph

        found = MultiDiGraph()
        found.add_edges_from((source, destination, kind) for source, kind, destination in self._edges)
        return found

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one type of nodes and one of edges."""
        return len(self._ntypes) == len(self._edges) == 1

    def to_canonical_etype(self, etype: Any) -> CanonicalType:
        """The canonical type that `etype` means: a name, a canonical type, or `None` for the only one."""
        if etype is None:
            if len(self._edges) != 1:
                raise DGLError("Edge type name must be specified if there are more than one edge types.")
            return next(iter(self._edges))
        found = [kind for kind in self._edges if etype in (kind, kind[1])]
        if len(found) != 1:
            problem = "is ambiguous" if found else "does not exist"
            raise DGLError(f"Edge type {etype!r} {problem}; there are: {self.canonical_etypes}")
        return found[0]

    def get_etype_id(self, etype: Any) -> int:
        """Position of an edge type in `canonical_etypes`."""
        return self.canonical_etypes.index(self.to_canonical_etype(etype))

    def get_ntype_id(self, ntype: NodeType | None) -> int:
        """Position of a node type in `ntypes`."""
        return self.ntypes.index(self._one(self._sources | self._destinations, ntype, "Node"))

    @staticmethod
    def _one(known: dict[Any, Any], kind: Any, what: str) -> Any:
        if kind is None:
            if len(known) != 1:
                raise DGLError(f"{what} type name must be specified if there are more than one: {list(known)}")
            return next(iter(known))
        if kind not in known:
            raise DGLError(f"{what} type {kind!r} does not exist; there are: {list(known)}")
        return kind

    # ---- sizes

    def _node_set(self, kind: NodeType, num: int | None = None) -> RowSet:
        """The nodes of a type; `num` is how many, if they are not those of `nodes_of`."""
        raise NotImplementedError

    def _count(self, known: dict[Any, Any], kind: Any, what: str) -> Any:
        kinds = [*known] if kind is None else [self._one(known, kind, what)]
        own, total = (sum(getattr(known[kind], name) for kind in kinds) for name in ("num", "total"))
        if self.comm.runs_user_code and not self.shows_part:
            root = known[kinds[0]].plan.edge_set(own).root if what == "Edge" else self._node_set(kinds[0], own).root
            of = RowSet(
                f"{what.split()[-1].lower()}s", own, root if len(kinds) == 1 else ("kinds", *kinds), total=total
            )
            return self.comm.count_of(of)
        return (self.edge_count if what == "Edge" else self.node_count)(own, total)

    def num_src_nodes(self, ntype: NodeType | None = None) -> int:
        """How many source nodes of a type this rank has; `None` means all types."""
        return self._count(self._sources, ntype, "SRC node")

    def num_dst_nodes(self, ntype: NodeType | None = None) -> int:
        """How many destination nodes of a type this rank has; `None` means all types."""
        return self._count(self._destinations, ntype, "DST node")

    def num_nodes(self, ntype: NodeType | None = None) -> int:
        """How many nodes of a type this rank has; `None` means all types."""
        if self.is_block and ntype is None:
            everything = {("src", k): n for k, n in self._sources.items()}
            return self._count({**everything, **self._destinations}, None, "Node")
        return self._count({**self._destinations, **self._sources}, ntype, "Node")

    def num_edges(self, etype: Any = None) -> int:
        """How many edges of a type this rank has; `None` means all types."""
        kind = None if etype is None else self.to_canonical_etype(etype)
        return self._count(self._edges, kind, "Edge")

    number_of_src_nodes, number_of_dst_nodes = num_src_nodes, num_dst_nodes
    number_of_nodes, number_of_edges = num_nodes, num_edges

    @unfollowed(0)
    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Tensor:
        """In-degrees of own destination nodes, ``[num_own]`` int64, or of those that the mask `v` picks."""
        edges = self._edges[self.to_canonical_etype(etype)]
        if is_all(v):
            degrees = edges.in_degrees.clone()
            is_plain = self.comm.forward is not None or self.shows_part
            given = None if is_plain else as_given(degrees, self.comm, is_kept=True)
            degrees = InDegrees.of(degrees, edges.leaves_out, given=given)
            self.comm.mark_rows(degrees, edges.plan.dst_set)
            return degrees
        return self._of_chosen(edges.in_degrees, v, edges.plan.dst_set, "graph.in_degrees(v)")

    @unfollowed(0)
    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Tensor:
        """Out-degrees of own source nodes in the whole graph, ``[num_own]`` int64, or of those that `u` picks."""
        edges = self._edges[self.to_canonical_etype(etype)]
        if is_all(u):
            degrees = edges.out_degrees.clone()
            self.comm.mark_rows(degrees, edges.plan.source_set)
            is_plain = self.comm.forward is not None or self.shows_part
            return degrees if is_plain else as_given(degrees, self.comm, is_kept=True)
        return self._of_chosen(edges.out_degrees, u, edges.plan.source_set, "graph.out_degrees(u)")

    def _of_chosen(self, degrees: Tensor, given: Any, of: RowSet, call: str) -> Tensor:
        rows = chosen_rows(self.comm, given, of, call, "graph.ndata[dgl.NID]", self.shows_part)
        degrees = degrees.clone()
        self.comm.mark_rows(degrees, of)
        with self.comm.followed():
            return degrees.index_select(0, rows)

    @property
    def batch_size(self) -> int:
        """1: a sharded graph is one graph."""
        return 1

    def batch_num_nodes(self, ntype: NodeType | None = None) -> Tensor:
        """The number of nodes, for use as a size or a divisor; see `NodeCounts`."""
        nodes = self.nodes_of(ntype)
        return NodeCounts.of(nodes.num, nodes.total)

    @property
    def device(self) -> torch.device:
        """Where all tensors of this rank are."""
        return self.comm.device

    def to(self, device: Any, **_: Any) -> Any:
        """The graph itself, where `device` is its device already; see `ShardedGraph.to`."""
        require_device(device, self.comm.device)
        return self

    def long(self) -> Any:
        """The graph itself, whose ids are int64."""
        return self

    def create_formats_(self) -> None:
        """Nothing: the engine has its own formats, and makes them when they are needed."""

    @property
    def idtype(self) -> torch.dtype:
        """The type of node and edge ids."""
        return torch.int64
