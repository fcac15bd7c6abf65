"""The outermost forward of a wrapped model: the self-check, one order of backward, recomputed activations.

Both frontends use it. It knows modules and ranks; what stands for a graph is the frontend's.
"""

from shardpass.core.wrapping.outermost import OutermostCall, Unchecked

__all__ = ["OutermostCall", "Unchecked"]
