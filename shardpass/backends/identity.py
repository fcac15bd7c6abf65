"""The identity that every message and every collective carries, and the words for two that do not agree."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.errors import DivergenceError, InternalError

_FORMAT = struct.Struct("<4sQBBBBi8qB111s8s")
_MAGIC = b"SPH1"
_MAX_LABEL = 111
MAX_DIMS = 8
SAME_CALLS = (
    "Every rank must make the same calls in the same order: look for a layer, a loss, a backward or a sync that "
    "depends on the rank or on its own data"
)
HEADER_BYTES = _FORMAT.size
INLINE_BYTES = 8
"""A payload of at most so many bytes is the end of its header."""
ROOM_BYTES = 820
"""Behind the header of a collective is room for what a rank gives to all, which then takes one round of messages."""

ON_DEVICE = -1
"""Less the root, in its place: the tensor of a collective is on the device, and travels between devices."""

KINDS = (
    "exchange", "all_reduce", "all_gather", "broadcast", "all_to_all", "all_gather_object", "barrier", "duplicate",
)  # fmt: skip
_COMBINE: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}
OPS = ("", *_COMBINE)
DTYPES: tuple[torch.dtype | None, ...] = (
    None, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
HEADER_LANE, PAYLOAD_LANE, COLLECTIVE_LANE = 0, 1, 2


class MessageKey(NamedTuple):
    """What a point-to-point message is matched by besides its two ends: only equal keys meet."""

    lane: int  # one of the three above
    tag: int
    num_bytes: int
    dtype: int = 0
    piece: int = 0


class SlotUse(NamedTuple):
    """A slot in use."""

    peer: int
    is_sending: bool
    slot: int


class SlotTable:
    """Keys as numbers in ``[0, num_slots)``, their slots, for transports that match messages by one integer.

    Different keys rarely have the same slot. An error is raised when both are under way with a peer at once.
    """

    def __init__(self, num_slots: int = 1 << 31) -> None:
        self._num_slots = num_slots
        self._used: dict[SlotUse, MessageKey] = {}

    def take(self, peer: int, is_sending: bool, key: MessageKey) -> SlotUse:
        """The place of ``key``. Give it back with `release` when the transfer has completed."""
        number = zlib.crc32(struct.pack("<BQQBI", *key)) & 0x7FFFFFFF
        place = SlotUse(peer, is_sending, number % self._num_slots)
        other = self._used.get(place)
        if other is not None and other != key:
            raise InternalError(f"two messages under way with rank {peer} have the same slot: {other} and {key}")
        if other is not None and key.lane != COLLECTIVE_LANE:
            raise DivergenceError(
                f"two messages with tag {key.tag} are under way at once {'to' if is_sending else 'from'} rank {peer}: "
                f"wait for the first, or use another tag"
            )
        self._used[place] = key
        return place

    def release(self, place: SlotUse) -> None:
        """Give a place back. A place that is not in use is ignored."""
        self._used.pop(place, None)


@dataclass(frozen=True)
class Header:
    """What a message or a collective is. It travels with every message and before every collective.

    Attributes:
        kind, op: of `KINDS` and `OPS`.
        number: the tag of an exchange, or the sequence number of a collective.
        dtype: `None` for calls without a tensor.
        shape: at most `MAX_DIMS` sizes.
        root: of a broadcast; of an exchange, the place among the messages of its pair that are matched by their order.
        label: of the caller, at most 111 bytes.
    """

    kind: str
    number: int
    op: str = ""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    root: int = 0
    label: str = ""

    def pack(self, payload: bytes = b"") -> bytes:
        """The header as `HEADER_BYTES` bytes, and the whole of a payload that fits."""
        label = self.label.encode()
        sizes = self.shape + (0,) * (MAX_DIMS - len(self.shape))
        codes = (KINDS.index(self.kind), OPS.index(self.op), DTYPES.index(self.dtype), len(self.shape))
        return _FORMAT.pack(_MAGIC, self.number, *codes, self.root, *sizes, len(label), label, payload)

    @staticmethod
    def unpack(raw: bytes) -> Header:
        """The header in ``raw``."""
        magic, number, kind, op, dtype, num_dims, root, *sizes, num_label, label, _ = _FORMAT.unpack(raw)
        if magic != _MAGIC:
            raise DivergenceError(
                f"expected a message header, but {raw[:8]!r}... arrived: the ranks run different versions of "
                f"shardpass, or something else uses the same process group"
            )
        text = label[:num_label].decode()
        return Header(KINDS[kind], number, OPS[op], DTYPES[dtype], tuple(sizes[:num_dims]), root, text)

    def describe(self) -> str:
        """The call in words, such as ``all_reduce 'loss' (sum, float32 [3], collective 17)``."""
        details = [self.op] if self.op else []
        if self.dtype is not None:
            details.append(f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}")
        if self.kind == "broadcast":
            details.append(f"root {max(self.root, ON_DEVICE - self.root)}")
        if self.root < 0:
            details.append("on the device")
        if self.kind == "exchange" and self.root:
            details.append(f"message {self.root} of this pair")
        details.append(f"tag {self.number}" if self.kind == "exchange" else f"collective {self.number}")
        label = f" {self.label!r}" if self.label else ""
        return f"{self.kind}{label} ({', '.join(details)})"


def header_of(
    kind: str, number: int, tensor: torch.Tensor | None, op: str = "", root: int = 0, label: str = ""
) -> Header:
    """The header of a call with ``tensor``.

    Raises:
        TypeError: a tensor of this dtype cannot be sent.
        ValueError: the tensor has more than 8 dimensions.
    """
    label = label.encode()[:_MAX_LABEL].decode(errors="ignore")
    if tensor is None:
        return Header(kind, number, op, None, (), root, label)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES[1:])
        raise TypeError(f"{kind} {label!r}: a tensor of {tensor.dtype} cannot be sent; the known dtypes are {known}")
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"{kind} {label!r}: a tensor may have at most {MAX_DIMS} dimensions, not {tensor.dim()}")
    return Header(kind, number, op, tensor.dtype, tuple(tensor.shape), root, label)


def mismatch(expected: Header, raw: bytes, rank: int, source: int) -> str | None:
    """Words for a message to ``rank`` with the header ``raw``, if it is not the expected one. Its shape may differ."""
    if raw[:-INLINE_BYTES] == expected.pack()[:-INLINE_BYTES]:
        return None
    found = Header.unpack(raw)
    if found == replace(expected, shape=found.shape) and prod(found.shape) == prod(expected.shape):
        return None
    return f"rank {rank} expects {expected.describe()} from rank {source}, but rank {source} sends {found.describe()}"


def divergence(headers: Sequence[Header], free_rows: bool) -> str | None:
    """Words for headers of all ranks that are not of one call, the same on every rank, or `None` if they are.

    With `free_rows` the first dimension may differ.
    """
    first = headers[0]
    compared = [_with_rows(header, first.shape[:1]) for header in headers] if free_rows else headers
    if all(header == first for header in compared):
        return None
    groups: dict[str, list[int]] = {}
    for rank, header in enumerate(headers):
        groups.setdefault(header.describe(), []).append(rank)
    places = "; ".join(f"{_ranks(ranks)} in {text}" for text, ranks in groups.items())
    return f"the ranks are in different calls, or in one call with different arguments: {places}. {SAME_CALLS}"


def _with_rows(header: Header, rows: tuple[int, ...]) -> Header:
    return replace(header, shape=rows + header.shape[1:]) if header.shape else header


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown} are"


def combined(tensors: Sequence[Tensor], op: str) -> Tensor:
    """The sum of tensors of one shape, or what else `op` says, combined in their order: the same bits on every rank."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        _COMBINE[op](result, tensor, out=result)
    return result
