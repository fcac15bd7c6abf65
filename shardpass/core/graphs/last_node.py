"""The last node of the original graph: without an edge, the largest id of a list is not the number of nodes."""

from __future__ import annotations

from torch import Tensor

from shardpass.core.exchange import HaloPlan
from shardpass.core.following import user_line
from shardpass.core.ranks import torch_private
from shardpass.core.sharding import Derivation
from shardpass.errors import RefusedError

ROWS_READ = frozenset(["__getitem__", "__get__", "cat", "concat"])
"""What a function that adds self-loops does with a list once it knows the number of nodes."""


def row_of_last(node_ids: Tensor, num_nodes: int) -> int | None:
    """The own row of the last of `num_nodes` nodes; `None` if it is not among the original ids `node_ids`."""
    found = (node_ids == num_nodes - 1).nonzero()
    return int(found) if found.numel() else None


def lacks_last_node(plan: HaloPlan, edges: Derivation | None) -> bool:
    """Whether the last node is an own one, and no edge of a list is known to begin or end there.

    Args:
        edges: the list; `None` if it is not known how it was made of the graph's own.
    """
    row = plan.last_node
    if row is None or edges is None:
        return row is not None
    with plan.comm.unfollowed(), torch_private.DisableTorchFunctionSubclass():
        is_known = edges.has_edge_at(row) or (
            not edges.is_edited and any(bool((r == row).any()) for r in plan.send_rows)
        )
    return not is_known


def other_count(plan: HaloPlan) -> RefusedError:
    """The error where self-loops are added for more nodes than the whole list would give."""
    return RefusedError(
        f"{user_line()}: self-loops are added for as many nodes as the largest id of edge_index gives, as PyG does if "
        f"it is not told the number of nodes. But the last node of the original graph, on rank {plan.comm.rank}, has "
        f"no edge, so PyG would add none for the last nodes. Pass num_nodes=x.size(0), or add a self-loop at that node "
        f"before partitioning"
    )
