"""What travels when: the rows that a rank needs of every other rank, the order of the rounds, and carrying it out.

This room moves rows and gradients of rows between ranks. It does no mathematics on edges.
"""

from shardpass.core.exchange.covers import can_cover, minimum_cover
from shardpass.core.exchange.halo import HaloPlan, build_halo_plan, halo_plan_of, node_set
from shardpass.core.exchange.packing import MESSAGE_BUFFER, Packing
from shardpass.core.exchange.schedule import Schedule, Transfer
from shardpass.core.exchange.tokens import WalkId
from shardpass.core.exchange.transfer import (
    carry,
    extremum_at_owners,
    gather_halo,
    halo_fetch,
    scatter_to_owners,
    sum_to_owners,
)
from shardpass.core.exchange.walk import GradientReturn, fetch_blocks
from shardpass.core.exchange.windows import WindowPool, shares_all_rows, shares_rows
from shardpass.core.exchange.wire import Routed, ask, exchange_arrays, exchange_rows

__all__ = [
    "MESSAGE_BUFFER",
    "GradientReturn",
    "HaloPlan",
    "Packing",
    "Routed",
    "Schedule",
    "Transfer",
    "WalkId",
    "WindowPool",
    "ask",
    "build_halo_plan",
    "can_cover",
    "carry",
    "exchange_arrays",
    "exchange_rows",
    "extremum_at_owners",
    "fetch_blocks",
    "gather_halo",
    "halo_fetch",
    "halo_plan_of",
    "minimum_cover",
    "node_set",
    "scatter_to_owners",
    "shares_all_rows",
    "shares_rows",
    "sum_to_owners",
]
