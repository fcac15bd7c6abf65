"""Mini-batches of sampled neighbours, drawn from the sharded graph by all ranks together.

This room computes with ids and tensors. The frontends make batches of PyG or DGL from its results.
"""

from shardpass.core.sampling.drawing import keys_of, uniforms
from shardpass.core.sampling.fetch import IDS
from shardpass.core.sampling.loader import EpochLoader, Sampler, Settings
from shardpass.core.sampling.negatives import negative_sampling
from shardpass.core.sampling.neighbours import Drawer
from shardpass.core.sampling.permutation import permuted_ids
from shardpass.core.sampling.sample import Sample, sample
from shardpass.core.sampling.seeds import Seeds, is_short
from shardpass.core.sampling.source import SampledSource, in_edges, share_structure, source_of

__all__ = [
    "IDS",
    "Drawer",
    "EpochLoader",
    "Sample",
    "SampledSource",
    "Sampler",
    "Seeds",
    "Settings",
    "in_edges",
    "is_short",
    "keys_of",
    "negative_sampling",
    "permuted_ids",
    "sample",
    "share_structure",
    "source_of",
    "uniforms",
]
