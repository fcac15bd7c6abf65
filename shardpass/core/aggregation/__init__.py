"""One sharded call: the ranks agree what it is, choose the cheapest way, run it, and finish it.

`aggregate` is the entry. Forward aggregates over the blocks of source rows one after the other; backward fetches the
blocks again, or pulls gradients over the out-edges.
"""

from shardpass.core.aggregation.attention import dropout_of_edges
from shardpass.core.aggregation.sharded_call import aggregate
from shardpass.core.aggregation.whole_neighbourhoods import AtOnce, inputs_at_once

__all__ = [
    "AtOnce",
    "aggregate",
    "dropout_of_edges",
    "inputs_at_once",
]
