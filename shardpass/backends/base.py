"""What every backend shares: identity, checks, splitting, staging, and the words of errors.

A backend supplies a few raw primitives (the methods of `RawCommunicator` that raise NotImplementedError). They move
bytes and know nothing of calls.

[Note: identity of messages] Every point-to-point message consists of a header of fixed size and a payload, which are
under way at the same time. A payload is matched by lane, tag, dtype and number of bytes, so it can only land in a
buffer made for it. If the sizes differ, the payload stays where it is, and the header arrives and tells both sides.
Every collective starts with an all-gather of headers, so that every rank sees the call of every other rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardpass.backends.call_log import LoggedCall
from shardpass.backends.communicator import Handle, ReduceOp
from shardpass.backends.deadlock import COLLECTIVE, Position, message_name
from shardpass.backends.identity import (
    COLLECTIVE_LANE,
    DTYPES,
    HEADER_BYTES,
    HEADER_LANE,
    INLINE_BYTES,
    ON_DEVICE,
    OPS,
    PAYLOAD_LANE,
    ROOM_BYTES,
    Header,
    MessageKey,
    combined,
    divergence,
    header_of,
    mismatch,
)
from shardpass.backends.primitives import ExchangeHandle, Pending, RawCommunicator, Step
from shardpass.backends.shared_memory import share
from shardpass.errors import DivergenceError

_HALF = (torch.float16, torch.bfloat16)
_OTHER = {"send": "recv", "recv": "send"}
B = TypeVar("B", bound="BaseCommunicator")


class BaseCommunicator(RawCommunicator):
    """A communicator over raw primitives. A backend derives from it; see `Communicator` for the public methods."""

    # ---- point to point -------------------------------------------------------------------------------------------

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        self._check_open()
        send = self._checked(send, to, "send", tag, label)
        recv = self._checked(recv, source, "recv", tag, label)
        if (send is not None and to == self.rank) or (recv is not None and source == self.rank):
            return self._copy_to_self(send, to, recv, source, tag, label)
        steps = []
        if recv is not None:
            order = self._order("recv", source, recv)
            steps.append(self._start_receive(recv, source, header_of("exchange", tag, recv, root=order, label=label)))
        if send is not None:
            order = self._order("send", to, send)
            steps.append(self._start_send(send, to, header_of("exchange", tag, send, root=order, label=label)))
        if self.is_direct:
            steps += self._start_moving(send, to, recv, source, steps)
        return ExchangeHandle(self, steps)

    def _order(self, side: str, peer: int, tensor: Tensor) -> int:
        """The place of a message among those that are matched by their order, from 1; 0 if it is not one of them."""
        if not self.is_direct or tensor.nbytes <= INLINE_BYTES:
            return 0
        self._moved[side, peer] += 1
        return self._moved[side, peer] + self._moved["collective", self.rank]

    def _start_moving(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, steps: Sequence[Step]
    ) -> list[Step]:
        """Start the payloads between devices. Their headers come first in `steps`, and are waited for first."""
        sends = [(_bytes(send), to)] if send is not None and send.nbytes > INLINE_BYTES else []
        receives = [(_bytes(recv), source)] if recv is not None and recv.nbytes > INLINE_BYTES else []
        if not sends and not receives:
            return []
        position, _ = steps[-1]  # of what is sent: the header of what is received has come before it is waited for
        ends = [("send", to)] * len(sends) + [("recv", source)] * len(receives)
        group = [
            replace(position, peer=peer, awaits=f"moved {_OTHER[side]} {self.rank}", count=self._moved[side, peer])
            for side, peer in ends
        ]
        self._moving.append(group)
        position = replace(position, is_queued=True)
        with self.waiting(position):
            moving = self._raw_move(sends, receives)

        def complete(seconds: float) -> None:
            for transfer in moving:
                transfer.wait(seconds)
            self._moving.remove(group)
            self._have_moved.update(f"moved {side} {peer}" for side, peer in ends)

        return [(position, complete)]

    def _checked(self, tensor: Tensor | None, peer: int, side: str, tag: int, label: str) -> Tensor | None:
        if tensor is None or tensor.numel() == 0:
            return None
        if not 0 <= peer < self.size:
            raise ValueError(f"exchange {label!r}: the {side} peer is {peer}, but ranks are in [0, {self.size})")
        if not 0 <= tag < 2**31:
            raise ValueError(f"exchange {label!r}: the tag is {tag}, but tags are in [0, 2**31)")
        if not tensor.is_contiguous():
            raise ValueError(f"exchange {label!r}: the {side} tensor is not contiguous; pass tensor.contiguous()")
        if tensor.device != self.device:
            raise ValueError(f"exchange {label!r}: the {side} tensor is on {tensor.device}, not on {self.device}")
        return tensor.detach()

    def _copy_to_self(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str
    ) -> Handle:
        if send is None or recv is None or to != source:
            raise ValueError(
                f"exchange {label!r} (tag {tag}) on rank {self.rank}: a message to itself needs both sides in one "
                f"call, but send={'None' if send is None else f'to {to}'}, "
                f"recv={'None' if recv is None else f'from {source}'}"
            )
        if send.dtype != recv.dtype or send.numel() != recv.numel():
            raise DivergenceError(
                f"exchange {label!r} (tag {tag}) of rank {self.rank} with itself: {send.dtype} {list(send.shape)} is "
                f"sent, but {recv.dtype} {list(recv.shape)} is expected"
            )
        recv.copy_(send.view(recv.shape))
        return ExchangeHandle(self)

    def _posted(self, side: str, peer: int, header: Header, tensor: Tensor) -> tuple[LoggedCall, Position]:
        """A message in the log of calls, and where this rank is while it waits for it."""
        count = self._postings.add(side, peer, header.number)
        call = self.calls.begin(self.path, side, header, peer, count, tensor.nbytes)
        return call, Position(call, message_name(_OTHER[side], self.rank, header.number), count, peer)

    def _start_receive(self, recv: Tensor, source: int, header: Header) -> Step:
        raw = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        landing, is_inline = self._staged(recv), recv.nbytes <= INLINE_BYTES
        is_apart = is_inline or self.is_direct
        call, position = self._posted("recv", source, header, recv)
        with self.waiting(position):
            arriving = self._raw_receive(raw, source, MessageKey(HEADER_LANE, header.number, HEADER_BYTES))
            pieces = [] if is_apart else self._receive_pieces(landing, source, header, PAYLOAD_LANE)

        def complete(seconds: float) -> None:
            call.wait()
            arriving.wait(seconds)
            problem = mismatch(header, raw.numpy().tobytes(), self.rank, source)
            if problem is not None:
                self.diverge(problem)
            if is_inline:
                _bytes(landing).copy_(raw[-INLINE_BYTES:][: recv.nbytes])
            for piece in pieces:
                piece.wait(seconds)
            _copy_into(recv, landing)
            call.end()

        return position, complete

    def _start_send(self, send: Tensor, to: int, header: Header) -> Step:
        is_inline = send.nbytes <= INLINE_BYTES
        payload = _bytes(send).cpu().numpy().tobytes() if is_inline else b""
        raw = torch.frombuffer(bytearray(header.pack(payload)), dtype=torch.uint8)
        call, position = self._posted("send", to, header, send)
        with self.waiting(position):
            pieces = [self._raw_send(raw, to, MessageKey(HEADER_LANE, header.number, HEADER_BYTES))]
            if not (is_inline or self.is_direct):
                pieces += self._send_pieces(self._staged(send), to, header, PAYLOAD_LANE)
        self.bytes_sent += send.nbytes

        def complete(seconds: float) -> None:
            call.wait()
            for piece in pieces:
                piece.wait(seconds)
            call.end()

        return position, complete

    def _staged(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy on the CPU if raw primitives cannot take it where it is."""
        return tensor if self.moves_device_memory or self.is_direct else tensor.cpu()

    def _send_pieces(self, tensor: Tensor, to: int, header: Header, lane: int) -> list[Pending]:
        return [self._raw_send(flat, to, key) for flat, key in self._pieces(tensor, header, lane)]

    def _receive_pieces(self, tensor: Tensor, source: int, header: Header, lane: int) -> list[Pending]:
        return [self._raw_receive(flat, source, key) for flat, key in self._pieces(tensor, header, lane)]

    def _pieces(self, tensor: Tensor, header: Header, lane: int) -> list[tuple[Tensor, MessageKey]]:
        flat = _bytes(tensor)
        key = MessageKey(lane, header.number, flat.numel(), DTYPES.index(header.dtype))
        if flat.numel() <= self.max_message_bytes:
            return [(flat, key)]
        return [(piece, key._replace(piece=i)) for i, piece in enumerate(flat.split(self.max_message_bytes))]

    # ---- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        """See `Communicator.all_reduce`. For bool, ``sum`` and ``max`` are or, ``prod`` and ``min`` are and."""
        if op not in OPS[1:]:
            raise ValueError(f"all_reduce {label!r}: the operation is {op!r}, but known are {', '.join(OPS[1:])}")
        tensor = self._collective_input(tensor, "all_reduce", label)
        wire, raw_op = self._staged(tensor), str(op)
        if tensor.dtype == torch.bool:
            wire, raw_op = wire.to(torch.uint8), {"sum": "max", "prod": "min"}.get(op, op)
        elif tensor.dtype in _HALF:
            wire = wire.to(torch.float32)
        with self._agreed("all_reduce", tensor, op=op, label=label, gives=wire) as (headers, rooms):
            if tensor.numel() == 0:
                return tensor.clone()
            if wire.nbytes <= len(rooms[self.rank]):
                every = self._gathered(wire, [header.shape for header in headers], rooms, headers[self.rank])
                wire = combined(every, raw_op)
            else:
                wire = wire.clone() if wire.data_ptr() == tensor.data_ptr() else wire
                for piece in wire.view(-1).split(max(1, self.max_message_bytes // wire.element_size())):
                    self._raw_reduce(piece, raw_op, self.timeout)
            return wire.to(device=tensor.device, dtype=tensor.dtype)

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        return self._all_gather("all_gather", tensor, label)

    def _all_gather(self, kind: str, tensor: Tensor, label: str) -> list[Tensor]:
        tensor = self._collective_input(tensor, kind, label)
        with self._agreed(kind, tensor, label=label, free_rows=True, gives=tensor) as (headers, rooms):
            return self._gathered(tensor, [header.shape for header in headers], rooms, headers[self.rank])

    def _gathered(self, mine: Tensor, shapes: list[tuple[int, ...]], rooms: list[bytes], own: Header) -> list[Tensor]:
        """What all ranks give: what came with the headers, in their `rooms`, and the rest by messages of its own."""
        empty, results, apart = mine.new_empty(0), [], []
        for shape, room in zip(shapes, rooms):
            num_bytes = prod(shape) * mine.element_size()
            fits = 0 < num_bytes <= len(room)
            if fits:
                found = torch.frombuffer(bytearray(room[:num_bytes]), dtype=mine.dtype).view(shape).to(mine.device)
            else:
                found = torch.empty(shape, dtype=mine.dtype, device=mine.device)
            results.append(found)
            apart.append(empty if fits else found)
        if any(one.numel() for one in apart):
            self._swap([empty if 0 < mine.nbytes <= len(rooms[self.rank]) else mine] * self.size, apart, own)
        return results

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast {label!r}: the root is {root}, but ranks are in [0, {self.size})")
        if not tensor.is_contiguous():
            raise ValueError(f"broadcast {label!r}: the tensor is not contiguous; pass tensor.contiguous()")
        inner = self._collective_input(tensor, "broadcast", label)
        with self._agreed("broadcast", inner, root=root, label=label):
            if inner.numel() > 0:
                wire = self._staged(inner)
                for piece in _bytes(wire).split(self.max_message_bytes):
                    self._raw_broadcast(piece, root, self.timeout)
                _copy_into(inner, wire)
        return tensor

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        if len(tensors) != self.size:
            raise ValueError(f"all_to_all {label!r}: {len(tensors)} tensors for {self.size} ranks; pass one per rank")
        inner = [self._collective_input(tensor, "all_to_all", label) for tensor in tensors]
        first = inner[0]
        for tensor in inner:
            if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:] or tensor.dim() == 0:
                raise ValueError(
                    f"all_to_all {label!r}: the tensors for the ranks may differ only in their first dimension, but "
                    f"they are {', '.join(f'{t.dtype} {list(t.shape)}' for t in inner)}"
                )
        rows = torch.tensor([tensor.shape[0] for tensor in inner])
        with self._agreed("all_to_all", first, label=label, free_rows=True, gives=rows) as (headers, rooms):
            all_rows = self._gathered(rows, [(self.size,)] * self.size, rooms, headers[self.rank])
            mine = [(int(theirs[self.rank]), *first.shape[1:]) for theirs in all_rows]
            results = [torch.empty(shape, dtype=first.dtype, device=first.device) for shape in mine]
            self._swap(inner, results, headers[self.rank])
        return results

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        try:
            text = json.dumps(obj, default=_whole_number)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"all_gather_object{label and f' {label!r}'}: {error}; it takes numbers, strings, lists and dicts of "
                f"them. Of a tensor or an array, pass its tolist(), or call all_gather of a tensor"
            ) from None
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        gathered = self._all_gather("all_gather_object", raw, label)
        return [json.loads(bytes(text.numpy().tobytes())) for text in gathered]

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        if num_bytes < 0:
            raise ValueError(f"share {label!r}: the number of bytes is {num_bytes}, but it must be at least 0")
        return share(self, num_bytes, label)

    def barrier(self, label: str = "") -> None:
        with self._agreed("barrier", None, label=label):
            pass

    def _collective_input(self, tensor: Tensor, kind: str, label: str) -> Tensor:
        if tensor.device != self.device and tensor.device.type != "cpu":
            raise ValueError(f"{kind} {label!r}: the tensor is on {tensor.device}, not on {self.device} or the CPU")
        return tensor.detach().contiguous()

    @contextmanager
    def _agreed(
        self, kind: str, tensor: Tensor | None, op: str = "", root: int = 0, label: str = "", free_rows: bool = False,
        gives: Tensor | None = None,
    ) -> Iterator[tuple[list[Header], list[bytes]]]:  # fmt: skip
        """A block that runs only if all ranks are in this call. Yields the headers of all ranks, and what they give."""
        self._check_open()
        if self.is_direct and tensor is not None and tensor.device == self.device:
            self._moved["collective", self.rank] += 1  # which messages between devices must not pass
            root = ON_DEVICE - root
        header = header_of(kind, self.collectives + 1, tensor, op, root, label)
        self.collectives += 1
        call = self.calls.begin(self.path, "", header, -1, self.collectives, 0 if tensor is None else tensor.nbytes)
        call.wait()
        with self.waiting(Position(call, COLLECTIVE, self.collectives)):
            mine = header.pack()
            has_room = gives is not None and not (self.is_direct and gives.device == self.device)
            room = b""
            if gives is not None and has_room and gives.nbytes <= ROOM_BYTES:
                room = _bytes(torch.empty(gives.shape, dtype=gives.dtype).copy_(gives)).numpy().tobytes()
            gathered = self._raw_gather(mine + room.ljust(ROOM_BYTES, b"\0"), self.timeout)
            headers = [header] * self.size
            if any(raw[:HEADER_BYTES] != mine for raw in gathered):
                headers = [Header.unpack(raw[:HEADER_BYTES]) for raw in gathered]
                problem = divergence(headers, free_rows)
                if problem is not None:
                    raise DivergenceError(problem)
            yield headers, [raw[HEADER_BYTES:] if has_room else b"" for raw in gathered]
            call.end()

    def _swap(self, sends: Sequence[Tensor], results: Sequence[Tensor], header: Header) -> None:
        """``sends[r]`` goes to rank r, ``results[r]`` comes from it. Nearest ranks first, so that none is flooded."""
        pending: list[Pending] = []
        header = replace(header, dtype=results[0].dtype)
        results[self.rank].copy_(sends[self.rank])
        landings = [self._staged(result) for result in results]
        sources = [(self.rank - step) % self.size for step in range(1, self.size)]
        sources = [source for source in sources if landings[source].numel()]
        to_ranks = [(self.rank + step) % self.size for step in range(1, self.size)]
        to_ranks = [to for to in to_ranks if sends[to].numel()]
        if self.is_direct and results[0].device == self.device and (sources or to_ranks):
            moved = [(_bytes(sends[to]), to) for to in to_ranks]
            pending += self._raw_move(moved, [(_bytes(landings[source]), source) for source in sources])
        else:
            for source in sources:
                pending += self._receive_pieces(landings[source], source, header, COLLECTIVE_LANE)
            for to in to_ranks:
                pending += self._send_pieces(self._staged(sends[to]), to, header, COLLECTIVE_LANE)
        for transfer in pending:
            transfer.wait(self.timeout)
        for result, landing in zip(results, landings):
            _copy_into(result, landing)

    # ---- duplicates -----------------------------------------------------------------------------------------------

    def duplicate(self: B, name: str) -> B:
        with self._agreed("duplicate", None, label=name):
            self._num_duplicates[name] += 1
            twin = self._raw_duplicate(f"{self.path}/{name}#{self._num_duplicates[name]}")
        twin.calls = self.calls
        twin.local_ranks = self.local_ranks
        twin.serves_threads = self.serves_threads
        twin.timeout = self.timeout
        twin.max_message_bytes = self.max_message_bytes
        return twin


def _whole_number(value: Any) -> int:
    """A number of NumPy's for JSON, which refuses it."""
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, 1-D."""
    return tensor.view(-1).view(torch.uint8)


def _copy_into(target: Tensor, value: Tensor) -> None:
    if target is not value:
        target.copy_(value)
