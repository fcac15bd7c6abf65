"""What wrapping a model takes: what is refused; and in its outermost call rows followed and one order of backward.

Both frontends use it. It knows modules and ranks; what stands for a graph is the frontend's.
"""

from shardpass.core.wrapping.empty_rows import EmptyRows
from shardpass.core.wrapping.followed_calls import FollowedCalls
from shardpass.core.wrapping.outermost import OutermostCall, replaced_forward
from shardpass.core.wrapping.parts import runs_as_it_is
from shardpass.core.wrapping.refusals import (
    has_unknown_statistics,
    ordinary_graph,
    refuse_as_built,
    refuse_modules,
    refuse_other_library,
)
from shardpass.core.wrapping.replacing import copy_of, make_outermost, with_names
from shardpass.core.wrapping.shared_copy import shared_copy

__all__ = [
    "EmptyRows",
    "FollowedCalls",
    "OutermostCall",
    "copy_of",
    "has_unknown_statistics",
    "make_outermost",
    "ordinary_graph",
    "refuse_as_built",
    "refuse_modules",
    "refuse_other_library",
    "replaced_forward",
    "runs_as_it_is",
    "shared_copy",
    "with_names",
]
