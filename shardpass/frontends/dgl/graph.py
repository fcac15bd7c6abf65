"""What stands for a DGLGraph: one rank's share of a graph, as unmodified DGL code expects a graph to look."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import dgl
import torch
from dgl import DGLError
from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Ranks, RowSet, unfollowed
from shardpass.core.sharding import NODE
from shardpass.core.tracing import Findings
from shardpass.frontends.dgl.blocks import parts_of_blocks
from shardpass.frontends.dgl.chosen import chosen_rows
from shardpass.frontends.dgl.closed import refused
from shardpass.frontends.dgl.followed import RowFunctions
from shardpass.frontends.dgl.frames import DataViews, Frame, Frames, FramesByType, LazyFields
from shardpass.frontends.dgl.functions import is_builtin, is_extremum
from shardpass.frontends.dgl.mailbox import merged, reduced_by_user, warn_once
from shardpass.frontends.dgl.messages import MessagePassing, without_infinity
from shardpass.frontends.dgl.private import ALL, is_all, scores_of_softmax
from shardpass.frontends.dgl.structure import CanonicalType, Edges, Nodes, NodeType, differentiated_once, frame_of
from shardpass.frontends.dgl.typed_graph import TypedGraph
from shardpass.frontends.dgl.udf import ShardedNodeBatch

Graph = TypeVar("Graph", bound="ShardedDGLGraph")
NodeFunction = Callable[[Any], dict[str, Tensor]]


class ShardedDGLGraph(TypedGraph):
    """One rank's share of a graph where a DGLGraph goes.

    Node data have a row for each own node, ``[num_own, ...]``. Edge data have a row for each edge into an own node, in
    the order of ``graph.edata[dgl.EID]``. ``update_all`` and ``apply_edges`` are collective: every rank calls them, in
    the same order. A member of DGLGraph that is not offered raises `ClosedMemberError`.

    Args:
        comm: the ranks that share the graph.
        sources, destinations: the nodes by type; the same dict, unless the graph is a block or every edge goes from
            one set of types to another.
        edges: by canonical type.
        is_block: whether sources and destinations are different sets of nodes, whose types may be the same.
        ntypes: the types of nodes in their order, for a graph that is no block.
    """

    core: ShardedGraph | None = None
    """The engine's graph that this, or the graph of which it is an edge type, stands for; `None` for a block."""

    def __init__(
        self,
        comm: Ranks,
        sources: dict[NodeType, Nodes],
        destinations: dict[NodeType, Nodes],
        edges: dict[CanonicalType, Edges],
        is_block: bool = False,
        ntypes: list[NodeType] | None = None,
    ) -> None:
        self.comm, self.is_block = comm, is_block
        self._sources, self._destinations, self._edges = sources, destinations, edges
        in_order = [*sources, *destinations]
        self._ntypes = in_order if is_block else ntypes or list(dict.fromkeys(in_order))
        hidden = frozenset() if is_block or self.shows_part else frozenset([dgl.NID, dgl.EID])
        self._src_frames = {kind: frame_of(nodes, dgl.NID, hidden) for kind, nodes in sources.items()}
        self._dst_frames = self._src_frames
        if is_block or sources is not destinations:
            self._dst_frames = {kind: frame_of(nodes, dgl.NID, hidden) for kind, nodes in destinations.items()}
        self._edge_frames = {kind: frame_of(edge, dgl.EID, hidden) for kind, edge in edges.items()}
        self._findings: dict[Any, Findings] = {}
        self._warned: set[str] = set()
        self._functions = RowFunctions()

    def __repr__(self) -> str:
        nodes = {kind: f"{nodes.num} of {nodes.total}" for kind, nodes in self._nodes.items()}
        edges = {kind: f"{edge.num} of {edge.total}" for kind, edge in self._edges.items()}
        return f"{type(self).__name__}(rank {self.comm.rank} of {self.comm.size}: nodes {nodes}, edges {edges})"

    @property
    def frames(self) -> Frames:
        """The data by type, for code of this frontend."""
        return Frames({**self._dst_frames, **self._src_frames}, dict(self._edge_frames))

    @property
    def total_nodes(self) -> int:
        """Nodes of the whole graph, of all types."""
        return sum(nodes.total for nodes in self._nodes.values())

    @property
    def total_edges(self) -> int:
        """Edges of the whole graph, of all types."""
        return sum(edges.total for edges in self._edges.values())

    @property
    def batch(self) -> Any:
        """The graph of each own node, as `ShardedGraph.batch` has it; readouts of PyG take it. Collective once."""
        if self.core is None:
            raise refused("batch of a block", "take it from the graph")
        return self.core.batch

    @property
    def lacks_rows(self) -> bool:
        """Whether this rank has no nodes or no edges of some type."""
        parts: list[Any] = [*self._sources.values(), *self._destinations.values(), *self._edges.values()]
        return any(part.num == 0 for part in parts)

    def mfgs(self, nodes: Any, num_layers: int, keep_seeds: bool = True) -> list[ShardedDGLGraph]:
        """A block for each layer of a model that is asked for the outputs of `nodes` only, the first layer's first.

        Collective. The destinations of a block come first among its sources, as in DGL, and its data are rows of this
        graph's. The destinations of the last block are `nodes`, in their order on this rank.

        Args:
            nodes: own rows, bool ``[num_own]`` or int64; a dict by type if there are several. May be empty on a rank.
            num_layers: the same on every rank.
            keep_seeds: whether destinations are sources also where no edge begins in them. Layers that read the row of
                the node itself need that.
        """
        if self.is_block:
            raise refused("mfgs of a block", "make them from the graph")
        found = parts_of_blocks(self, self.frames, nodes, num_layers, keep_seeds)
        return [ShardedDGLGraph(self.comm, *parts, is_block=True) for parts in found]

    # ---- data

    @property
    def srcdata(self) -> Any:
        """Data of source nodes."""
        return _view(self._src_frames)

    @property
    def dstdata(self) -> Any:
        """Data of destination nodes."""
        return _view(self._dst_frames)

    @property
    def ndata(self) -> Any:
        """Data of nodes."""
        if self.is_block:
            raise refused("ndata of a block", "use srcdata or dstdata")
        return _view(self._frames_by_ntype)

    @property
    def _frames_by_ntype(self) -> dict[NodeType, Frame]:
        both = {**self._dst_frames, **self._src_frames}
        return {kind: both[kind] for kind in self._ntypes}

    def _node_set(self, kind: NodeType, num: int | None = None) -> RowSet:
        is_only = self.core is not None and self.core.is_homogeneous
        return node_set(NODE if is_only else kind, self.nodes_of(kind).num if num is None else num)

    @property
    def edata(self) -> Any:
        """Data of edges."""
        return _view(self._edge_frames)

    @property
    def nodes(self) -> DataViews:
        """``nodes["type"].data``."""
        if self.is_block:
            raise refused("nodes of a block", "use srcnodes or dstnodes")
        return DataViews("nodes", self._frames_by_ntype, lambda kind: kind)

    @property
    def srcnodes(self) -> DataViews:
        """``srcnodes["type"].data``."""
        return DataViews("srcnodes", self._src_frames, lambda kind: kind)

    @property
    def dstnodes(self) -> DataViews:
        """``dstnodes["type"].data``."""
        return DataViews("dstnodes", self._dst_frames, lambda kind: kind)

    @property
    def edges(self) -> DataViews:
        """``edges["type"].data``."""
        return DataViews("edges", self._edge_frames, self.to_canonical_etype)

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """A context. Data that you set on this graph within it are forgotten when you leave it."""
        kept = self._src_frames, self._dst_frames, self._edge_frames
        self._clone_frames()
        try:
            yield
        finally:
            self._src_frames, self._dst_frames, self._edge_frames = kept

    def local_var(self) -> ShardedDGLGraph:
        """The same graph with data of its own."""
        other = self.copied_as(type(self))
        other._clone_frames()
        return other

    def clone(self) -> ShardedDGLGraph:
        """The same as `local_var`, since the structure never changes."""
        return self.local_var()

    def copied_as(self, kind: type[Graph]) -> Graph:
        """This graph, with the same frames, as one of the class `kind`."""
        other = object.__new__(kind)
        other.__dict__.update(self.__dict__)
        return other

    def _clone_frames(self) -> None:
        src = {kind: frame.clone() for kind, frame in self._src_frames.items()}
        if self.is_block:
            self._dst_frames = {kind: frame.clone() for kind, frame in self._dst_frames.items()}
        else:  # a type that is source and destination has one frame
            same = {id(frame): src[kind] for kind, frame in self._src_frames.items()}
            self._dst_frames = {k: same[id(f)] if id(f) in same else f.clone() for k, f in self._dst_frames.items()}
        self._src_frames = src
        self._edge_frames = {kind: frame.clone() for kind, frame in self._edge_frames.items()}

    def __getitem__(self: Graph, key: Any) -> Graph:
        """The graph of the edges of one type, which shares data and structure with this one."""
        if isinstance(key, tuple) and any(isinstance(part, slice) for part in key):
            wanted = [kind for kind in self._edges if all(isinstance(p, slice) or p == k for p, k in zip(key, kind))]
            if len(wanted) != 1:
                raise DGLError(f"{key} means {len(wanted)} edge types of {self.canonical_etypes}; name one")
            key = wanted[0]
        kind = self.to_canonical_etype(key)
        other = self.copied_as(type(self))
        src, _, dst = kind
        other._sources, other._destinations = {src: self._sources[src]}, {dst: self._destinations[dst]}
        other._ntypes = [src, dst] if src != dst or self.is_block else [src]
        other._edges, other._edge_frames = {kind: self._edges[kind]}, {kind: self._edge_frames[kind]}
        other._src_frames, other._dst_frames = {src: self._src_frames[src]}, {dst: self._dst_frames[dst]}
        return other

    @property
    def _graph(self) -> Any:
        """The index of the in-edges of own nodes, on which DGL's own kernels run (`edge_softmax`); see `LocalIndex`."""
        if len(self._edges) != 1:
            raise refused("a DGL kernel over several edge types", "use graph[etype] for one of them")
        edges, scores = next(iter(self._edges.values())), scores_of_softmax()
        if scores is not None:
            edges.check(scores)
        with self.comm.unfollowed():
            if scores is not None:
                differentiated_once(scores)
            return edges.index

    # ---- message passing

    def _passing(self, kind: CanonicalType) -> MessagePassing:
        frames = self._src_frames[kind[0]], self._dst_frames[kind[2]], self._edge_frames[kind]
        return MessagePassing(self._edges[kind], *frames, self._findings)

    def _received(self, kind: CanonicalType, message: Any, reducer: Any, apply: Any = None) -> dict[str, Tensor]:
        """What the destinations of a type compute. Those without messages hold infinity under max and min. Collective.

        It is what the reduce function gives or, if there is an apply function, only what that returns.
        """
        passing = self._passing(kind)
        if is_builtin(reducer):
            found = passing.reduced(message, reducer)
        else:
            warn_once(passing, self._warned)
            found = reduced_by_user(passing, message, reducer, self._functions)
        if apply is None:
            return found
        frame = self._dst_frames[kind[2]].clone()
        self._keep(frame, found, self._node_set(kind[2]))
        return self._applied(apply, kind[2], frame)

    def _keep(self, frame: Frame, found: Mapping[str, Tensor], of: RowSet) -> None:
        """Store what was computed for all rows of a frame."""
        for rows in found.values():
            self.comm.mark_rows(rows, of)
        frame.update(self.comm.as_met(dict(found)))

    def _keep_edges(self, kind: CanonicalType, found: Mapping[str, Tensor]) -> None:
        frame = self._edge_frames[kind]
        self._keep(frame, found, self._edges[kind].plan.edge_set(frame.num_rows))

    @unfollowed(0)
    def update_all(self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        """Send messages along all edges of a type, and set what the destinations compute of them. Collective.

        Args:
            message_func: one of ``dgl.function``, or a function of edges that returns a dict of fields.
            reduce_func: one of ``dgl.function``, or a function of nodes, for which all halo rows are fetched at once.
            apply_node_func: a function of the destination nodes, applied to what the reduce function gives.
            etype: needed if there are several types, unless both functions are of ``dgl.function``.
        """
        if etype is None and len(self._edges) > 1:
            if not is_builtin(message_func) or not is_builtin(reduce_func) or reduce_func.name == "mean":
                raise DGLError(
                    "update_all over several edge types takes built-in functions, and no mean: name an etype"
                )
            types = dict.fromkeys(self._edges, (message_func, reduce_func))
            return self.multi_update_all(types, reduce_func.name, apply_node_func)
        kind = self.to_canonical_etype(etype)
        found = self._received(kind, message_func, reduce_func, apply_node_func)
        if is_extremum(reduce_func) and found:
            first = next(iter(found))  # as in DGL: of the first field only, and after the apply function
            found[first] = without_infinity(found[first])
        self._keep(self._dst_frames[kind[2]], found, self._node_set(kind[2]))

    @unfollowed(0)
    def multi_update_all(self, etype_dict: dict[Any, Any], cross_reducer: Any, apply_node_func: Any = None) -> None:
        """`update_all` for several edge types, whose results are merged by `cross_reducer`. Collective.

        Args:
            etype_dict: ``(message function, reduce function[, apply function])`` by edge type, in the same order on all
                ranks.
            cross_reducer: ``sum``, ``mean``, ``min``, ``max``, ``stack``, or a function of a list of tensors.
        """
        results: dict[NodeType, list[tuple[int, dict[str, Tensor]]]] = {}
        clips = False
        for etype, functions in etype_dict.items():
            kind = self.to_canonical_etype(etype)
            found = self._received(kind, *functions)
            results.setdefault(kind[2], []).append((self.get_etype_id(kind), found))
            clips = is_extremum(functions[1])  # DGL looks at the last reduce function
        for ntype, parts in results.items():
            fields = merged(parts, cross_reducer, self.comm, self._functions, self._node_set(ntype))
            found = {k: without_infinity(v) if clips else v for k, v in fields.items()}
            self._keep(self._dst_frames[ntype], found, self._node_set(ntype))
            if apply_node_func is not None:
                self.apply_nodes(apply_node_func, ntype=ntype)

    @unfollowed(0)
    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Set the fields that `func` computes on edges. Collective.

        Args:
            func: one of ``dgl.function``, or a function of edges that returns a dict of fields.
            edges: a mask of own edges, ``[num_edges]`` bool, or within a model the places where a mask is true. Every
                rank makes the call, each with its own. The default is all.
            etype: needed if there are several types, unless `func` is of ``dgl.function`` and `edges` are all.
        """
        if etype is None and len(self._edges) > 1:
            if not is_builtin(func) or not is_all(edges):
                raise DGLError(
                    "apply_edges over several edge types takes a built-in function of all edges: name an etype"
                )
            for one in self._edges:
                self._keep_edges(one, self._passing(one).per_edge(func))
            return
        kind = self.to_canonical_etype(etype)
        passing, frame = self._passing(kind), self._edge_frames[kind]
        if is_all(edges):
            self._keep_edges(kind, passing.per_edge(func))
            return
        if isinstance(edges, tuple):
            raise refused("apply_edges on (source, destination) pairs", "pass a mask of this rank's own edges")
        of, held = passing.edges.plan.edge_set(frame.num_rows), "graph.edata[dgl.EID]"
        chosen = chosen_rows(self.comm, edges, of, "graph.apply_edges(edges=...)", held, self.shows_part)
        chosen = torch.unique(chosen)
        for name, rows in passing.per_edge(func, chosen).items():
            if name in frame:
                rows = frame[name].index_copy(0, chosen, rows[chosen])
            frame[name] = rows

    @unfollowed(0)
    def apply_nodes(self, func: NodeFunction, v: Any = ALL, ntype: NodeType | None = None) -> None:
        """Set the fields that `func` computes on own nodes, or on some of them. Not collective.

        Args:
            v: a mask of own nodes, ``[num_nodes]`` bool, or within a model the places where a mask is true.
        """
        kind = self.nodes_type(ntype)
        frame = (self._dst_frames if self.is_block else self._frames_by_ntype)[kind]
        if is_all(v):
            self._keep(frame, self._applied(func, kind, frame), self._node_set(kind))
            return
        of, held = self._node_set(kind), "graph.ndata[dgl.NID]"
        rows = chosen_rows(self.comm, v, of, "graph.apply_nodes(v=...)", held, self.shows_part)
        found = self._applied(func, kind, frame, rows)
        with self.comm.followed():
            for name, value in found.items():
                whole = frame[name] if name in frame else value.new_zeros((frame.num_rows, *value.shape[1:]))
                frame[name] = whole.index_copy(0, rows, value)

    def _applied(self, func: NodeFunction, kind: NodeType, frame: Frame, rows: Tensor | None = None) -> dict[str, Any]:
        """What a function of nodes gives for own nodes, or for some of them, whose data are in `frame`."""
        comm, alone = self.comm, self.comm.forward is None
        of = self._node_set(kind) if rows is None else RowSet.fetched(rows.numel())

        def taken(field: Tensor) -> Tensor:
            with comm.followed():
                found = field if rows is None else field.index_select(0, rows)
            if alone:
                comm.mark_rows(found, of)
            return found

        numbers = torch.arange(frame.num_rows, device=self.device) if rows is None else rows
        batch = ShardedNodeBatch(self, numbers, kind, LazyFields(frame, taken))
        batch.alike, batch.comm = of, comm
        return dict(self._functions.run(comm, func, batch, of))


def _view(frames: dict[Any, Frame]) -> Any:
    return next(iter(frames.values())) if len(frames) == 1 else FramesByType(frames)
