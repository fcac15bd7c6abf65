"""For tests of your own layers: small awkward graphs, and `assert_exact`, which compares sharded with whole."""

from shardpass.testing.exact import assert_exact, assert_same
from shardpass.testing.graphs import WholeGraph, assignments, awkward_graph, shard_in_memory
from shardpass.testing.hetero import (
    WholeHeteroGraph,
    awkward_hetero_graph,
    hetero_assignments,
    shard_hetero_in_memory,
)
from shardpass.testing.live_bytes import LiveBytes
from shardpass.testing.parity import Outcome, cotangent, differences, evaluate_sharded, evaluate_whole
from shardpass.testing.run import run

__all__ = [
    "LiveBytes",
    "Outcome",
    "WholeGraph",
    "WholeHeteroGraph",
    "assert_exact",
    "assert_same",
    "assignments",
    "awkward_graph",
    "awkward_hetero_graph",
    "cotangent",
    "differences",
    "evaluate_sharded",
    "evaluate_whole",
    "hetero_assignments",
    "run",
    "shard_hetero_in_memory",
    "shard_in_memory",
]
