"""Mini-batches of sampled neighbours, drawn from the sharded graph by collectives.

This room gives ids and tensors. The frontends make batches of PyG or DGL of them.
"""

from shardpass.core.sampling.drawing import keys_of, uniforms
from shardpass.core.sampling.fetch import IDS, RowFetcher
from shardpass.core.sampling.loader import EpochLoader, Epochs, Settings, agree_on, own_communicator
from shardpass.core.sampling.lookup import global_ids
from shardpass.core.sampling.neighbours import Drawer
from shardpass.core.sampling.sample import Sample, sample
from shardpass.core.sampling.seeds import Seeds, is_short
from shardpass.core.sampling.shared import share_structure
from shardpass.core.sampling.source import in_edges, source_of
from shardpass.core.sampling.structure import SampledSource

__all__ = [
    "IDS",
    "Drawer",
    "EpochLoader",
    "Epochs",
    "RowFetcher",
    "Sample",
    "SampledSource",
    "Seeds",
    "Settings",
    "agree_on",
    "global_ids",
    "in_edges",
    "is_short",
    "keys_of",
    "own_communicator",
    "sample",
    "share_structure",
    "source_of",
    "uniforms",
]
