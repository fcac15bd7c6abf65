"""One shard's partial result, added in place into an accumulator: sums, extrema, dot products, attention.

`reference` defines what is right. The other kernels (numba, Triton) are faster and are tested against it. This room
knows one shard and tensors; it knows no ranks.
"""

from shardpass.core.kernels import fused
from shardpass.core.kernels.attention import accumulate, adjoint, softmax_weights
from shardpass.core.kernels.dispatch import (
    edge_dot,
    gather_extremum,
    gather_extremum_transposed,
    gather_sum,
    gather_sum_transposed,
)
from shardpass.core.kernels.runs import ClosedScores, EdgeRun, RowRun, SoftmaxState
from shardpass.core.kernels.scores import edge_scores, edge_scores_adjoint

__all__ = [
    "ClosedScores",
    "EdgeRun",
    "RowRun",
    "SoftmaxState",
    "accumulate",
    "adjoint",
    "edge_dot",
    "edge_scores",
    "edge_scores_adjoint",
    "fused",
    "gather_extremum",
    "gather_extremum_transposed",
    "gather_sum",
    "gather_sum_transposed",
    "softmax_weights",
]
