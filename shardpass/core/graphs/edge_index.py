"""What stands for ``edge_index`` on a sharded graph: an integer tensor ``[2, num_edges]`` in own-first numbering.

Row 1 holds own destination rows. Row 0 holds source rows: own rows first, then halo rows. So ``(i, i)`` is a
self-loop, ``row != col`` finds self-loops, degrees by row 1 are complete, and code that adds self-loops, masks edges or
normalises runs as it is. Only row 0 is special: indexing a node tensor with it is a differentiable halo fetch, and
scattering onto it adds rows at their owners, differentiably. Any other use is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan
from shardpass.core.following import own_number, user_line
from shardpass.core.graphs.by_source import (
    TAKING,
    add_at_source,
    fill_at_source,
    flips_rows,
    picks,
    put_at_source,
    refuse_loops_between,
    refused,
    take_by_source,
)
from shardpass.core.graphs.edge_mask import EdgeMask
from shardpass.core.graphs.last_node import ROWS_READ, lacks_last_node, other_count
from shardpass.core.graphs.layer_flow import LayerFlow
from shardpass.core.graphs.rearranged import Part, rearranged, refused_shape
from shardpass.core.graphs.stand_in import PRINTS, StandIn, as_tensor, counted_last, describes, first_of, marked
from shardpass.core.ranks import HoldsEdges, RowSet, torch_private
from shardpass.core.sharding import Derivation, EdgeShards
from shardpass.errors import RefusedError

_COPIES = frozenset(["clone", "contiguous", "detach", "to", "long", "cpu", "cuda", "alias"])
_RESHAPES = frozenset(["view", "expand", "expand_as", "unsqueeze", "reshape", "flatten", "squeeze"])
_STACKS = frozenset("stack vstack row_stack cat concat".split())
_COMPARES = frozenset(["eq", "ne", "__eq__", "__ne__"])
_OF_DATA = frozenset("x y edge_index edge_attr edge_weight edge_type batch x_dict num_nodes".split())


class ShardedEdgeIndex(StandIn, HoldsEdges):
    """``edge_index`` of a sharded graph, or one derived from it by adding, removing, reordering or flipping edges.

    It stores sources first. After a flip it stores the same numbers, and `is_reversed` is true.
    """

    plan: HaloPlan
    is_reversed: bool
    derivation: Derivation | None  # how the numbers are made, where they are not stored
    flow: LayerFlow | None  # which nodes are computed; `None`: all of them
    lacks_last = False  # after the largest id was asked for, until something else is: the last node has no edge
    counts_last = True

    @staticmethod
    def wrap(data: Tensor, plan: HaloPlan, is_reversed: bool = False, flow: LayerFlow | None = None) -> Any:
        """`data` ``[2, num_edges]`` int64, sources first, as the stand-in of the graph behind `plan`."""
        out = data.as_subclass(ShardedEdgeIndex)
        out.plan, out.is_reversed, out.derivation, out.flow = plan, is_reversed, None, flow
        return out

    @staticmethod
    def of_shards(shards: EdgeShards, plan: HaloPlan, flow: LayerFlow | None = None) -> Any:
        """The stand-in for the edges of `shards`, without numbers until something reads them."""
        return ShardedEdgeIndex.derived(Derivation.of(shards), plan, False, flow)

    @staticmethod
    def derived(derivation: Derivation, plan: HaloPlan, is_reversed: bool, flow: LayerFlow | None) -> Any:
        """The stand-in for a derived list; it has the shape but no numbers until something reads them."""
        shape = torch.zeros((2, 1), dtype=torch.int64, device=derivation.device).expand(2, derivation.num_edges)
        out = ShardedEdgeIndex.wrap(shape, plan, is_reversed, flow)
        out.derivation = derivation
        return out

    @property
    def shards(self) -> EdgeShards | None:
        """The shards of exactly this edge list, where they are known."""
        if self.derivation is None or self.derivation.is_edited or isinstance(self.derivation.base, Tensor):
            return None
        return self.derivation.base

    @property
    def edges(self) -> Tensor | Derivation:
        """The edge list sources first, as numbers ``[2, num_edges]`` or as what was done to others."""
        return self.as_subclass(Tensor) if self.derivation is None else self.derivation

    @property
    def sources_first(self) -> Tensor:
        """The numbers, whatever the direction: sources in row 0, destinations in row 1. Made anew if not stored."""
        if self.derivation is None:
            return self.as_subclass(Tensor)
        with self.plan.comm.unfollowed():
            return self.derivation.whole()

    @property
    def plain(self) -> Tensor:
        """The numbers as they look from outside, as an ordinary tensor."""
        return self.sources_first.flip(0) if self.is_reversed else self.sources_first

    @property
    def edge_sets(self) -> list[RowSet]:
        """The edges of the list, which all are of one relation."""
        with torch_private.DisableTorchFunctionSubclass():
            return [self.plan.edge_set(self.size(-1))]

    @property
    def end_sets(self) -> tuple[RowSet, RowSet]:
        """Sources and destinations, or destinations and sources of a list that was flipped."""
        ends = self.plan.source_set, self.plan.dst_set
        return ends[::-1] if self.is_reversed else ends  # type: ignore[return-value]

    @property
    def has_one_type(self) -> bool:
        """Whether sources and destinations are the same nodes, so that both are numbered own-first."""
        return self.plan.num_own_src == self.plan.num_dst and self.plan.source_set == self.plan.dst_set

    def flipped(self) -> ShardedEdgeIndex:
        """The same edges with the rows exchanged; nothing is copied."""
        out = ShardedEdgeIndex.wrap(self.as_subclass(Tensor), self.plan, not self.is_reversed, self.flow)
        out.derivation = self.derivation
        return out

    def __getattr__(self, name: str) -> Any:
        if name in _OF_DATA:
            raise AttributeError(
                f"`.{name}` is read of an edge_index: a model that reads the fields of `data` is called with the graph"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _of(self, data: Tensor) -> ShardedEdgeIndex:
        """Other numbers, sources first, in the same direction."""
        return ShardedEdgeIndex.wrap(data, self.plan, self.is_reversed, self.flow)

    @classmethod
    def answer(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mine = first_of(ShardedEdgeIndex, args, kwargs)
        if (forward := mine.plan.comm.forward) is not None and mine.plan.comm.runs_user_code:
            forward.reads_edges = True
        if name not in ROWS_READ:
            mine.lacks_last = name == "max" and lacks_last_node(mine.plan, mine.derivation)
        if name in TAKING and args and args[0] is not mine and mine.has_one_type:
            return take_by_source(mine.plan, mine.flow, name, args, kwargs)
        if describes(func) and not mine.plan.comm.runs_user_code:
            return mine._counted(as_tensor(func, args, kwargs), name, args)
        if mine.plan.comm.runs_user_code:
            for index in picks(name, args, kwargs):
                if isinstance(index, Tensor) and not isinstance(index, StandIn):
                    mine._check_picks(index)
        if name == "max":  # which is asked for the number of nodes
            mine.plan.comm.note_count(mine.plan.num_own_src)
        with mine.plan.comm.unfollowed(keeps=False):
            out = cls._answer(mine, func, name, args, kwargs)
            parts = [one for one in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(one, Part)]
        if parts:
            return torch_private.tree_map(mine._part, out)
        if not describes(func):
            return marked(mine, out, mine.plan, name)
        return mine._counted(out, name, args)

    def _counted(self, out: Any, name: str, args: tuple[Any, ...]) -> Any:
        comm = self.plan.comm
        with comm.unfollowed(), torch_private.DisableTorchFunctionSubclass():
            count = self.size(-1)
        if count and not comm.runs_user_code:  # it may be an operand
            return own_number(out) if comm.size > 1 and comm.forward is None and name != "__len__" else out
        return counted_last(out, name, args, self.plan.edge_set(count), is_operand=not comm.runs_user_code)

    def _part(self, part: Part) -> Tensor:
        """The list, its reverse, or one of its rows in the shape that is wanted."""
        with self.plan.comm.unfollowed(), torch_private.DisableTorchFunctionSubclass():
            if part.shape == (2, -1):
                return self if part.rows == (0, 1) else self.flipped()
            if len(part.rows) == 2 and not self.has_one_type:
                raise refused("both rows in one list", "the edge_index")
            if len(part.rows) == 2:
                both = SourceRows.wrap(self.plain.reshape(-1), self.plan, self.flow)
                both.what = "the edge_index"
                return both  # type: ignore[no-any-return]
            row = _item(self, part.rows[0])
        return marked(self, row, self.plan).view(part.shape)  # type: ignore[no-any-return]

    def _check_picks(self, index: Tensor) -> None:
        """Refuse what picks edges by what was made of several, or by their position."""
        if index.dtype not in (torch.bool, torch.uint8, torch.int64, torch.int32):
            return
        with self.plan.comm.unfollowed():
            count = self.size(-1)
            edges = index.new_zeros(count)
        self.plan.comm.mark_rows(edges, self.plan.edge_set(count))
        if index.dim() == 1:
            edges[index]  # which is followed

    @staticmethod
    def _answer(mine: ShardedEdgeIndex, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch_private.DisableTorchFunctionSubclass():
            if name in PRINTS:
                return func(*_plain(args), **kwargs)
            if describes(func):
                return func(*args, **kwargs)
            if name == "max" and len(args) == 1 and not kwargs:  # PyG asks so for the number of nodes
                return torch.tensor(max(mine.plan.num_own_src, mine.plan.num_dst) - 1)
            if name == "__getitem__" and (found := _item(mine, args[1])) is not None:
                return found
            if name == "unbind" and (*args[1:], *kwargs.values()) in ((), (0,), (-2,)):  # ``row, col = edge_index``
                return _item(mine, 0), _item(mine, 1)
            if name == "view_as" and args[0] is mine is args[1]:  # so backward hooks of modules look at arguments
                return mine.flipped().flipped()
            if name in _COPIES and mine is args[0]:
                return _copied(mine, func, args, kwargs)
            if name == "flip" and flips_rows(*args[1:], *kwargs.values()):
                return mine.flipped()
            if name == "index_select" and mine is args[0] and kwargs.get("dim", args[1:2]) in (1, -1, (1,), (-1,)):
                return mine._of(func(mine.sources_first, *_plain(args[1:]), **kwargs))
            if name in ("cat", "concat") and kwargs.get("dim", args[1] if len(args) > 1 else 0) in (1, -1):
                return _joined(mine, kwargs.get("tensors", args[0] if args else ()))
            found = rearranged(func, name, mine.size(-1), args[1:], kwargs) if args and mine is args[0] else None
        if found is None:
            raise refused(name, "the edge_index")
        return found


class SourceRows(StandIn):
    """Row 0 of a `ShardedEdgeIndex`: source rows in own-first numbering."""

    plan: HaloPlan
    flow: LayerFlow | None  # of the edge list it is a row of
    what = "source node ids"  # what errors call it

    @staticmethod
    def wrap(data: Tensor, plan: HaloPlan, flow: LayerFlow | None = None) -> Any:
        """`data` as source rows of `plan`."""
        out = data.as_subclass(SourceRows)
        out.plan, out.flow = plan, flow
        return out

    @property
    def plain(self) -> Tensor:
        """The numbers as an ordinary tensor."""
        return self.as_subclass(Tensor)

    @classmethod
    def answer(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mine = first_of(SourceRows, args, kwargs)
        if name in TAKING and not (name != "embedding" and args and isinstance(args[0], StandIn)):
            return take_by_source(mine.plan, mine.flow, name, args, kwargs)
        if name in ("index_add", "index_add_") and len(args) == 4 and args[2] is mine and mine.dim() == 1:
            return add_at_source(name, *args, **kwargs)
        if describes(func) and not mine.plan.comm.is_followed:
            return as_tensor(func, args, kwargs)
        with mine.plan.comm.unfollowed(keeps=False):
            # has a row for each source
            onto = args[0] if args and name.startswith(("scatter", "index_", "__set")) else None
            for given in torch_private.tree_leaves((args, kwargs)):
                if isinstance(given, Tensor) and not isinstance(given, StandIn) and given is not onto:
                    mine.plan.comm.require_rows(given, mine.plan.edge_set(mine.numel()))
            out = cls._answer(mine, func, name, args, kwargs)
        if name.startswith("scatter"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            mine.plan.comm.forget_rows(out)
            mine.plan.comm.mark_rows(out, mine.plan.source_set, dim)
            return out
        return marked(mine, out, mine.plan, name)

    @staticmethod
    def _answer(mine: SourceRows, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if name.startswith("scatter"):
            return put_at_source(mine.plan, name, args, kwargs)
        with torch_private.DisableTorchFunctionSubclass():
            if name == "__setitem__" and first is not mine and isinstance(args[2], (bool, int, float)):
                return fill_at_source(mine.plan, *args)
            if name == "__setitem__" and first is not mine and _only_own_rows(first, args[1]):
                return func(*_plain(args), **kwargs)
            if name in PRINTS or describes(func):
                return func(*args, **kwargs)
            if name in _COPIES | _RESHAPES and isinstance(first, SourceRows):
                return SourceRows.wrap(func(*_plain(args), **kwargs), mine.plan, mine.flow)
            if name == "__getitem__" and isinstance(first, SourceRows):
                return SourceRows.wrap(func(*_plain(args), **kwargs), mine.plan, mine.flow)
            if name in _COMPARES and all(isinstance(a, Tensor) and a.shape == mine.shape for a in args[:2]):
                refuse_loops_between(mine.plan)
                return EdgeMask.wrap(func(*_plain(args), **kwargs), mine.plan)
            if name == "max" and len(args) == 1 and not kwargs:
                return torch.tensor(mine.plan.num_own_src - 1)
            if name in _STACKS and len(first or ()) == 2 and (*args[1:], *kwargs.values()) in ((), (0,)):
                return _stacked(mine.plan, name, *args[0])
        raise refused(name, mine.what)


def _copied(mine: ShardedEdgeIndex, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if mine.derivation is not None:
        some = func(mine.as_subclass(Tensor)[:, :0], *args[1:], **kwargs)
        if (some.device, some.dtype) == (mine.device, mine.dtype):
            return mine  # nothing can be written into it
    out = func(mine.sources_first, *args[1:], **kwargs)
    return ShardedEdgeIndex.wrap(out, mine.plan, mine.is_reversed, mine.flow)


def _joined(mine: ShardedEdgeIndex, pieces: Sequence[Tensor]) -> ShardedEdgeIndex:
    for piece in pieces:
        _check_piece(mine, piece)
    if not isinstance(pieces[0], ShardedEdgeIndex):
        raise RefusedError(
            f"{user_line()}: `cat` puts self-loops before the edges, and rows of edges are told by their order. Put "
            f"them after the edges, as torch.cat([edge_index, loops], dim=1) does, and their rows after those of edges"
        )
    extends = mine is pieces[0]  # then its own numbers need not be made
    others = pieces[1:] if extends else pieces
    data = [piece.sources_first if isinstance(piece, ShardedEdgeIndex) else _plain_one(piece) for piece in others]
    if extends:
        start = mine.derivation or Derivation.of(mine.sources_first)
        return ShardedEdgeIndex.derived(start.extended(data), mine.plan, mine.is_reversed, mine.flow)
    return mine._of(torch.cat(data, dim=1))


def _item(mine: ShardedEdgeIndex, key: Any) -> Any:
    """A row, or the edges that a mask or an index picks, in all or one of the rows; None for another key."""
    if isinstance(key, int) and not isinstance(key, bool) and -2 <= key < 2:
        stored = (key % 2) ^ int(mine.is_reversed)
        row = mine.sources_first[stored] if mine.derivation is None else mine.derivation.row(stored)
        return SourceRows.wrap(row, mine.plan, mine.flow) if stored == 0 else row
    if isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None) and not isinstance(key[1], int):
        edges = _plain_one(key[1])
        if isinstance(edges, slice) and edges != slice(None):
            raise refused_shape("__getitem__", (key,))
        start = mine.derivation or Derivation.of(mine.sources_first)
        if not start.is_edited and isinstance(edges, Tensor) and edges.dtype == torch.bool:
            out = ShardedEdgeIndex.derived(start.masked(edges), mine.plan, mine.is_reversed, mine.flow)
            out.lacks_last = mine.lacks_last and isinstance(key[1], EdgeMask)  # the self-loops are added again
            return out
        return mine._of(mine.sources_first[:, edges])
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int):
        row, edges = _item(mine, key[0]), _plain_one(key[1])
        if isinstance(edges, slice) and edges == slice(None):
            return row
        if isinstance(edges, Tensor) and edges.dtype == torch.bool:
            some = _plain_one(row)[edges]
            return SourceRows.wrap(some, mine.plan, mine.flow) if isinstance(row, SourceRows) else some
    return None


def _check_piece(mine: ShardedEdgeIndex, piece: Tensor) -> None:
    """Refuse to join edges of another graph or direction, and plain ids other than self-loops of own nodes."""
    if isinstance(piece, ShardedEdgeIndex):
        if piece.plan is mine.plan and piece.is_reversed == mine.is_reversed:
            return
        raise RefusedError(
            f"{user_line()}: `cat` of the edge_index of a sharded graph with its reverse, or with that of another "
            f"graph: reversed edges belong to other ranks. Add them before partitioning (PyG: to_undirected)"
        )
    plan, data = mine.plan, _plain_one(piece)
    refuse_loops_between(plan)
    loops = data.dim() == 2 and data.size(0) == 2 and torch.equal(data[0], data[1])
    if not loops or plan.num_own_src != plan.num_dst or (data.numel() and int(data.max()) >= plan.num_dst):
        raise RefusedError(
            f"{user_line()}: `cat` of the edge_index of a sharded graph with other ids: only self-loops of own "
            f"nodes can be added in forward, since ids are numbered per rank. Add other edges before "
            f"partitioning. If a layer adds the self-loops: rank {plan.comm.rank} owns {plan.num_dst} nodes, has x "
            f"as many rows (graph.x)?"
        )
    if mine.lacks_last and bool((data[0] == plan.last_node).any()):
        raise other_count(plan)


def _stacked(plan: HaloPlan, name: str, first: Tensor, second: Tensor) -> ShardedEdgeIndex:
    """Rows put together again; which of them holds the sources is known from their types."""
    sources = isinstance(first, SourceRows), isinstance(second, SourceRows)
    if name != "stack" and all(row.dim() == 2 and row.size(0) == 1 for row in (first, second)):
        name, first, second = "stack", first[0], second[0]
    if name in ("cat", "concat") or first.dim() != 1 or first.shape != second.shape:
        raise refused(name, "source node ids")
    data = torch.stack([_plain_one(first), _plain_one(second)])  # as they look from outside
    loops = torch.equal(data[0], data[1]) and (data.numel() == 0 or int(data.max()) < plan.num_own_src)
    if all(sources) and not loops:
        raise refused(name, "source node ids")
    return ShardedEdgeIndex.wrap(data if sources[0] else data.flip(0), plan, is_reversed=not sources[0])


def _only_own_rows(table: Any, key: Any) -> bool:
    """Whether `key` are source rows that this rank owns (as self-loops are), and `table` has a row for each."""
    if not isinstance(key, SourceRows) or table.size(0) != key.plan.num_own_src:
        return False
    return key.numel() == 0 or int(key.as_subclass(Tensor).max()) < key.plan.num_own_src


def _plain_one(value: Any) -> Any:
    return value.plain if isinstance(value, (ShardedEdgeIndex, SourceRows)) else value


def _plain(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(type(a)(_plain_one(v) for v in a) if type(a) in (list, tuple) else _plain_one(a) for a in args)
