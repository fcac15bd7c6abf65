"""The graph that fetches all halo rows at once, under the name of SAR's module for it."""

from shardpass.frontends.sar.core.graphshard import DistributedBlock

__all__ = ["DistributedBlock"]
