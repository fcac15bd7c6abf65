"""The identity that every message and every collective carries, and the words for two that do not agree."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardpass.errors import DivergenceError, InternalError

_FORMAT = struct.Struct("<4sQBBBBi8qB111s")
_MAGIC = b"SPH1"
_MAX_LABEL = 111
MAX_DIMS = 8
SAME_CALLS = (
    "Every rank must make the same calls in the same order: look for a layer, a loss, a backward or a sync that "
    "depends on the rank or on its own data"
)
HEADER_BYTES = _FORMAT.size

KINDS = (
    "exchange", "all_reduce", "all_gather", "broadcast", "all_to_all", "all_gather_object", "barrier", "duplicate",
)  # fmt: skip
OPS = ("", "sum", "max", "min", "prod")
DTYPES: tuple[torch.dtype | None, ...] = (
    None, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class MessageKey(NamedTuple):
    """What a point-to-point message is matched by, besides its two ends: only equal keys meet."""

    lane: int  # 0 header, 1 payload, 2 payload of a collective
    tag: int
    num_bytes: int
    dtype: int = 0
    piece: int = 0

    def slot(self) -> int:
        """The key as a number in ``[0, 2**31)``, for transports whose messages are matched by one integer.

        Two keys may share a slot (1 in 2**31); `SlotTable` makes that an error where both are under way at once.
        """
        return zlib.crc32(struct.pack("<BQQBI", *self)) & 0x7FFFFFFF


class SlotTable:
    """The slots in use between this rank and its peers, so that two messages never share one."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, bool, int], MessageKey] = {}

    def take(self, peer: int, sending: bool, key: MessageKey) -> tuple[int, bool, int]:
        """The place of ``key``, to be given back by `release` when its transfer has completed."""
        place = (peer, sending, key.slot())
        other = self._used.get(place)
        if other is not None and other != key:
            raise InternalError(f"two messages under way with rank {peer} have the same slot: {other} and {key}")
        if other is not None and key.lane < 2:
            raise DivergenceError(
                f"two messages with tag {key.tag} are under way at once {'to' if sending else 'from'} rank {peer}: "
                f"wait for the first, or use another tag"
            )
        self._used[place] = key
        return place

    def release(self, place: tuple[int, bool, int]) -> None:
        """Give a place back; unknown places are ignored."""
        self._used.pop(place, None)


@dataclass(frozen=True)
class Header:
    """Who-is-where: sent ahead of every payload, and agreed on before every collective.

    Attributes:
        kind: one of `KINDS`.
        number: the tag of an exchange; the sequence number of a collective.
        op: one of `OPS`.
        dtype: None for calls without a tensor.
        shape: at most `MAX_DIMS` sizes.
        root: of a broadcast.
        label: of the caller, cut to 111 bytes.
    """

    kind: str
    number: int
    op: str = ""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    root: int = 0
    label: str = ""

    def pack(self) -> bytes:
        """`HEADER_BYTES` bytes."""
        label = self.label.encode()[:_MAX_LABEL]
        sizes = self.shape + (0,) * (MAX_DIMS - len(self.shape))
        codes = (KINDS.index(self.kind), OPS.index(self.op), DTYPES.index(self.dtype), len(self.shape))
        return _FORMAT.pack(_MAGIC, self.number, *codes, self.root, *sizes, len(label), label)

    @staticmethod
    def unpack(raw: bytes) -> Header:
        """The header in ``raw``."""
        magic, number, kind, op, dtype, num_dims, root, *sizes, num_label, label = _FORMAT.unpack(raw)
        if magic != _MAGIC:
            raise DivergenceError(
                f"a message header was expected, but {raw[:8]!r}... arrived: the ranks run different versions of "
                f"shardpass, or something else uses the same process group"
            )
        text = label[:num_label].decode(errors="ignore")
        return Header(KINDS[kind], number, OPS[op], DTYPES[dtype], tuple(sizes[:num_dims]), root, text)

    def describe(self) -> str:
        """The call in words, e.g. ``all_reduce 'loss' (sum, float32 [3], collective 17)``."""
        details = [self.op] if self.op else []
        if self.dtype is not None:
            details.append(f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}")
        if self.kind == "broadcast":
            details.append(f"root {self.root}")
        details.append(f"tag {self.number}" if self.kind == "exchange" else f"collective {self.number}")
        label = f" {self.label!r}" if self.label else ""
        return f"{self.kind}{label} ({', '.join(details)})"

    def agrees(self, other: Header, free_rows: bool) -> bool:
        """Whether both belong to one call. ``free_rows``: the first dimension may differ."""
        if free_rows and len(self.shape) == len(other.shape) and self.shape:
            if self.shape[1:] != other.shape[1:]:
                return False
        elif self.shape != other.shape:
            return False
        mine = (self.kind, self.number, self.op, self.dtype, self.root, self._cut_label())
        return mine == (other.kind, other.number, other.op, other.dtype, other.root, other._cut_label())

    def _cut_label(self) -> bytes:
        return self.label.encode()[:_MAX_LABEL]


def header_of(
    kind: str, number: int, tensor: torch.Tensor | None, op: str = "", root: int = 0, label: str = ""
) -> Header:
    """The header of a call with ``tensor``.

    Raises:
        TypeError: for a dtype that cannot be sent.
        ValueError: for more than 8 dimensions.
    """
    if tensor is None:
        return Header(kind, number, op, None, (), root, label)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES[1:])
        raise TypeError(f"{kind} {label!r}: tensors of {tensor.dtype} cannot be sent; known are {known}")
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"{kind} {label!r}: a tensor has at most {MAX_DIMS} dimensions here, not {tensor.dim()}")
    return Header(kind, number, op, tensor.dtype, tuple(tensor.shape), root, label)


def divergence(headers: Sequence[Header], free_rows: bool) -> str | None:
    """Words for headers that are not of one call, the same on every rank; None where they agree."""
    if all(header.agrees(headers[0], free_rows) for header in headers):
        return None
    groups: dict[str, list[int]] = {}
    for rank, header in enumerate(headers):
        groups.setdefault(header.describe(), []).append(rank)
    places = "; ".join(f"{_ranks(ranks)} in {text}" for text, ranks in groups.items())
    return f"the ranks are in different calls, or in one call with different arguments: {places}. {SAME_CALLS}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown} are"
