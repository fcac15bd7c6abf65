"""Follows the rows of nodes and edges through what a model computes, and refuses what mixes them, by name and line.

It knows tensors and operations. Which tensors hold rows of what, it is told.
"""

from shardpass.core.following.apart import Apart
from shardpass.core.following.draws import ForwardDraws, draws
from shardpass.core.following.follow import FollowRows, unfollowed_anywhere
from shardpass.core.following.functions import FollowFunctions
from shardpass.core.following.gradients import followed_hooks, function_of_user
from shardpass.core.following.judge import verdict_of
from shardpass.core.following.known import known_modules
from shardpass.core.following.marks import Known
from shardpass.core.following.outside import Around
from shardpass.core.following.own_numbers import own_number
from shardpass.core.following.refusals import first_refusal, state_beside_rows, whole_graph
from shardpass.core.following.row_count import OwnCount, OwnShape, RowCount, over_numpy, own_of
from shardpass.core.following.rows import Rows
from shardpass.core.following.scripts import follow_scripts
from shardpass.core.following.user_line import is_called_by, user_line
from shardpass.core.following.writes import writes_in_place

__all__ = [
    "Apart",
    "Around",
    "FollowFunctions",
    "FollowRows",
    "ForwardDraws",
    "Known",
    "OwnCount",
    "OwnShape",
    "RowCount",
    "Rows",
    "draws",
    "first_refusal",
    "follow_scripts",
    "followed_hooks",
    "function_of_user",
    "is_called_by",
    "known_modules",
    "over_numpy",
    "own_number",
    "own_of",
    "state_beside_rows",
    "unfollowed_anywhere",
    "user_line",
    "verdict_of",
    "whole_graph",
    "writes_in_place",
]
