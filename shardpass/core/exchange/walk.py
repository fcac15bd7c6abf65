"""A walk over the rounds of a schedule: rows are fetched forward, gradients return backward. Buffers, no mathematics.

[Note: rows through shared memory] Between ranks of one host the message of a round is a notice of four bytes that says
what a row is, and the rows lie in the sender's window (see `windows.py`). In forward, a rank publishes all rows that
others need before its first round. Each reader gathers its own rows out of the owner's window, or computes on them
where they lie. In backward, gradients are written where the owner reads them. A reader that is done says so with a
second notice, and the window may be written again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardpass.backends.communicator import Handle
from shardpass.core.exchange.halo import HaloPlan
from shardpass.core.exchange.packing import Packing, message_buffer
from shardpass.core.exchange.schedule import Transfer
from shardpass.core.exchange.tokens import Tokens, WalkId
from shardpass.core.ranks import torch_private
from shardpass.core.sharding import Block, PlacedRows


class _Slots:
    """A ring of byte buffers, each as large as its largest message. With `fresh` every message has a new one."""

    def __init__(self, count: int, device: torch.device, fresh: bool = False) -> None:
        self._buffers: list[Tensor | None] = [None] * count
        self._device, self._fresh = device, fresh

    def get(self, index: int, num_bytes: int) -> Tensor:
        if self._fresh:
            return message_buffer(num_bytes, self._device)
        slot = index % len(self._buffers)
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[slot] = message_buffer(num_bytes, self._device)
        return buffer[:num_bytes]


def fetch_blocks(
    plan: HaloPlan, tensors: Sequence[Tensor], walk: WalkId, *, keep: bool = False, placed: bool = False
) -> Iterator[tuple[int, Block, list[Any]]]:
    """Yield ``(position, block, rows)`` for the own block and then each round. Collective.

    Every rank must pass the same number of tensors with the same trailing shapes and dtypes.

    Args:
        tensors: ``[num_own_src, ...]`` each; detached, on the plan's device.
        keep: the rows stay valid. Otherwise they are valid until the next step, which uses their buffer again.
        placed: rows in shared memory may come as `PlacedRows`.

    Yields:
        position: of the block in ``plan.blocks``.
        rows: the block's rows of each tensor, ``[block.num_rows, ...]``; with `placed`, some are `PlacedRows`.
    """
    if not plan.schedule.rounds:
        with torch_private.span(f"compute own block ({walk.label})"):
            yield 0, plan.blocks[0], list(tensors)
        return
    ahead = len(plan.schedule.rounds) if plan.options.mode == "halo" else plan.options.prefetch
    under_way = max(1, ahead)
    waiting: deque[Handle] = deque()
    moves = plan.schedule.transfers(plan.comm.rank) if tensors else []
    fetch = _Fetch(plan, tensors, walk, ahead, keep, placed)

    def post(first: int, stop: int) -> None:
        for move in moves[first + len(waiting) : stop]:
            with torch_private.span(f"send in round {move.round} ({walk.label})"):
                waiting.append(fetch.start(move))

    post(0, under_way)  # the first transfers hide behind the own block
    with torch_private.span(f"compute own block ({walk.label})"):
        yield 0, plan.blocks[0], list(tensors)
    if fetch.tokens.window is not None:
        with torch_private.span(f"wait for rows in shared memory ({walk.label})"):
            fetch.tokens.wait_for_owners()
    for index in range(len(plan.schedule.rounds)):
        rows: list[Any] = []
        if moves:
            post(index, index + 1)
            with torch_private.span(f"wait for block {index + 1} ({walk.label})"):
                waiting.popleft().wait()  # its message has gone too, so the next may use its buffer
            rows = fetch.rows(moves[index])
            post(index + 1, index + 1 + ahead)
        with torch_private.span(f"compute block {index + 1} ({walk.label})"):
            yield index + 1, plan.blocks[index + 1], rows
    fetch.finish()


class _Fetch:
    """One walk of `fetch_blocks`: where rows are put and found."""

    def __init__(
        self, plan: HaloPlan, tensors: Sequence[Tensor], walk: WalkId, ahead: int, keep: bool, placed: bool
    ) -> None:
        self._plan, self._tensors, self._walk = plan, tensors, walk
        self._packing = packing = Packing(tensors, plan.options.wire_dtype)
        fresh, device = plan.options.mode == "halo", plan.comm.device
        self._received = _Slots(ahead + 1, device, fresh=keep or fresh)
        self._gathered = _Slots(1, device, fresh=keep or fresh)
        self._outgoing = _Slots(max(1, ahead), device, fresh=fresh)
        self._arrived: dict[int, Tensor | None] = {}  # None where rows are read in shared memory
        self._in_place = not (keep or fresh)
        self._placed = placed and self._in_place and not packing.converts
        self.tokens = Tokens(plan, walk, packing, plan.shared.published if plan.shared is not None else ())
        self._publish()

    def _publish(self) -> None:
        plan, window = self._plan, self.tokens.window
        if window is None or plan.shared is None:
            return
        rows, rank = plan.shared.rows, plan.comm.rank
        are_all = rows.numel() == plan.num_own_src
        self._packing.write(self._tensors, window.memory[rank], None if are_all else rows)

    def start(self, move: Transfer) -> Handle:
        """Start one round."""
        plan, packing, tokens = self._plan, self._packing, self.tokens
        num_recv, num_send = move.recv_stop - move.recv_start, move.send_stop - move.send_start
        buffer = sending = None
        if not tokens.shared_with(move.source):
            buffer = self._received.get(move.round, packing.num_bytes(num_recv))
        self._arrived[move.round] = buffer
        if not tokens.shared_with(move.to):
            sending = self._outgoing.get(move.round, packing.num_bytes(num_send))
            wanted = plan.send_rows[move.to][move.send_start : move.send_stop]
            packing.write(self._tensors, sending, wanted)
        return plan.comm.exchange(
            sending if num_send else None,
            move.to,
            buffer if num_recv else None,
            move.source,
            self._walk.tag(move.round),
            f"{self._walk.label}, round {move.round}",
        )

    def rows(self, move: Transfer) -> list[Any]:
        """The rows of a round that has arrived, in the dtypes in which they are computed."""
        packing, count, arrived = self._packing, move.recv_stop - move.recv_start, self._arrived.pop(move.round)
        if arrived is not None:
            return packing.read(arrived, count)
        if not count:
            return packing.read(self._gathered.get(0, 0), 0)
        shared, window, source = self._plan.shared, self.tokens.window, move.source
        assert shared is not None and window is not None
        if self._in_place and count == shared.published[source]:  # all rows of the window, in their order
            return packing.read(window.memory[source], count)
        places = shared.places[source][move.recv_start : move.recv_stop]
        published = packing.views(window.memory[source], shared.published[source])
        if self._placed:
            return [PlacedRows(table, places) for table in published]
        views = packing.views(self._gathered.get(0, packing.num_bytes(count)), count)
        for table, view in zip(published, views):
            torch.index_select(table, 0, places, out=view)
        return packing.to_computed(views)

    def finish(self) -> None:
        """End the walk on this rank."""
        self.tokens.finish(self._plan.comm.collectives)


class GradientReturn:
    """Carries the gradients of fetched rows back to their owners along the schedule with the peers swapped.

    At most one round is under way. Before the next is sent, the one before it has arrived and is added, so memory is
    bounded however slow the network is. Rows are added in the order of the rounds, which gives the same bits each run.
    """

    def __init__(self, plan: HaloPlan, into: Sequence[Tensor], walk: WalkId) -> None:
        """`into`: the gradients of the own rows, ``[num_own_src, ...]`` each, to which is added in place."""
        self._plan, self._into, self._walk = plan, list(into), walk
        self._pending: tuple[Transfer, Tensor, Handle] | None = None
        if not plan.schedule.rounds:
            return
        self._packing, self._filled = Packing(into, plan.options.wire_dtype), Packing(into)
        self._outgoing, self._incoming = _Slots(2, plan.comm.device), _Slots(1, plan.comm.device)
        self._filling = _Slots(1, plan.comm.device)
        counts = plan.shared.returned if plan.shared is not None else ()
        self._tokens = Tokens(plan, walk, self._packing, counts)

    def buffers(self, position: int, zeroed: bool = True) -> list[Tensor]:
        """Gradients ``[block.num_rows, ...]`` to fill for the block at `position`; `send` takes them away."""
        block = self._plan.blocks[position]
        if self._packing.converts:
            filling = self._filling.get(position, self._filled.num_bytes(block.num_rows))
        else:
            filling = self._leaving(position)
        return self._filled.views(filling.zero_() if zeroed else filling, block.num_rows)

    def _leaving(self, position: int) -> Tensor:
        """The memory from which the gradients of the block at `position` leave: the own window, or a message."""
        block, window = self._plan.blocks[position], self._tokens.window
        num_bytes = self._packing.num_bytes(block.num_rows)
        if window is None or not self._tokens.shared_with(block.owner):
            return self._outgoing.get(position, num_bytes)
        self._settle()
        return window.memory[self._plan.comm.rank][:num_bytes]

    def send(self, position: int) -> None:
        """Finish the return before this one, and start that of what `buffers` gave for `position`."""
        if not self._into:
            return
        self._settle()
        tokens = self._tokens
        move = self._plan.schedule.transfer(self._plan.comm.rank, position - 1)
        num_send, num_recv = move.recv_stop - move.recv_start, move.send_stop - move.send_start
        sending = self._leaving(position)
        if self._packing.converts:
            filled = self._filled.views(self._filling.get(position, self._filled.num_bytes(num_send)), num_send)
            self._packing.write(filled, sending)
        if tokens.shared_with(move.source):
            sending = tokens.token()
            if num_send:
                tokens.expect_reader(move.source)
        if tokens.shared_with(move.to):
            buffer = tokens.empty()
        else:
            buffer = self._incoming.get(0, self._packing.num_bytes(num_recv))
        handle = self._plan.comm.exchange(
            sending if num_send else None,
            move.source,
            buffer if num_recv else None,
            move.to,
            self._walk.tag(move.round),
            f"{self._walk.label}, round {move.round}",
        )
        self._pending = (move, buffer, handle)

    def _settle(self) -> None:
        """Return when the window may be written again. What others wait for, the own reading, comes first."""
        self._complete()
        if self._tokens.window is not None:
            self._tokens.window.wait_for_readers()

    def _complete(self) -> None:
        """Wait for the return under way and add what came."""
        if self._pending is None:
            return
        move, buffer, handle = self._pending
        self._pending = None
        with torch_private.span(f"wait for gradients of round {move.round} ({self._walk.label})"):
            handle.wait()
        count = move.send_stop - move.send_start
        if not count:
            return
        window, shared = self._tokens.window, self._tokens.shared_with(move.to)
        arrived = buffer
        if window is not None and shared:
            self._tokens.check(buffer, move.to)
            arrived = window.memory[move.to]
        rows = self._plan.send_rows[move.to][move.send_start : move.send_stop]
        for gradient, part in zip(self._into, self._packing.read(arrived, count)):
            gradient.index_add_(0, rows, part)
        if shared:
            self._tokens.tell_owner(move.to)

    def finish(self) -> None:
        """Wait for the last return and add what came."""
        if self._plan.schedule.rounds:
            self._complete()
            self._tokens.finish()
