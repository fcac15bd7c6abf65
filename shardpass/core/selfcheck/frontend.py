"""What the self-check asks of a frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Options, Ranks

Fields = dict[Any, dict[str, Tensor]]
"""Tensors by node or edge type and name."""


@dataclass(frozen=True)
class Frontend:
    """What the self-check asks of a frontend.

    Args:
        wrap: the model, ready for a sharded graph, without a check of its own.
        run: what a function of a communicator returns on each of some in-process ranks.
        shard: a rank's share of a small graph: ``(num_nodes, edges, owners, comm, options)``, all by type.
        core_of: the engine's graph that an argument of the model stands for; None where it is not a graph.
        fields_of: node and edge fields that the model may read from an argument that is a graph.
        whole: what an unmodified model takes for the graph: ``(num_nodes, edges, fields)``, by type.
        sharded: what a wrapped model takes: ``(share, own rows of the fields)``.
        every_node: whether every node of the small graph needs an in-edge.
    """

    wrap: Callable[[nn.Module, Ranks], nn.Module]
    run: Callable[[Callable[[Ranks], Any], int], list[Any]]
    shard: Callable[[dict[Any, int], dict[Any, Tensor], dict[Any, Tensor], Ranks, Options], ShardedGraph]
    core_of: Callable[[Any], ShardedGraph | None]
    fields_of: Callable[[Any], Mapping[Any, Mapping[str, Tensor]]]
    whole: Callable[[dict[Any, int], dict[Any, Tensor], Fields], Any]
    sharded: Callable[[ShardedGraph, Fields], Any]
    every_node: bool = False
