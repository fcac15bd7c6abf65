"""The identity of the messages of a walk, and the notices that are sent where rows lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.core.exchange.halo import HaloPlan
from shardpass.core.exchange.packing import Packing
from shardpass.core.exchange.windows import take_window
from shardpass.core.ranks import torch_private
from shardpass.errors import DivergenceError, InternalError

_ROUND_BITS, _WALK_BITS, _CALL_BITS = 14, 5, 12
_OF_NOBODY = 0  # in a dry run, where the other ranks are made up


@dataclass(frozen=True)
class WalkId:
    """Identity of one walk over the rounds: the call, and which of its walks (stage or depth, and direction)."""

    call: int
    walk: int
    label: str

    def tag(self, index: int) -> int:
        """The message tag of round `index`; unique among all messages that can be under way at once."""
        if index >= 1 << _ROUND_BITS:
            raise InternalError(f"round {index} does not fit a message tag; use larger blocks (Options.block_rows)")
        call, walk = self.call % (1 << _CALL_BITS), self.walk % (1 << _WALK_BITS)
        return ((call << _WALK_BITS) | walk) << _ROUND_BITS | index


class Tokens:
    """The notices of a walk: they tell that rows are there to be read, and that they have been read."""

    def __init__(self, plan: HaloPlan, walk: WalkId, packing: Packing, counts: Sequence[int]) -> None:
        """`counts`: for how many rows each rank needs shared memory in this walk; empty if rows are not shared."""
        self._plan, self._walk = plan, walk
        self._last, self._packing, self._layout = len(plan.schedule.rounds), packing, packing.layout
        self._token = torch.tensor([self._layout], dtype=torch.int32).view(torch.uint8)
        sizes = [packing.num_bytes(count) for count in counts]
        self.window = take_window(plan.comm, sizes, walk.call, walk.label)

    def shared_with(self, rank: int) -> bool:
        """Whether rows between this rank and `rank` go through shared memory."""
        return self.window is not None and rank in self.window.memory

    def wait_for_owners(self) -> None:
        """Return when every rank has written its rows into its window. Collective."""
        rows = f"rows {self._layout:x} in shared memory ({self._packing.describe()})"
        self._plan.comm.barrier(f"{rows}: {self._walk.label}")  # which differs where ranks lay rows out otherwise

    def token(self) -> Tensor:
        """The notice that is sent in place of rows: the fingerprint of their layout."""
        return self._token

    def empty(self) -> Tensor:
        """Where the notice of another rank arrives."""
        return torch.zeros(4, dtype=torch.uint8)

    def check(self, token: Tensor, source: int) -> None:
        """Raise unless `source` lays rows out as this rank reads them.

        A message of another length is refused by its receiver, but memory has no length that would tell.
        """
        layout = int(token.view(torch.int32))
        if layout not in (self._layout, _OF_NOBODY):
            rank, label = self._plan.comm.rank, self._walk.label
            raise DivergenceError(
                f"{label}: rank {rank} reads rows of other widths or dtypes than rank {source} has written. Every rank "
                f"must run the same model, with the same hooks, frozen parameters and autocast"
            )

    def expect_reader(self, reader: int) -> None:
        """Note that `reader`, which is about to be told of rows, will say that it has read them."""
        self._done(self._plan.comm.rank, reader)

    def tell_owner(self, owner: int) -> None:
        """Tell `owner` that this rank has read its rows."""
        self._done(owner, self._plan.comm.rank)

    def _done(self, owner: int, reader: int) -> None:
        plan, walk, tells = self._plan, self._walk, reader == self._plan.comm.rank
        tag = walk.tag(self._last)  # a number beyond those of the rounds: one at a time goes from a reader to an owner
        label = f"{walk.label}, rank {reader} has read"
        handle = plan.comm.exchange(
            self.token() if tells else None, owner, None if tells else self.empty(), reader, tag, label
        )
        assert self.window is not None
        self.window.readers.append(handle)

    def finish(self, read_until: int = -1) -> None:
        """End the walk on this rank.

        Args:
            read_until: see `Window`.

        The last notices stay under way until the window is taken again. But under a profiler they come first: a message
        of torch.distributed that outlives the profiler which saw it begin ends in memory that is freed by then.
        """
        if self.window is not None:
            if torch_private.is_profiled():
                self.window.wait_for_readers()
            self.window.give_back(read_until)
            self.window = None
