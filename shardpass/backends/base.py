"""The work every backend shares: identity, checks, splitting, staging, and the words of errors.

A backend supplies a few raw primitives (the methods of `RawCommunicator` that raise NotImplementedError) that move
bytes and know nothing of calls. [Note: identity of messages] Every point-to-point message is a header of fixed size and
the payload, under way at the same time. The payload is matched by a key of lane, tag, dtype and byte count, so that it
can only land in a buffer made for it; when sizes differ, the payload stays where it is, the header arrives and tells
both sides. Every collective starts with an all-gather of headers, so that every rank sees every other rank's call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from shardpass.backends.communicator import Communicator, Handle, ReduceOp
from shardpass.backends.deadlock import Position
from shardpass.backends.handle import DoneHandle, ExchangeHandle, Pending
from shardpass.backends.identity import DTYPES, HEADER_BYTES, OPS, Header, MessageKey, divergence, header_of
from shardpass.backends.raw import DEFAULT_TIMEOUT, RawCommunicator
from shardpass.backends.shared_memory import share
from shardpass.errors import DivergenceError

__all__ = ["DEFAULT_TIMEOUT", "BaseCommunicator"]

_HEADER_LANE, _PAYLOAD_LANE, _COLLECTIVE_LANE = 0, 1, 2
_HALF = (torch.float16, torch.bfloat16)


class BaseCommunicator(RawCommunicator):
    """A communicator over raw primitives; see `Communicator` for the public methods."""

    # ---- point to point -------------------------------------------------------------------------------------------

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        """See `Communicator.exchange`."""
        self._check_open()
        send = self._checked(send, to, "send", tag, label)
        recv = self._checked(recv, source, "recv", tag, label)
        if (send is not None and to == self.rank) or (recv is not None and source == self.rank):
            return self._copy_to_self(send, to, recv, source, tag, label)
        handle = ExchangeHandle(self)
        if recv is not None:
            self._start_receive(handle, recv, source, header_of("exchange", tag, recv, label=label))
        if send is not None:
            self._start_send(handle, send, to, header_of("exchange", tag, send, label=label))
        return handle

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
        return DoneHandle()

    def _start_receive(self, handle: ExchangeHandle, recv: Tensor, source: int, header: Header) -> None:
        raw = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        arriving = self._raw_receive(raw, source, MessageKey(_HEADER_LANE, header.number, HEADER_BYTES))
        landing = recv if self.moves_device_memory else recv.cpu()
        staged = landing is not recv
        pieces = self._pieces(landing, header, _PAYLOAD_LANE)
        pending = [self._raw_receive(flat, source, key) for flat, key in pieces]
        count = self._tally.add("recv", source, header.number)
        finish: Callable[[], None] = (lambda: _copy_into(recv, landing)) if staged else _nothing
        handle.expect(header, source, count, arriving, raw, pending, finish)

    def _start_send(self, handle: ExchangeHandle, send: Tensor, to: int, header: Header) -> None:
        payload = send if self.moves_device_memory else send.cpu()
        raw = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        pending = [self._raw_send(raw, to, MessageKey(_HEADER_LANE, header.number, HEADER_BYTES))]
        pieces = self._pieces(payload, header, _PAYLOAD_LANE)
        pending += [self._raw_send(flat, to, key) for flat, key in pieces]
        count = self._tally.add("send", to, header.number)
        self.bytes_sent += payload.numel() * payload.element_size()
        handle.offer(header, to, count, pending, payload)

    def _pieces(self, tensor: Tensor, header: Header, lane: int) -> list[tuple[Tensor, MessageKey]]:
        flat = tensor.reshape(-1).view(torch.uint8)
        key = MessageKey(lane, header.number, flat.numel(), DTYPES.index(header.dtype))
        return [(piece, key._replace(piece=i)) for i, piece in enumerate(flat.split(self.max_message_bytes))]

    def check_header(self, expected: Header, raw: bytes, source: int) -> None:
        """Raise, on every rank, unless the header from ``source`` is of the ``expected`` message."""
        found = Header.unpack(raw)
        same_size = _count(found.shape) == _count(expected.shape)
        if found.agrees(Header(**{**expected.__dict__, "shape": found.shape}), False) and same_size:
            return
        self._diverge(
            f"rank {self.rank} expects {expected.describe()} from rank {source}, but rank {source} sends "
            f"{found.describe()}"
        )

    # ---- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        """See `Communicator.all_reduce`. For bool, ``sum`` and ``max`` are or, ``prod`` and ``min`` are and."""
        if op not in OPS[1:]:
            raise ValueError(f"all_reduce {label!r}: the operation is {op!r}, but known are {', '.join(OPS[1:])}")
        tensor = self._collective_input(tensor, "all_reduce", label)
        with self._agreed("all_reduce", tensor, op=op, label=label) as (_headers, limit):
            if tensor.numel() == 0:
                return tensor.clone()
            wire = tensor if self.moves_device_memory else tensor.cpu()
            if tensor.dtype == torch.bool:
                op, wire = {"sum": "max", "prod": "min"}.get(op, op), wire.to(torch.uint8)  # type: ignore[assignment]
            elif tensor.dtype in _HALF:
                wire = wire.to(torch.float32)
            wire = wire.clone() if wire.data_ptr() == tensor.data_ptr() else wire
            for piece in wire.view(-1).split(max(1, self.max_message_bytes // wire.element_size())):
                self._raw_reduce(piece, op, limit())
            return wire.to(device=self.device, dtype=tensor.dtype)

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        """See `Communicator.all_gather`."""
        return self._all_gather("all_gather", tensor, label)

    def _all_gather(self, kind: str, tensor: Tensor, label: str) -> list[Tensor]:
        tensor = self._collective_input(tensor, kind, label)
        with self._agreed(kind, tensor, label=label, free_rows=True) as (headers, limit):
            results = [torch.empty(header.shape, dtype=tensor.dtype, device=self.device) for header in headers]
            self._swap([tensor] * self.size, results, headers[self.rank], limit)
        return results

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        """See `Communicator.broadcast`."""
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast {label!r}: the root is {root}, but ranks are in [0, {self.size})")
        if not tensor.is_contiguous():
            raise ValueError(f"broadcast {label!r}: the tensor is not contiguous; pass tensor.contiguous()")
        inner = self._collective_input(tensor, "broadcast", label)
        with self._agreed("broadcast", inner, root=root, label=label) as (_headers, limit):
            if inner.numel() == 0:
                return tensor
            wire = inner if self.moves_device_memory else inner.cpu()
            for piece in wire.view(-1).view(torch.uint8).split(self.max_message_bytes):
                self._raw_broadcast(piece, root, limit())
            if wire is not inner:
                inner.copy_(wire)
        return tensor

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        """See `Communicator.all_to_all`."""
        if len(tensors) != self.size:
            raise ValueError(f"all_to_all {label!r}: {len(tensors)} tensors for {self.size} ranks; pass one per rank")
        inner = [self._collective_input(tensor, "all_to_all", label) for tensor in tensors]
        first = inner[0]
        for tensor in inner:
            if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:] or tensor.dim() == 0:
                raise ValueError(
                    f"all_to_all {label!r}: the tensors for the ranks may differ in their first dimension only, but "
                    f"they are {', '.join(f'{t.dtype} {list(t.shape)}' for t in inner)}"
                )
        rows = torch.tensor([tensor.shape[0] for tensor in inner])
        with self._agreed("all_to_all", first, label=label, free_rows=True) as (headers, limit):
            all_rows = [torch.empty_like(rows) for _ in range(self.size)]
            self._swap([rows] * self.size, all_rows, headers[self.rank], limit)
            mine = [(int(theirs[self.rank]), *first.shape[1:]) for theirs in all_rows]
            results = [torch.empty(shape, dtype=first.dtype, device=self.device) for shape in mine]
            self._swap(inner, results, headers[self.rank], limit)
        return results

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        """See `Communicator.all_gather_object`."""
        raw = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8).to(self.device)
        gathered = self._all_gather("all_gather_object", raw, label)
        return [json.loads(bytes(text.cpu().numpy().tobytes())) for text in gathered]

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        """See `Communicator.share`."""
        if num_bytes < 0:
            raise ValueError(f"share {label!r}: the number of bytes is {num_bytes}, but it must be at least 0")
        return share(self, num_bytes, label)

    def barrier(self, label: str = "") -> None:
        """See `Communicator.barrier`."""
        with self._agreed("barrier", None, label=label):
            pass

    def _collective_input(self, tensor: Tensor, kind: str, label: str) -> Tensor:
        if tensor.device != self.device:
            raise ValueError(f"{kind} {label!r}: the tensor is on {tensor.device}, not on {self.device}")
        return tensor.detach().contiguous()

    @contextmanager
    def _agreed(
        self, kind: str, tensor: Tensor | None, op: str = "", root: int = 0, label: str = "", free_rows: bool = False
    ) -> Iterator[tuple[list[Header], Callable[[], float]]]:
        """The headers of all ranks, and the seconds left: the body runs only where all ranks are in this call."""
        self._check_open()
        header = header_of(kind, self._sequence + 1, tensor, op, root, label)
        self._sequence += 1
        with self.waiting(Position(header.describe(), "collective", self._sequence), None):
            deadline = monotonic() + self.timeout
            headers = [Header.unpack(raw) for raw in self._raw_gather(header.pack(), self.timeout)]
            problem = divergence(headers, free_rows)
            if problem is not None:
                raise DivergenceError(problem)
            yield headers, lambda: max(0.0, deadline - monotonic())

    def _swap(
        self, sends: Sequence[Tensor], results: Sequence[Tensor], header: Header, limit: Callable[[], float]
    ) -> None:
        """``sends[r]`` to rank r, ``results[r]`` from rank r. Nearest ranks first, so that no rank is flooded."""
        pending: list[Pending] = []
        landed: list[tuple[Tensor, Tensor]] = []
        lane_header = Header(**{**header.__dict__, "dtype": results[0].dtype})
        results[self.rank].copy_(sends[self.rank])
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            landing = results[source] if self.moves_device_memory else results[source].cpu()
            landed.append((results[source], landing))
            if landing.numel():
                pieces = self._pieces(landing, lane_header, _COLLECTIVE_LANE)
                pending += [self._raw_receive(flat, source, key) for flat, key in pieces]
        for step in range(1, self.size):
            to = (self.rank + step) % self.size
            payload = sends[to] if self.moves_device_memory else sends[to].cpu()
            if payload.numel():
                pieces = self._pieces(payload, lane_header, _COLLECTIVE_LANE)
                pending += [self._raw_send(flat, to, key) for flat, key in pieces]
        for transfer in pending:
            transfer.wait(limit())
        for result, landing in landed:
            _copy_into(result, landing)

    def duplicate(self, name: str) -> Communicator:
        """See `Communicator.duplicate`."""
        with self._agreed("duplicate", None, label=name):
            twin = self._raw_duplicate(name)
        twin.name = name
        twin.local_ranks = self.local_ranks
        twin.timeout = self.timeout
        twin.max_message_bytes = self.max_message_bytes
        return twin

    def background(self) -> Communicator | None:
        """See `Communicator.background`."""
        if self.size == 1 or not self.serves_threads:
            return None
        twin = self._background
        if twin is None or twin.given_up:
            self._close_background()
            self._background = twin = self.duplicate(f"background of {self.name}")
        twin.timeout = self.timeout
        return twin  # type: ignore[no-any-return]

    def close(self) -> None:
        """See `Communicator.close`."""
        self._close_background()
        super().close()

    def _close_background(self) -> None:
        if self._background is not None:
            self._background.close()


def _nothing() -> None:
    return None


def _copy_into(target: Tensor, value: Tensor) -> None:
    if target is not value:
        target.copy_(value)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
