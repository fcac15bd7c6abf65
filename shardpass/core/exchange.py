"""Carries a schedule out: buffers, prefetch, gradient return. Buffers, no mathematics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from shardpass.backends.communicator import Handle
from shardpass.core.halo import HaloPlan
from shardpass.core.schedule import Transfer
from shardpass.core.shard import Block
from shardpass.errors import InternalError

_ROUND_BITS, _STREAM_BITS, _CALL_BITS = 14, 5, 12


@dataclass(frozen=True)
class Stream:
    """Identity of one walk over the rounds: which call, and which of the call's walks (pass and direction)."""

    call: int
    walk: int
    label: str

    def tag(self, index: int) -> int:
        """The message tag of round `index`; unique among all messages that can be under way at once."""
        if index >= 1 << _ROUND_BITS:
            raise InternalError(f"round {index} does not fit a message tag; use larger blocks (Options.block_rows)")
        call, walk = self.call % (1 << _CALL_BITS), self.walk % (1 << _STREAM_BITS)
        return ((call << _STREAM_BITS) | walk) << _ROUND_BITS | index


class Packing:
    """Rows of several tensors as one message: each tensor's rows contiguous, one after the other.

    Args:
        tensors: of whose rows messages are made.
        wire: the dtype in which rows of float32 travel; None: their own.
    """

    def __init__(self, tensors: Sequence[Tensor], wire: torch.dtype | None = None) -> None:
        self.tails = [tuple(t.shape[1:]) for t in tensors]
        self.computed = [t.dtype for t in tensors]
        self.dtypes = [wire if wire is not None and dtype == torch.float32 else dtype for dtype in self.computed]
        self.row_bytes = [_numel(tail) * dtype.itemsize for tail, dtype in zip(self.tails, self.dtypes)]

    @property
    def converts(self) -> bool:
        """Whether rows travel in another dtype than they are computed in."""
        return self.dtypes != self.computed

    def to_computed(self, rows: list[Tensor]) -> list[Tensor]:
        """`rows` as they travel in the dtypes in which they are computed; the same tensors where those agree."""
        return [part.to(dtype) for part, dtype in zip(rows, self.computed)]

    def _spans(self, num_rows: int) -> list[tuple[int, int]]:
        spans, position = [], 0
        for dtype, width in zip(self.dtypes, self.row_bytes):
            position = -(-position // dtype.itemsize) * dtype.itemsize
            spans.append((position, position + width * num_rows))
            position += width * num_rows
        return spans

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of a message of `num_rows` rows."""
        return self._spans(num_rows)[-1][1] if self.dtypes else 0

    def views(self, buffer: Tensor, num_rows: int) -> list[Tensor]:
        """The tensors inside `buffer` (uint8, at least `num_bytes` long), ``[num_rows, ...]`` each."""
        return [
            buffer[start:stop].view(dtype).view(num_rows, *tail)
            for (start, stop), dtype, tail in zip(self._spans(num_rows), self.dtypes, self.tails)
        ]


def _numel(tail: tuple[int, ...]) -> int:
    count = 1
    for length in tail:
        count *= length
    return count


class _Slots:
    """A ring of byte buffers, each grown to the largest message it held; `fresh` hands out a new one every time."""

    def __init__(self, count: int, device: torch.device, fresh: bool = False) -> None:
        self._buffers: list[Tensor | None] = [None] * count
        self._device, self._fresh = device, fresh

    def get(self, index: int, num_bytes: int) -> Tensor:
        if self._fresh:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        slot = index % len(self._buffers)
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return buffer[:num_bytes]


def fetch_blocks(
    plan: HaloPlan, tensors: Sequence[Tensor], stream: Stream, *, keep: bool = False
) -> Iterator[tuple[int, Block, list[Tensor]]]:
    """Yield ``(position, block, rows)`` for the own block and then each round. Collective.

    Every rank must pass the same number of tensors with the same trailing shapes and dtypes.

    Args:
        tensors: ``[num_own_src, ...]`` each; detached, on the plan's device.
        keep: the rows stay valid for ever. Otherwise only until the next step: the buffer is used again.

    Yields:
        position: of the block in ``plan.blocks``.
        rows: the block's rows of each tensor, ``[block.num_rows, ...]``.
    """
    ahead = len(plan.schedule.rounds) if plan.options.mode == "halo" else plan.options.prefetch
    packing = Packing(tensors, plan.options.wire_dtype)
    device = plan.comm.device
    under_way = max(1, ahead)
    receive = _Slots(ahead + 1, device, fresh=keep or plan.options.mode == "halo")
    outgoing = _Slots(under_way, device, fresh=plan.options.mode == "halo")
    waiting: deque[tuple[int, Tensor, Handle]] = deque()
    moves = plan.schedule.transfers(plan.comm.rank) if tensors else []

    def post(first: int, stop: int) -> None:
        for move in moves[first + len(waiting) : stop]:
            with record_function(f"send in round {move.round} ({stream.label})"):
                waiting.append(_post(plan, tensors, packing, move, receive, outgoing, stream))

    post(0, under_way)  # the first transfers hide behind the own block
    with record_function(f"compute own block ({stream.label})"):
        yield 0, plan.blocks[0], list(tensors)
    for index in range(len(plan.schedule.rounds)):
        rows: list[Tensor] = []
        if moves:
            post(index, index + 1)
            count, buffer, handle = waiting.popleft()
            with record_function(f"wait for block {index + 1} ({stream.label})"):
                handle.wait()  # its message has gone too, so the next may use its buffer
            rows = packing.to_computed(packing.views(buffer, count))
            post(index + 1, index + 1 + ahead)
        with record_function(f"compute block {index + 1} ({stream.label})"):
            yield index + 1, plan.blocks[index + 1], rows


def _post(
    plan: HaloPlan,
    tensors: Sequence[Tensor],
    packing: Packing,
    move: Transfer,
    receive: _Slots,
    outgoing: _Slots,
    stream: Stream,
) -> tuple[int, Tensor, Handle]:
    num_recv, num_send = move.recv_stop - move.recv_start, move.send_stop - move.send_start
    buffer = receive.get(move.round, packing.num_bytes(num_recv))
    sending = outgoing.get(move.round, packing.num_bytes(num_send))
    wanted = plan.send_rows[move.to][move.send_start : move.send_stop]
    for tensor, view in zip(tensors, packing.views(sending, num_send)):
        if view.dtype == tensor.dtype:
            torch.index_select(tensor, 0, wanted, out=view)
        else:
            view.copy_(tensor.index_select(0, wanted))
    handle = plan.comm.exchange(
        sending if num_send else None,
        move.to,
        buffer if num_recv else None,
        move.source,
        stream.tag(move.round),
        f"{stream.label}, round {move.round}",
    )
    return num_recv, buffer, handle


class GradientReturn:
    """Carries the gradients of fetched rows back to their owners along the schedule with the peers swapped.

    At most one round is under way: before the next is sent, the one before it has arrived and been added, so memory
    is bounded however slow the network is. Rows are added in the order of the rounds: the same bits in every run.
    """

    def __init__(self, plan: HaloPlan, into: Sequence[Tensor], stream: Stream) -> None:
        """`into`: the gradients of the own rows, ``[num_own_src, ...]`` each, added to in place."""
        self._plan, self._into, self._stream = plan, list(into), stream
        self._packing, self._filled = Packing(into, plan.options.wire_dtype), Packing(into)
        self._outgoing, self._incoming = _Slots(2, plan.comm.device), _Slots(1, plan.comm.device)
        self._filling = _Slots(1, plan.comm.device) if self._packing.converts else self._outgoing
        self._pending: tuple[Transfer, Tensor, Handle] | None = None

    def buffers(self, position: int, zeroed: bool = True) -> list[Tensor]:
        """Gradients ``[block.num_rows, ...]`` to fill for the block at `position`; `send` takes them away."""
        block = self._plan.blocks[position]
        filling = self._filling.get(position, self._filled.num_bytes(block.num_rows))
        return self._filled.views(filling.zero_() if zeroed else filling, block.num_rows)

    def send(self, position: int) -> None:
        """Start the return of what `buffers` of this position holds; finish the return before it."""
        if not self._into:
            return
        self.finish()
        move = self._plan.schedule.transfer(self._plan.comm.rank, position - 1)
        num_send, num_recv = move.recv_stop - move.recv_start, move.send_stop - move.send_start
        sending = self._outgoing.get(position, self._packing.num_bytes(num_send))
        if self._packing.converts:
            filled = self._filled.views(self._filling.get(position, self._filled.num_bytes(num_send)), num_send)
            for view, rows in zip(self._packing.views(sending, num_send), filled):
                view.copy_(rows)
        buffer = self._incoming.get(0, self._packing.num_bytes(num_recv))
        handle = self._plan.comm.exchange(
            sending if num_send else None,
            move.source,
            buffer if num_recv else None,
            move.to,
            self._stream.tag(move.round),
            f"{self._stream.label}, round {move.round}",
        )
        self._pending = (move, buffer, handle)

    def finish(self) -> None:
        """Wait for the return under way and add what came."""
        if self._pending is None:
            return
        move, buffer, handle = self._pending
        self._pending = None
        with record_function(f"wait for gradients of round {move.round} ({self._stream.label})"):
            handle.wait()
        count = move.send_stop - move.send_start
        rows = self._plan.send_rows[move.to][move.send_start : move.send_stop]
        for gradient, part in zip(self._into, self._packing.to_computed(self._packing.views(buffer, count))):
            gradient.index_add_(0, rows, part)
