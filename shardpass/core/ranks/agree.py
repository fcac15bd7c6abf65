"""How ranks find out whether they are about to do the same thing, and the error when they are not."""

from __future__ import annotations

import hashlib

import torch

from shardpass.core.ranks.ranks import Ranks
from shardpass.errors import DivergenceError


def digest(text: str) -> int:
    """A 62-bit fingerprint of `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def agree(comm: Ranks, label: str, values: list[int]) -> list[list[int]]:
    """Every rank's `values`, in rank order. Collective; equal lengths."""
    gathered = comm.all_gather(torch.tensor(values, dtype=torch.int64, device=comm.device), label=label)
    return [row.tolist() for row in gathered]


def diverged(comm: Ranks, label: str, mine: str) -> DivergenceError:
    """The error for ranks that describe one call differently. Collective: every rank raises it."""
    descriptions = comm.all_gather_object(mine, label=f"{label}: descriptions")
    other = next(r for r in range(comm.size) if descriptions[r] != descriptions[0])
    return DivergenceError(
        f"{label}: ranks disagree about this call, so it cannot be exact. Rank 0: {descriptions[0]}. "
        f"Rank {other}: {descriptions[other]}. Every rank must run the same model with the same widths and dtypes"
    )
