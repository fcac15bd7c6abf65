"""The loop of the engine: one part of a call goes over all edges once, block by block.

A *route* says what travels: rows of a block come from their owner, and gradients may go back to it. A *part* says what
is computed of the edges of a shard: sums by kernels, the message function, formulas, attention, and their adjoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from shardpass.core.aggregation.call import Call, Operands
from shardpass.core.aggregation.gradients import Gradients, Returned
from shardpass.core.exchange import HaloPlan, fetch_blocks
from shardpass.core.sharding import EdgeShards, Shard

Rows = dict[str, Tensor]
Later = Callable[[], None] | None


class Part:
    """What is computed of the edges.

    Attributes:
        reads: the rows of blocks that it reads, by name.
        returns: the rows of blocks for which it computes gradients, by name.
        takes_placed: it takes rows that lie in a larger table; see `PlacedRows`.
        writes_first: it writes the gradients of a block before it adds to them, so nothing is zeroed.
    """

    reads: list[str]
    returns: list[str] = []
    takes_placed = writes_first = False

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> Later:
        """Take the edges of a shard.

        Args:
            rows: of the block, by name.
            into: where the gradients of the block's rows are added, by name.

        Returns:
            what is left to do once these gradients are on their way.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Called once, after all shards."""


class Push(NamedTuple):
    """Rows of sources come to their destinations; in backward, their gradients go back.

    Args:
        gradients: where those of own rows are added; `None` in forward.
    """

    call: Call
    operands: Operands
    gradients: Gradients | None = None

    def blocks(self, part: Part) -> Iterator[tuple[int, Shard, Rows]]:
        """Yield ``(number, shard, {name: rows of its block})``. Collective if `part` reads any."""
        return self.call.walk(self.operands, part.reads, part.takes_placed)

    def returned(self, part: Part) -> Returned | None:
        """Where the gradients of each block go."""
        if self.gradients is None:
            return None
        call, of_sources = self.call, self.gradients.src
        alias = {name: call.canonical[name] for name in part.returns if call.canonical[name] in of_sources}
        own = {name: of_sources[name] for name in sorted(set(alias.values()))}
        return Returned(call.plan, call.edges, own, alias, call.next_walk())


class Pull(NamedTuple):
    """What destinations know comes to the owners of their sources, over out-edges; gradients of it may go back.

    Args:
        plan, edges: of the out-edges.
        published: what the own destinations know, by name.
        own: where gradients of the own part of `published` are added, by name.
    """

    call: Call
    plan: HaloPlan
    edges: EdgeShards
    published: Rows
    own: Rows

    def blocks(self, part: Part) -> Iterator[tuple[int, Shard, Rows]]:
        """See `Push.blocks`."""
        walk = self.call.next_walk()
        tensors = [self.published[name] for name in part.reads]
        for position, _, rows in fetch_blocks(self.plan, tensors, walk, placed=part.takes_placed):
            for number in self.edges.numbers(position):
                yield number, self.edges.shards[number], dict(zip(part.reads, rows))

    def returned(self, part: Part) -> Returned:
        """Where the gradients of what was published go."""
        return Returned(self.plan, self.edges, self.own, {name: name for name in self.own}, self.call.next_walk())


def execute(route: Push | Pull, part: Part) -> None:
    """Go over all edges once. Collective."""
    returned = route.returned(part)
    for number, shard, rows in route.blocks(part):
        if returned is None:
            part.add(number, shard, rows, {})
            continue
        with returned.shard(number, zeroed=not part.writes_first) as into:
            later = part.add(number, shard, rows, into)
        if later is not None:
            later()
    if returned is not None:
        returned.finish()
    part.finish()
