"""Edge lists that a layer derives from a graph's own in forward (self-loops added, edges masked), and their shards.

Deriving a list is cheap, sharding it is not, and layers derive the same list in every forward. So its shards are kept,
for all layers, and found again. This does not communicate, because a derived list uses the same halo. A list that was
made by dropping and adding edges is kept as these edits; its numbers are made only if something reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardpass.core.ranks import ordinary_tensors
from shardpass.core.sharding.edit_shards import edit_shards, rows_left
from shardpass.core.sharding.shard import Block, EdgeShards, LazyTensor, build_shards, smallest_index_dtype

_MOST_LISTS, _MOST_EDGES = 32, 4  # lists; and edges together, as a multiple of those of the longest list
_COMPARED_EDGES = 1 << 16
_SHORT = 1 << 18  # edges
_LONG = 1 << 21  # edges; self-loops in a shard of their own save 8 bytes of each, and cost 5 % of the time of a call


@dataclass(frozen=True, eq=False)
class Derivation:
    """An edge list as what was done to another one.

    Args:
        base: the other one: its shards, or its numbers ``[2, E]``, which are never written to.
        dropped: places in the base of the edges that did not stay, ascending. None means that all stayed.
        added: edges appended in order, ``[2, k]`` each.
        num_edges: of the result.
        short: the owner of the numbers of shards with few edges, which are kept once they are made.
    """

    base: Tensor | EdgeShards
    dropped: Tensor | None
    added: tuple[Tensor, ...]
    num_edges: int
    short: LazyTensor | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(base: Tensor | EdgeShards) -> Derivation:
        """`base` itself."""
        if isinstance(base, Tensor):
            return Derivation(base, None, (), base.size(1))
        short = LazyTensor(lambda: torch.stack([base.row(0), base.row(1)])) if base.num_edges <= _SHORT else None
        return Derivation(base, None, (), base.num_edges, short)

    @property
    def is_edited(self) -> bool:
        """Whether it may be another list than the base."""
        return self.dropped is not None or bool(self.added)

    @property
    def device(self) -> torch.device:
        """Where its numbers are made."""
        return self.base.shards[0].indptr.device if isinstance(self.base, EdgeShards) else self.base.device

    def masked(self, kept: Tensor) -> Derivation:
        """This list with only the edges of the base for which `kept` is true."""
        with ordinary_tensors():
            dropped = (~kept.as_subclass(Tensor)).nonzero().view(-1)  # self-loops are few, a mask has a byte per edge
            num_edges = kept.numel() - dropped.numel()
            dropped = dropped.to(smallest_index_dtype(kept.numel()))
        return replace(self, dropped=dropped if dropped.numel() else None, num_edges=num_edges)

    def extended(self, edges: Sequence[Tensor]) -> Derivation:
        """This list with `edges` appended."""
        largest = max((int(e.max()) for e in edges if e.numel()), default=0)
        with ordinary_tensors():
            small = [e.to(smallest_index_dtype(largest), copy=True) for e in edges]
            added = (*self.added, *(e[:1].clone().expand(2, -1) if torch.equal(e[0], e[1]) else e for e in small))
        return replace(self, added=added, num_edges=self.num_edges + sum(e.size(1) for e in edges))

    def row(self, index: int) -> Tensor:
        """Row 0 or 1 of the list, ``[num_edges]``."""
        base = self.base if self.short is None else self.short.read()
        first = base[index] if isinstance(base, Tensor) else base.row(index)
        first = first if self.dropped is None else rows_left(first, self.dropped)
        return torch.cat([first, *(edges[index] for edges in self.added)]) if self.added else first

    def has_edge_at(self, row: int) -> bool:
        """Whether an edge of the list begins or ends at an own row."""
        if self.is_edited or isinstance(self.base, Tensor):
            return any(bool((self.row(end) == row).any()) for end in (1, 0))
        own = [self.base.shards[number] for number in self.base.numbers(0)]
        return any(int(shard.indptr[row + 1] - shard.indptr[row]) for shard in self.base.shards) or any(
            bool((shard.src_rows == row).any()) for shard in own
        )

    def whole(self) -> Tensor:
        """The list, ``[2, num_edges]``."""
        return torch.stack([self.row(0), self.row(1)])

    def same(self, other: Derivation) -> bool:
        """Whether `other` is known to be the same list: the same base (not an equal one), the same edits."""
        return (
            self.num_edges == other.num_edges
            and _same_numbers(self.base, other.base)
            and (self.dropped is None) == (other.dropped is None)
            and (self.dropped is None or other.dropped is None or torch.equal(self.dropped, other.dropped))
            and len(self.added) == len(other.added)
            and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(self.added, other.added))
        )


Value = TypeVar("Value")


class KnownLists(Generic[Value]):
    """A value for each of the last few edge lists of one graph. The least recently used are dropped."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor | Derivation, Value]] = []
        self._equal: WeakKeyDictionary[Derivation, Tensor | Derivation] = WeakKeyDictionary()  # to a known one
        self.count = 0  # of all that were ever kept

    def find(self, edges: Tensor | Derivation) -> Value | None:
        """The value for a list equal to `edges` ``[2, num_edges]``, or None."""
        same = self._equal.get(edges, edges) if isinstance(edges, Derivation) else edges
        found = next((place for place, (known, _) in enumerate(self._known) if known is same), None)
        for position, (known, value) in enumerate(self._known):
            if position == found or (found is None and _same(known, edges)):
                self._known.append(self._known.pop(position))
                if isinstance(edges, Derivation) and edges is not known:
                    self._equal[edges] = known  # which the next time is found without comparing
                return value
        return None

    def keep(self, edges: Tensor | Derivation, value: Value) -> Value:
        """`value`, which is kept for `edges`."""
        if isinstance(edges, Tensor):
            largest = int(edges.max()) if edges.numel() else 0
            edges = edges.to(smallest_index_dtype(largest), copy=True)
        self._known.append((edges, value))
        sizes = [_num_edges(known) for known, _ in self._known]
        while len(sizes) > _MOST_LISTS or sum(sizes) > _MOST_EDGES * max(sizes):
            del self._known[0], sizes[0]
        self.count += 1
        return value


class DerivedShards:
    """The shards of the last few derived edge lists of one graph."""

    def __init__(self) -> None:
        self._known: KnownLists[EdgeShards] = KnownLists()

    def find(self, edges: Tensor | Derivation, blocks: Sequence[Block], num_dst: int) -> EdgeShards:
        """The shards of `edges` ``[2, num_edges]``, in own-first source rows and own destination rows."""
        known = self._known.find(edges)
        if known is not None:
            return known
        return self._known.keep(edges, _shards_of(edges, blocks, num_dst))


def _shards_of(edges: Tensor | Derivation, blocks: Sequence[Block], num_dst: int) -> EdgeShards:
    if isinstance(edges, Tensor):
        return build_shards(edges[0], edges[1], blocks, num_dst)
    are_own = all(added.size(1) == 0 or int(added[0].max()) < blocks[0].stop for added in edges.added)
    if not isinstance(edges.base, EdgeShards) or not are_own:
        return build_shards(edges.row(0), edges.row(1), blocks, num_dst)
    if edges.num_edges >= _LONG or not edges.added:
        found = edit_shards(edges.base, edges.dropped, edges.added)
    else:
        found = build_shards(edges.row(0), edges.row(1), blocks, num_dst)
    keeps_others = _num_from_others(found) == _num_from_others(edges.base)
    return replace(found, is_stored=edges.base.is_stored and keeps_others)


def _num_from_others(edges: EdgeShards) -> int:
    return sum(shard.num_edges for shard in edges.shards[edges.num_own :])


def _same_numbers(base: Tensor | EdgeShards, other: Tensor | EdgeShards) -> bool:
    """Whether two bases are one, and not only equal."""
    if isinstance(base, EdgeShards) or isinstance(other, EdgeShards):
        return base is other
    return base.data_ptr() == other.data_ptr() and base.shape == other.shape and base.stride() == other.stride()


def _num_edges(edges: Tensor | Derivation) -> int:
    return edges.num_edges if isinstance(edges, Derivation) else edges.size(1)


def _same(known: Tensor | Derivation, edges: Tensor | Derivation) -> bool:
    if isinstance(known, Derivation) or isinstance(edges, Derivation):
        return isinstance(known, Derivation) and isinstance(edges, Derivation) and known.same(edges)
    if known.shape != edges.shape or known.device != edges.device:
        return False
    chunks = zip(known.split(_COMPARED_EDGES, dim=1), edges.split(_COMPARED_EDGES, dim=1))
    return all(torch.equal(a.to(b.dtype), b) for a, b in chunks)
