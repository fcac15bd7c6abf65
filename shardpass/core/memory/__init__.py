"""What autograd saves between forward and backward: computed again, or kept in a file instead of in memory.

This room works on any torch module. It knows neither graphs nor shards.
"""

from shardpass.core.memory.offloading import offload
from shardpass.core.memory.recompute import Checkpoint, check_choice, recomputed_activations

__all__ = [
    "Checkpoint",
    "check_choice",
    "offload",
    "recomputed_activations",
]
