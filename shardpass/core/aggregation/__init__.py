"""One sharded call: the ranks agree what it is, choose the cheapest way, run it, and finish it.

`aggregate` is the entry. Forward aggregates over the blocks of source rows one after the other. Backward walks the
blocks again and sends gradients to the owners of the sources, or lets the owners pull them over the out-edges.
"""

from shardpass.core.aggregation.sharded_call import aggregate
from shardpass.core.aggregation.whole_neighbourhoods import AtOnce, inputs_at_once

__all__ = [
    "AtOnce",
    "aggregate",
    "inputs_at_once",
]
