"""Whether the parts of a store are one graph, found without a rank that sees more than its own parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from shardpass.data.merge import RankData
from shardpass.data.store import Store
from shardpass.errors import StoreError

_BLOCK = 1 << 16
_MODULUS = 2**64

Tally = dict[str, int]
"""For each statement about a graph, a number. Over all parts these add up to 0, modulo 2**64, if it is true."""


def tally(store: Store, data: RankData) -> Tally:
    """The tally of a run of parts.

    A sum of hashes of the ids that should be there, taken from one of those that are, leaves 0 if each is there once.
    """
    manifest, parts = store.manifest, data.parts
    found: Tally = {}
    for node_type, ids in data.node_ids.items():
        offsets = manifest.offsets[node_type]
        difference = _hashed(ids.split(_BLOCK)) - _hashed_range(offsets[parts.start], offsets[parts.stop])
        found[f"nodes of type {node_type!r} are not each in one part"] = difference
    for kind, edges in data.edges.items():
        first = sum(manifest.part_edges[kind][: parts.start])
        num_edges = sum(part.num_edges for part in edges.parts)
        hashed = sum(_hashed(store.edge_id_blocks(kind, part)) for part in parts)
        found[f"edges {kind} are not each in one part"] = hashed - _hashed_range(first, first + num_edges)
        inner = sum(part.counts[number] for number, part in zip(parts, edges.parts))
        expected = 0 if parts.start else manifest.cut_edges[kind]
        found[f"cut edges {kind} are not {manifest.cut_edges[kind]}"] = num_edges - inner - expected
    return found


def check_tallies(path: Path, tallies: Iterable[Tally]) -> None:
    """Return when the parts of the store at `path`, each in one of the tallies, are one graph."""
    total: Tally = {}
    for found in tallies:
        total = {statement: total.get(statement, 0) + number for statement, number in found.items()}
    wrong = next((statement for statement, number in total.items() if number % _MODULUS), None)
    if wrong:
        raise StoreError(f"{path} contradicts itself: {wrong}; the store is not as partition writes it")


def _hashed(blocks: Iterable[Tensor]) -> int:
    """The sum of a hash of each id."""
    return sum(_block_hash(block.long()) for block in blocks)


def _hashed_range(first: int, stop: int) -> int:
    starts = range(first, stop, _BLOCK)
    return sum(_block_hash(torch.arange(start, min(start + _BLOCK, stop))) for start in starts)


def _block_hash(ids: Tensor) -> int:
    mixed = ids * -7046029254386353131  # odd; products wrap
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return int((mixed ^ (mixed >> 32)).sum())
