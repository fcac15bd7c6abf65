"""Kernels that add the partial result of one shard to an accumulator: sums, extrema, dot products, attention.

What is right is defined in plain torch: sums by `reference`, scores by `scores`, extrema by the reducers of `tracing`.
The kernels of numba and Triton are faster and are tested against them. This room knows one shard and tensors; it knows
no ranks.
"""

from shardpass.core.kernels import fused
from shardpass.core.kernels.attention import accumulate, adjoint
from shardpass.core.kernels.cpu_loops import COMPILED_LOOPS, cut_edges
from shardpass.core.kernels.dispatch import edge_dot, gather_sum, gather_sum_transposed
from shardpass.core.kernels.dropout import dropout_factors
from shardpass.core.kernels.extremum import gather_extremum, gather_extremum_transposed, shares_of_edges, take_extremum
from shardpass.core.kernels.formula import FormulaEdges, FormulaLoop, handles_formulas
from shardpass.core.kernels.optional import optional_module
from shardpass.core.kernels.rows import gather_rows, scatter_rows, shaped
from shardpass.core.kernels.runs import (
    ClosedScores,
    EdgeRun,
    Outer,
    RowRun,
    ScoreGradients,
    SoftmaxState,
    by_destination,
    by_source,
)

__all__ = [
    "COMPILED_LOOPS",
    "ClosedScores",
    "EdgeRun",
    "FormulaEdges",
    "FormulaLoop",
    "Outer",
    "RowRun",
    "ScoreGradients",
    "SoftmaxState",
    "accumulate",
    "adjoint",
    "by_destination",
    "by_source",
    "cut_edges",
    "dropout_factors",
    "edge_dot",
    "fused",
    "gather_extremum",
    "gather_extremum_transposed",
    "gather_rows",
    "gather_sum",
    "gather_sum_transposed",
    "handles_formulas",
    "optional_module",
    "scatter_rows",
    "shaped",
    "shares_of_edges",
    "take_extremum",
]
