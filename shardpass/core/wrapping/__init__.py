"""What wrapping a model takes: what is refused; and in its outermost call the self-check and one order of backward.

Both frontends use it. It knows modules and ranks; what stands for a graph is the frontend's.
"""

from shardpass.core.wrapping.outermost import OutermostCall, Unchecked
from shardpass.core.wrapping.refusals import has_unknown_statistics, refuse_modules

__all__ = ["OutermostCall", "Unchecked", "has_unknown_statistics", "refuse_modules"]
