"""What wrapping a model takes: what is refused; and in its outermost call rows followed and one order of backward.

Both frontends use it. It knows modules and ranks; what stands for a graph is the frontend's.
"""

from shardpass.core.wrapping.empty_rows import EmptyRows
from shardpass.core.wrapping.outermost import FollowedCalls, OutermostCall, RowwisePart, replaced_forward
from shardpass.core.wrapping.parts import parts_of, rowwise_parts, runs_as_it_is
from shardpass.core.wrapping.refusals import has_unknown_statistics, refuse_modules, refuse_other_library

__all__ = [
    "EmptyRows",
    "FollowedCalls",
    "OutermostCall",
    "RowwisePart",
    "has_unknown_statistics",
    "parts_of",
    "refuse_modules",
    "refuse_other_library",
    "replaced_forward",
    "rowwise_parts",
    "runs_as_it_is",
]
