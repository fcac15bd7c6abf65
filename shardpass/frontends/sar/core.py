"""``sar.core``, in which scripts look for the classes of graphs."""

from __future__ import annotations

from shardpass.frontends.sar.graphshard import DistributedBlock, GraphShardManager
from shardpass.frontends.sar.modules import message_has_parameters

__all__ = ["DistributedBlock", "GraphShardManager", "message_has_parameters"]
