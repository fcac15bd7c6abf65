"""What travels when: the rows that a rank needs of every other rank, the order of the rounds, and carrying it out.

This room moves rows and gradients of rows between ranks. It does no mathematics on edges.
"""

from shardpass.core.exchange.halo import HaloPlan, build_halo_plan
from shardpass.core.exchange.packing import Packing
from shardpass.core.exchange.schedule import Schedule, Transfer
from shardpass.core.exchange.tokens import Stream
from shardpass.core.exchange.transfer import carry, halo_fetch, halo_push
from shardpass.core.exchange.walk import GradientReturn, fetch_blocks
from shardpass.core.exchange.windows import WindowPool, shares_rows

__all__ = [
    "GradientReturn",
    "HaloPlan",
    "Packing",
    "Schedule",
    "Stream",
    "Transfer",
    "WindowPool",
    "build_halo_plan",
    "carry",
    "fetch_blocks",
    "halo_fetch",
    "halo_push",
    "shares_rows",
]
