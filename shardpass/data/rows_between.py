"""The rows that travel between each two ranks, with partial sums and without."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from shardpass.core.exchange import minimum_cover
from shardpass.data.inspect import groups_of
from shardpass.data.raw import EdgeType
from shardpass.data.store import Store, open_store
from shardpass.errors import require


def inspect_pairs(path: str | os.PathLike[str], ranks: int | None = None) -> tuple[Tensor, Tensor]:
    """The rows of one layer that each rank fetches from each other one, and those with ``Options(partial_sums=True)``.

    Relations are counted one by one and added up. SciPy finds the matchings, in seconds for a million cut edges.

    Args:
        ranks: of this many ranks. `None` takes each part for a rank.

    Returns:
        Two tensors, ``[ranks, ranks]`` int64; row p is what rank p fetches.

    Raises:
        MissingDependencyError: SciPy is not installed.
        StoreError: when the store cannot be opened or its structure is altered.
        ValueError: when there are more ranks than parts.
    """
    require("scipy", "fast", "counting partial sums")
    store = open_store(path)
    groups = groups_of(store, ranks)
    halo, fewest = torch.zeros(2, len(groups), len(groups), dtype=torch.int64)
    for into, parts in enumerate(groups):
        for owner, sources in enumerate(groups):
            if owner == into:
                continue
            for edge_type in store.manifest.edge_types:
                src, dst = _edges(store, edge_type, parts, sources)
                if src.numel():
                    is_source, is_end = minimum_cover(src, dst, int(src.max()) + 1, int(dst.max()) + 1)
                    halo[into, owner] += src.unique().numel()
                    fewest[into, owner] += is_source.sum() + is_end.sum()
    return halo, fewest


def _edges(store: Store, edge_type: EdgeType, parts: range, sources: range) -> tuple[Tensor, Tensor]:
    """The edges of one type from the nodes of some parts to those of others, by numbers in the store's order."""
    ends: list[tuple[Tensor, Tensor]] = []
    of_src, of_dst = (store.manifest.offsets[kind] for kind in (edge_type[0], edge_type[2]))
    for part in parts:
        edges = store.part_edges(edge_type, part)
        for source in sources:
            found = edges.from_part(source)
            degrees = found.indptr.diff().long()
            dst = torch.repeat_interleave(torch.arange(degrees.numel()), degrees) + of_dst[part]
            ends.append((found.needed[found.src_rows.long()].long() + of_src[source], dst))
    src, dst = (torch.cat(end) for end in zip(*ends))
    return src - of_src[sources.start], dst - of_dst[parts.start]
