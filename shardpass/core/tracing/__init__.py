"""What a layer computes: its message function, watched while it runs on a few edges, becomes a structure of reductions.

This room sees one piece of edges at a time. It does not communicate and knows no shards of other ranks.
"""

from shardpass.core.following import writes_in_place
from shardpass.core.tracing.edge_trace import (
    HARMLESS_OPS,
    INDEX_OPS,
    METADATA_OPS,
    SCATTERS,
    SHAPE_OPS,
    Drops,
    EdgeTrace,
    Phase,
    StopPass,
    tensors_in,
)
from shardpass.core.tracing.findings import Dependence, Findings
from shardpass.core.tracing.formula import MOST_TABLES, Formula, Leaf, Step
from shardpass.core.tracing.linear_maps import EndSide, LinearMap
from shardpass.core.tracing.probing import conditions, probe, sample_inputs, structure_of
from shardpass.core.tracing.program import Inputs, Key, NeedsMessagesError, Program, Side, Sides
from shardpass.core.tracing.reducers import REDUCERS, Base, Extremum, State, accumulator_dtype, expand_index, rescale
from shardpass.core.tracing.rowwise import check_row_wise, rows_apart
from shardpass.core.tracing.scores import AdditiveScore, DotScore, MixedScore, Score
from shardpass.core.tracing.structure import KERNEL_FORMS, Attention, Messages, Reduction, Structure

__all__ = [
    "HARMLESS_OPS",
    "INDEX_OPS",
    "KERNEL_FORMS",
    "METADATA_OPS",
    "MOST_TABLES",
    "REDUCERS",
    "SCATTERS",
    "SHAPE_OPS",
    "AdditiveScore",
    "Attention",
    "Base",
    "Dependence",
    "DotScore",
    "Drops",
    "EdgeTrace",
    "EndSide",
    "Extremum",
    "Findings",
    "Formula",
    "Inputs",
    "Key",
    "Leaf",
    "LinearMap",
    "Messages",
    "MixedScore",
    "NeedsMessagesError",
    "Phase",
    "Program",
    "Reduction",
    "Score",
    "Side",
    "Sides",
    "State",
    "Step",
    "StopPass",
    "Structure",
    "accumulator_dtype",
    "check_row_wise",
    "conditions",
    "expand_index",
    "probe",
    "rescale",
    "rows_apart",
    "sample_inputs",
    "structure_of",
    "tensors_in",
    "writes_in_place",
]
