"""Edges in files, each followed by its reverse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from shardpass.data.file_rows import FileRows, RowWriter, blocks
from shardpass.data.raw import EdgeArrays, RawGraph
from shardpass.data.streaming import Budget

_BLOCK_ROWS = 1 << 16


def inverse_added(graph: RawGraph, budget: Budget) -> RawGraph:
    """The graph, whose edges are in files, with the reverse of each edge right behind it, and its fields twice.

    Collective. Rank 0 does it. Nothing is merged.
    """

    def added() -> tuple[dict[Any, EdgeArrays], dict[Any, dict[str, FileRows]]]:
        edges = {kind: EdgeArrays(*_with_inverse(ends, budget)) for kind, ends in graph.edges.items()}
        fields = {k: {name: _repeated(f, budget) for name, f in own.items()} for k, own in graph.edge_fields.items()}
        return edges, fields

    edges, edge_fields = budget.team.first("inverse edges", added)
    return replace(graph, edges=edges, edge_fields=edge_fields)


def _with_inverse(ends: EdgeArrays, budget: Budget) -> Iterator[FileRows]:
    """The sources and the destinations, with each edge followed by its reverse."""
    for own, other in ((ends.src, ends.dst), (ends.dst, ends.src)):
        writer = RowWriter(budget.file(), own.array.dtype, name=own.name)
        for (_, first), (_, second) in zip(blocks(own, budget.block_edges), blocks(other, budget.block_edges)):
            writer.append(np.stack([first.numpy(), second.numpy()], axis=1).reshape(-1))
        yield writer.rows()


def _repeated(rows: FileRows, budget: Budget) -> FileRows:
    """Each row twice."""
    writer = RowWriter(budget.file(), rows.array.dtype, tuple(rows.shape[1:]), rows.name)
    for _, block in blocks(rows, _BLOCK_ROWS):
        writer.append(np.repeat(block.numpy(), 2, axis=0))
    return writer.rows()
