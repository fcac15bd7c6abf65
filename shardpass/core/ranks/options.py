"""The options of a run: one frozen dataclass, passed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
        mode: ``"sar"`` fetches one block of source rows at a time, drops it, and fetches it again in backward.
            ``"keep"`` fetches one block at a time and keeps the rows for backward. ``"halo"`` fetches all halo rows at
            once and keeps them. All three give the same numbers. ``"auto"`` leaves the choice to a plan, which must
            decide it before the graph is loaded: see `shardpass.plan`.
        memory_budget: bytes per rank that ``"auto"`` must fit, as a number or as ``"6GiB"``.
        prefetch: how many rounds are fetched ahead of the one being computed, at least 0.
        block_rows: the most halo rows of one fetch; larger blocks come in pieces. `None` fetches whole blocks.
        cache_constant_inputs: keep sums over in-edges of tensors that do not change, such as the features that go into
            the first layer. They are then fetched and summed once and not in every epoch.
        fuse_attention: compute softmax-weighted sums over in-edges in one pass if a layer is recognised as attention.
        wire_dtype: ``torch.bfloat16`` sends float32 rows and their gradients in half the bytes, with 8 significant bits
            (two to three digits). Sums are still made in float32. Results then depend a little on the partition, and
            equal those of one process to those digits only. `None` sends rows as they are.
        backward: how gradients of source rows reach their owners. ``"push"`` computes those of fetched rows and sends
            them back. With ``"pull"`` owners fetch what destinations know and compute theirs; this works for sums of
            plain copies and for attention with scores in closed form and without dropout, and all else is pushed.
            ``"auto"`` takes what moves fewer bytes, call by call. All three give the same numbers.
        share_memory: ranks on one host read each other's rows in shared memory, if they are processes and the system
            has it. Otherwise, and with False, rows travel as messages. The numbers are the same to the bit.
        stream_structure: edges stay in CPU memory, and so do tensors with a row per edge (``edge_index``, edge
            weights). Each round copies its shard and the edge rows that go with it to the device, while the round
            before it is computed. Use it if the device is smaller than a part's edges. It excludes the modes
            ``"halo"`` and ``"auto"`` and ``backward="pull"``.
        partial_sums: where fewer rows travel that way, send the partial sum for a destination in place of its sources.
            This works for sums of copies, with constant weights or none, between ranks that do not all share memory,
            over all edges of the graph, with self-loops or without, and takes SciPy. The first forward finds the rows,
            which takes seconds for a million cut edges. Sums are made in another order, so last digits differ.
        chunk_bytes: the most bytes of one temporary with a row per edge; edges are processed in chunks of that size.
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
    partial_sums: bool = False
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
        for name in ("prefetch", "block_rows", "chunk_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == "block_rows" and value is None):
                raise ValueError(f"{name} is an integer, got {value!r}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is at least 0, got {self.prefetch}")
        if self.block_rows is not None and self.block_rows < 1:
            raise ValueError(f"block_rows is at least 1 or None, got {self.block_rows}")
        if self.wire_dtype not in (None, torch.bfloat16):
            raise ValueError(f"wire_dtype is torch.bfloat16 or None, got {self.wire_dtype}")
        for name in ("cache_constant_inputs", "fuse_attention", "share_memory", "stream_structure", "partial_sums"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False, got {getattr(self, name)!r}")
        if self.stream_structure and (self.mode not in ("sar", "keep") or self.backward == "pull"):
            raise ValueError(
                f"stream_structure is for the modes sar and keep with backward='auto' or 'push', which read edges one "
                f"block at a time; got mode={self.mode!r} and backward={self.backward!r}"
            )
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is at least 1, got {self.chunk_bytes}")

    @property
    def may_pull(self) -> bool:
        """Whether a backward may pull. It may not if edges are streamed, since out-edges are not."""
        return self.backward != "push" and not self.stream_structure


def require_options(options: Any, call: str) -> Options:
    """`options`, or those by default for `None`. `call` is how the function is called: ``"load(path, comm, options)"``.

    Raises:
        TypeError: it is something else.
    """
    if options is not None and not isinstance(options, Options):
        kind = type(options).__name__
        raise TypeError(
            f"{call}: `options` must be shardpass.Options(...), such as Options(mode='halo'), but got {kind}"
        )
    return options or Options()
