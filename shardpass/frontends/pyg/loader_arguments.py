"""The arguments of the loaders: what they mean, and why some of PyG's are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.graphs import ShardedGraph
from shardpass.core.sampling import Settings
from shardpass.core.sharding import EdgeType, NodeType

Array = np.ndarray[Any, Any]

_GROUPS = (
    (
        "num_workers worker_init_fn",
        "batches are made in a thread of this process; `prefetch` is the number that it makes ahead",
    ),
    ("subgraph_type directed", 'a batch holds only the edges that were drawn ("directional")'),
    ("disjoint", "a batch is one subgraph"),
    ("time_attr input_time temporal_strategy edge_label_time", "there is no temporal sampling"),
    ("sampler batch_sampler", "seeds are dealt out to all ranks together; choose them by input_nodes"),
    ("generator", "everything random follows from `seed`"),
    ("neighbor_sampler", "ranks draw neighbours together"),
    ("transform_sampler_output", "use `transform`"),
)
_REASONS = {name: reason for names, reason in _GROUPS for name in names.split()}
"""Why an argument of PyG's loaders is not supported here."""
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "num_workers": (0,),
    "subgraph_type": ("directional",),
    "directed": (True,),
    "disjoint": (False,),
    "temporal_strategy": ("uniform",),
    "is_sorted": (True, False),
    "filter_per_worker": (True, False),
    "persistent_workers": (True, False),
    "pin_memory": (False,),
}
"""Values besides `None` that ask for nothing else than what is done here."""


def settings_of(
    name: str,
    graph: ShardedGraph,
    num_neighbors: Any,
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    drop_last: bool = False,
    replace: bool = False,
    weight_attr: str | None = None,
    seed: int = 0,
    prefetch: int = 2,
    node_attrs: Sequence[str] | None = None,
    edge_attrs: Sequence[str] | None = None,
    **others: Any,
) -> Settings:
    """The settings that the arguments of both loaders give; `NeighborLoader` documents them.

    Raises:
        TypeError, ValueError: naming the argument that is wrong.
    """
    if not isinstance(graph, ShardedGraph):
        raise TypeError(f"{name} takes the graph that shardpass.load or shard returned, found a {type(graph).__name__}")
    _refuse(name, others)
    nodes = {kind: sorted(graph.fields_of(kind)) for kind in graph.node_types}
    edges = {kind: sorted(graph.relations[kind].fields) for kind in graph.edge_types}
    return Settings(
        _fanouts_of(graph, num_neighbors), batch_size, shuffle, drop_last, replace, weight_attr, seed, prefetch,
        _chosen("node", nodes, node_attrs), _chosen("edge", edges, edge_attrs), wire=graph.options.wire_dtype,
    )  # fmt: skip


def _refuse(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise for the first argument of PyG's loaders that would change what is sampled."""
    for argument, value in arguments.items():
        if value is None or any(value is known or value == known for known in _HARMLESS.get(argument, ())):
            continue
        reason = _REASONS.get(argument)
        raise TypeError(
            f"{name} got {argument}={value!r}, which is not supported on a sharded graph"
            + (f": {reason}" if reason else "; see help(shardpass.pyg.NeighborLoader) for its arguments")
        )


def own_rows(graph: ShardedGraph, input_nodes: Any) -> tuple[NodeType, Array]:
    """``(type, rows)``: the seeds among own nodes, int64.

    Raises:
        ValueError: an unknown type; neither a mask nor rows; a row out of range; a row twice.
    """
    kind, nodes = _type_and_nodes(graph, input_nodes)
    if kind not in graph.ownership:
        raise ValueError(f"input_nodes are of type {kind!r}; expected one of {graph.node_types}")
    num = graph.ownership[kind].num_own(graph.comm.rank)
    if nodes is None:
        return kind, np.arange(num)
    where = f"rank {graph.comm.rank}: input_nodes"
    if isinstance(nodes, str):
        raise ValueError(f"{where} is {nodes!r}; expected a bool mask or own rows, such as graph.{nodes}")
    given = nodes if isinstance(nodes, Tensor) else torch.as_tensor(nodes)
    if given.dtype == torch.bool:
        if given.shape != (num,):
            raise ValueError(f"{where} is a mask {list(given.shape)}; expected one entry per own node, [{num}]")
        return kind, given.nonzero().view(-1).cpu().numpy()
    if given.dim() != 1 or (given.is_floating_point() and given.numel()) or given.dtype == torch.uint8:
        raise ValueError(f"{where} is {given.dtype} {list(given.shape)}; expected a bool mask or own rows, int64 [n]")
    rows = given.cpu().numpy().astype(np.int64)
    if len(rows) and not 0 <= rows.min() <= rows.max() < num:
        raise ValueError(
            f"{where} holds {rows.min() if rows.min() < 0 else rows.max()}; expected own rows in [0, {num}). A node of "
            f"the whole graph is given by the rank that owns it: graph.node_ids holds its original ids"
        )
    if len(np.unique(rows)) != len(rows):
        raise ValueError(f"{where} holds a row twice; expected each once")
    return kind, rows


def _type_and_nodes(graph: ShardedGraph, input_nodes: Any) -> tuple[Any, Any]:
    if graph.is_homogeneous:
        return graph.node_types[0], input_nodes
    if isinstance(input_nodes, str):
        return input_nodes, None
    if isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 and isinstance(input_nodes[0], str):
        return input_nodes[0], input_nodes[1]
    raise ValueError(
        f"input_nodes of a heterogeneous graph is a node type, or a pair of it and nodes, as in ('paper', mask); found "
        f"{type(input_nodes).__name__}; types: {graph.node_types}"
    )


def _fanouts_of(graph: ShardedGraph, num_neighbors: Any) -> list[dict[EdgeType, int]]:
    """The fanout of each hop by edge type."""
    by_type = num_neighbors if isinstance(num_neighbors, Mapping) else dict.fromkeys(graph.edge_types, num_neighbors)
    wrong = [f"unknown {kind}" for kind in by_type if kind not in graph.edge_types]
    wrong += [f"no entry for {kind}" for kind in graph.edge_types if kind not in by_type]
    if wrong:
        raise ValueError(f"num_neighbors by edge type has {wrong[0]}; expected a list for each of {graph.edge_types}")
    given = {kind: _one_per_hop(by_type[kind]) for kind in graph.edge_types}
    lengths = {len(numbers) for numbers in given.values()}
    if len(lengths) != 1:
        raise ValueError(f"num_neighbors has lists of different lengths: {given}; expected one number per hop")
    return [{kind: numbers[hop] for kind, numbers in given.items()} for hop in range(lengths.pop())]


def _one_per_hop(numbers: Any) -> list[int]:
    found = numbers.tolist() if isinstance(numbers, (Tensor, np.ndarray)) else numbers
    if not isinstance(found, (list, tuple)) or not found:
        raise ValueError(f"num_neighbors is {numbers!r}; expected a list of one number per hop, such as [10, 5]")
    for number in found:
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < -1:
            raise ValueError(f"num_neighbors holds {number!r}; expected an integer, -1 for all in-neighbours")
    return [int(number) for number in found]


def _chosen(what: str, stored: dict[Any, list[str]], names: Sequence[str] | None) -> dict[Any, list[str]]:
    """The fields that come with a batch, by type: those named, or all."""
    if names is None:
        return stored
    if isinstance(names, str):
        raise ValueError(f"{what}_attrs is {names!r}; expected a list of names, such as [{names!r}]")
    for name in names:
        if not any(name in held for held in stored.values()):
            raise ValueError(f"{what}_attrs names {name!r}, which is not stored; there are: {stored}")
    return {kind: [name for name in held if name in names] for kind, held in stored.items()}
