"""The options of a run: one frozen dataclass, passed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from shardpass.core.ranks.units import parse_bytes

Mode = Literal["sar", "keep", "halo"]
MODES: tuple[Mode, ...] = ("sar", "keep", "halo")
Backward = Literal["auto", "push", "pull"]
BACKWARDS: tuple[Backward, ...] = ("auto", "push", "pull")


@dataclass(frozen=True)
class Options:
    """How the engine runs. Every rank must pass the same options.

    Args:
        mode: ``"sar"`` fetches one block of source rows at a time, drops it, and fetches it again in backward;
            ``"keep"`` fetches one block at a time and keeps the rows for backward; ``"halo"`` fetches all halo rows at
            once and keeps them. All three give the same numbers. ``"auto"`` takes the fastest that fits
            `memory_budget`, by an estimate made before the first training forward of a wrapped model on the graph.
        memory_budget: bytes per rank for ``"auto"``, as a number or as ``"6GiB"``.
        prefetch: how many rounds are fetched ahead of the one being computed, at least 0.
        block_rows: the most halo rows of one fetch; larger blocks come in pieces. None: whole blocks.
        cache_constant_inputs: keep sums over in-edges of tensors that do not change, such as the features that go into
            the first layer, so that they are fetched and summed once and not in every epoch.
        fuse_attention: compute softmax-weighted sums over in-edges in one pass, where a layer is recognised as one.
        wire_dtype: the dtype in which float32 rows and their gradients travel between ranks, ``torch.bfloat16`` or None
            for their own: half the bytes, 8 significant bits (two to three digits). Sums are made in float32. Results
            then depend a little on the partition, and equal those of one process to those digits only.
        backward: how gradients of source rows reach their owners. ``"push"``: those of fetched rows are computed
            and sent back. ``"pull"``: owners fetch what destinations know and compute theirs, for sums of plain copies
            and for attention with scores in closed form and without dropout; all else is pushed. ``"auto"``: of these
            two what moves fewer bytes, call by call. All three give the same numbers.
        share_memory: ranks on one host read each other's rows in shared memory, where they are processes and it can be
            had; otherwise, and with False, rows travel as messages. The numbers are the same to the bit.
        stream_structure: the edges stay in CPU memory, and so do tensors with a row per edge (``edge_index``, edge
            weights): each block's shard, and the rows of edge tensors that go with it, are copied to the device for the
            round that uses them, the next shard meanwhile. For ranks whose device is smaller than their part's
            edges. Not for the modes ``"halo"`` and ``"auto"``, nor with ``backward="pull"``.
        chunk_bytes: bound of one temporary with a row per edge; edges are processed in chunks of that size.
    """

    mode: Mode | Literal["auto"] = "sar"
    prefetch: int = 1
    block_rows: int | None = None
    chunk_bytes: int = 1 << 20
    wire_dtype: torch.dtype | None = None
    cache_constant_inputs: bool = True
    fuse_attention: bool = True
    backward: Backward = "auto"
    share_memory: bool = True
    memory_budget: str | float | None = None
    stream_structure: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (*MODES, "auto"):
            raise ValueError(f"mode is one of {', '.join(MODES)} or auto, got {self.mode!r}")
        if (self.mode == "auto") != (self.memory_budget is not None):
            raise ValueError(
                f"mode='auto' and memory_budget go together: give both or neither, got mode={self.mode!r} and "
                f"memory_budget={self.memory_budget!r}"
            )
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget)
        if self.backward not in BACKWARDS:
            raise ValueError(f"backward is one of {', '.join(BACKWARDS)}, got {self.backward!r}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is at least 0, got {self.prefetch}")
        if self.block_rows is not None and self.block_rows < 1:
            raise ValueError(f"block_rows is at least 1 or None, got {self.block_rows}")
        if self.wire_dtype not in (None, torch.bfloat16):
            raise ValueError(f"wire_dtype is torch.bfloat16 or None, got {self.wire_dtype}")
        for name in ("cache_constant_inputs", "fuse_attention", "share_memory", "stream_structure"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False, got {getattr(self, name)!r}")
        if self.stream_structure and (self.mode not in ("sar", "keep") or self.backward == "pull"):
            raise ValueError(
                f"stream_structure is for the modes sar and keep with backward='auto' or 'push', whose edges are read "
                f"one block at a time; got mode={self.mode!r} and backward={self.backward!r}"
            )
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is at least 1, got {self.chunk_bytes}")

    @property
    def may_pull(self) -> bool:
        """Whether a backward may pull; out-edges are not streamed."""
        return self.backward != "push" and not self.stream_structure
