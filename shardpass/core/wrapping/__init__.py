"""The outermost call of a wrapped model: rows followed, one order of backward, recomputed activations.

Both frontends use it. It knows modules and ranks; what stands for a graph is the frontend's.
"""

from shardpass.core.wrapping.outermost import FollowedCalls, OutermostCall

__all__ = ["FollowedCalls", "OutermostCall"]
