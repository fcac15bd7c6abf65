"""What this rank knows of the nodes and edges of one type. It does not change once it is made."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, scatter_to_owners
from shardpass.core.graphs import OwnFields, Relation
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import EdgeShards, LazyTensor, build_shards
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.closed import refused
from shardpass.frontends.dgl.frames import Frame, LazyFields
from shardpass.frontends.dgl.private import HeteroGraphIndex, local_index

NodeType = str
CanonicalType = tuple[str, str, str]


class LocalIndex(HeteroGraphIndex):
    """The index of the edges into own nodes, in the rank's edge order.

    [Note: edge softmax needs no communication]
    All in-edges of a node are here. So ``dgl.nn.functional.edge_softmax``, and kernels that read destinations and edges
    only (``copy_e``, ``e_op_v``), give what they give on the whole graph. A kernel that reads source nodes would not.
    The index therefore has a number of source nodes that no node tensor of this rank has, so that such a kernel raises.
    Functions that walk along out-edges raise too, since the index has no format for that.
    """

    has_own_rows = True
    """What `core.following` asks of the index that a kernel of DGL's is given."""

    @staticmethod
    def of(src_rows: Tensor, dst_rows: Tensor, plan: HaloPlan) -> LocalIndex:
        """The index of edges in own-first numbering."""
        num_src = max(plan.num_src, plan.num_own_src, plan.num_dst) + 1
        index = local_index(src_rows, dst_rows, num_src, plan.num_dst)
        index.__class__ = LocalIndex
        return index  # type: ignore[no-any-return]

    def reverse(self) -> NoReturn:
        """Refused."""
        raise refused(
            "the reversed graph (dgl.reverse, edge_softmax with norm_by='src')",
            "reverse it before partitioning, or put the scores into messages; EdgeWeightNorm works in a wrapped model",
        )

    def edge_subgraph(self, induced_edges: Any, preserve_nodes: bool) -> Any:
        """The index of some of the edges among the same nodes, for the softmax over these edges only."""
        if not preserve_nodes:
            raise refused("dgl.edge_subgraph", "do it before partitioning")
        graph = super().edge_subgraph(induced_edges, True).graph  # which is another object whenever it is asked for
        graph.__class__ = LocalIndex
        return SimpleNamespace(graph=graph)

    def _no(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("the structure of the graph", "do what needs it before partitioning")

    edges = adjacency_matrix = adjacency_matrix_tensors = node_subgraph = copy_to = _no
    out_edges = in_edges = find_edges = edge_id = edge_ids = successors = predecessors = _no
    has_edges_between = has_edge_between = line_graph = in_subgraph = out_subgraph = get_unitgraph = _no


def differentiated_once(scores: Tensor) -> Tensor:
    """`scores`, which are given to DGL's ``edge_softmax``. Its kernel of backward leaves a part out where it is
    differentiated itself, so a backward with ``create_graph=True`` is refused."""
    if scores.requires_grad:
        scores.register_hook(_refuse_twice)
    return scores


def _refuse_twice(grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise RefusedError(
            "DGL's edge_softmax is wrong where its backward is differentiated (create_graph=True). Divide the "
            "exponentials of the scores by their sums, with update_all(fn.copy_e(...), fn.sum(...)) and apply_edges("
            "fn.e_div_v(...)). Where GATConv, GATv2Conv, DotGatConv and AGNNConv of dgl.nn are fused, they are "
            "differentiated any number of times: without get_attention=True and Options(fuse_attention=False)"
        )


@dataclass(frozen=True)
class Nodes:
    """This rank's nodes of one type.

    Args:
        num: how many nodes this rank has.
        total: how many nodes all ranks have.
        ids: the original id of each own node, ``[num]`` int64.
        fields: stored tensors with a row for each own node.
    """

    num: int
    total: int
    ids: Tensor
    fields: Mapping[str, Tensor]


@dataclass
class Edges:
    """This rank's edges of one type: those that end in its own nodes.

    Args:
        canonical: (source type, edge type, destination type).
        comm: the ranks.
        plan: the halo of their sources.
        shards: the edges by source block.
        original: the owner of `ids`.
        total: how many edges of this type all ranks have.
        fields: stored tensors with a row for each edge.
        out_degrees: of the own source nodes in the whole graph, ``[num_own_src]`` int64.
        leaves_out: whether some destination of some rank has no in-edge of this type.
    """

    canonical: CanonicalType
    comm: Ranks
    plan: HaloPlan
    shards: EdgeShards
    original: LazyTensor
    total: int
    fields: Mapping[str, Tensor]
    out_degrees: Tensor
    leaves_out: bool
    _subsets: list[tuple[Tensor, EdgeShards]] = field(default_factory=list, repr=False)

    @staticmethod
    def of(canonical: CanonicalType, relation: Relation, total: int) -> Edges:
        """The edges of a relation of the engine. Collective: degrees are counted now, not when asked for."""
        plan = relation.plan
        counts = torch.bincount(relation.shards.row(0), minlength=plan.num_src).to(torch.float64)
        with torch.no_grad():
            degrees = scatter_to_owners(counts, plan, f"out-degrees of {canonical}").to(torch.int64)
        lonely = plan.comm.all_gather_object(bool((relation.shards.degrees() == 0).any()), f"in-degrees of {canonical}")
        return Edges(
            canonical, plan.comm, plan, relation.shards, relation.ids, total, relation.fields, degrees, any(lonely),
        )  # fmt: skip

    @property
    def num(self) -> int:
        """How many edges this rank has."""
        return self.shards.num_edges

    def check(self, rows: Tensor) -> None:
        """Refuse a tensor that is given for rows of these edges, or of some of them, and is known to have others."""
        if self.comm.is_followed:
            self.comm.require_rows(rows, self.plan.edge_set(rows.size(0)))

    @property
    def src_rows(self) -> Tensor:
        """The source row of each edge in own-first numbering, ``[num]`` int64; made anew."""
        return self._row(0)

    @property
    def dst_rows(self) -> Tensor:
        """The own row of the destination of each edge, ``[num]`` int64; made anew."""
        return self._row(1)

    def _row(self, end: int) -> Tensor:
        with self.comm.unfollowed():  # a model may ask for it
            row = self.shards.row(end)
        self.comm.mark_rows(row, self.plan.edge_set(self.num), points_to=self.plan.dst_set if end else None)
        return row

    @property
    def ids(self) -> Tensor:
        """The original id of each edge, ``[num]`` int64; made when it is first read."""
        return self.original.read()

    @cached_property
    def in_degrees(self) -> Tensor:
        """The in-degree of each own destination node, ``[num_dst]`` int64."""
        return self.shards.degrees()

    @cached_property
    def places(self) -> Tensor:
        """The place of each edge among the edges into its destination, by original id, ``[num]`` int64."""
        order, dst_rows = torch.argsort(self.ids), self.dst_rows
        order = order[torch.argsort(dst_rows[order], stable=True)]
        starts = torch.cumsum(self.in_degrees, 0) - self.in_degrees
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device) - starts[dst_rows[order]]
        return places

    @cached_property
    def index(self) -> LocalIndex:
        """A DGL graph index of the own edges; see `LocalIndex`."""
        return LocalIndex.of(self.src_rows, self.dst_rows, self.plan)

    def only(self, chosen: Tensor) -> EdgeShards:
        """The shards of some of the edges, which keep their rows in edge tensors. The latest eight results are kept.

        Args:
            chosen: the positions of the edges, int64.
        """
        for known, shards in self._subsets:
            if known.shape == chosen.shape and torch.equal(known, chosen):
                return shards
        found = build_shards(self.src_rows[chosen], self.dst_rows[chosen], self.plan.blocks, self.plan.num_dst)
        rows = tuple(replace(shard, rows=chosen[shard.edge_rows]) for shard in found.shards)
        shards = EdgeShards(rows, found.num_dst, self.num)
        self._subsets[:] = [*self._subsets[-7:], (chosen.clone(), shards)]
        return shards


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def frame_of(part: Nodes | Edges, id_field: str, hidden: frozenset[str]) -> Frame:
    """The data of some nodes or edges, with their original ids as the field `id_field`."""
    ids = LazyFields({id_field: torch.empty(0)}, lambda _: part.ids)  # of edges, they are made when they are read
    given = part.fields.followed if isinstance(part.fields, OwnFields) else _as_it_is
    stored = ChainMap(ids, LazyFields(part.fields, given))
    if not hidden:  # code sees the part of this rank, and sets fields in models that are not wrapped
        given = _as_it_is
    if isinstance(part, Nodes):
        return Frame(part.num, part.total, "nodes", stored, hidden, given=given)
    return Frame(part.num, part.total, "edges", stored, hidden, part.check, given)
