"""The DGL frontend: unmodified DGL models and DGL message passing on a sharded graph."""

from shardpass.errors import require

require("dgl", "dgl", "the DGL frontend")

from shardpass.frontends.dgl.convert import graph  # noqa: E402
from shardpass.frontends.dgl.loader import DataLoader  # noqa: E402
from shardpass.frontends.dgl.readouts import (  # noqa: E402
    broadcast_nodes,
    max_nodes,
    mean_nodes,
    softmax_nodes,
    sum_nodes,
)
from shardpass.frontends.dgl.wrap import exact, wrap  # noqa: E402

__all__ = [
    "DataLoader",
    "broadcast_nodes",
    "exact",
    "graph",
    "max_nodes",
    "mean_nodes",
    "softmax_nodes",
    "sum_nodes",
    "wrap",
]
