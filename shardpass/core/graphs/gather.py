"""`gather`: own rows of every rank, in the original node order on one of them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from shardpass.core.graphs.graph import ShardedGraph, require_graph
from shardpass.core.ranks import fail_together, require_path, require_tensor, takes_followed, tells_of_full_disk
from shardpass.core.sharding import NodeType
from shardpass.errors import MissingDependencyError


@takes_followed("number")
def gather(
    graph: ShardedGraph,
    rows: Tensor,
    node_type: NodeType | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Tensor | None:
    """Own rows of every rank in the original node order, on rank 0; None on the others. Collective.

    Args:
        rows: ``[num_nodes, ...]``, one row per own node; the same dtype and trailing shape on every rank.
        node_type: of the nodes; needed where the graph has several.
        path: a Parquet file that rank 0 writes as well, or replaces: the columns `id`, your own id of each node, and
            `output`, its row.

    Returns:
        ``[total_nodes, ...]`` on rank 0.

    Raises:
        ValueError: another number of rows, a node type that is missing or unknown, or a path of another kind of file.
        MissingDependencyError: pyarrow is needed to write a table.
    """
    require_graph(graph, "gather(graph, rows)")
    require_tensor(rows, "rows", "gather(graph, rows)")
    path = None if path is None else require_path(path, "gather(graph, rows, path=)")
    ids, total = graph.ids_of(node_type)
    if rows.size(0) != ids.numel():
        raise ValueError(
            f"rank {graph.comm.rank}: gather takes one row per own node, expected {ids.numel()} rows, "
            f"got {rows.size(0)}; of some nodes, gather all rows and the mask, and take rows[mask] on rank 0"
        )
    comm = graph.comm
    if path is not None:
        fail_together(comm, "gather: table", lambda: _check_table(graph, path), ValueError, MissingDependencyError)

    own = (rows.detach().contiguous(), "gather rows"), (ids.to(comm.device), "gather ids")
    parts, id_parts = (comm.all_to_all([one] + [one[:0]] * (comm.size - 1), label) for one, label in own)
    if comm.rank != 0:
        return None
    out = rows.new_empty((total, *rows.shape[1:]))
    for part, part_ids in zip(parts, id_parts):
        out[part_ids.to(out.device)] = part.to(out.device)
    if path is not None:
        numbers = out.float() if out.dtype == torch.bfloat16 else out  # NumPy has no bfloat16
        with tells_of_full_disk(path, numbers.nbytes):
            graph.tables.write(path, numbers.cpu().numpy(), node_type)
    return out


def _check_table(graph: ShardedGraph, path: Path) -> None:
    """Raise unless rank 0 can write the table."""
    if path.suffix != ".parquet":
        raise ValueError(f"gather writes a Parquet table: the name of {path} must end with .parquet")
    if graph.comm.rank == 0:
        graph.tables.check()
