"""Readers: everything that can be partitioned, as one checked `RawGraph`."""

from shardpass.data.readers.dispatch import read
from shardpass.data.readers.edge_list import read_edge_list

__all__ = ["read", "read_edge_list"]
