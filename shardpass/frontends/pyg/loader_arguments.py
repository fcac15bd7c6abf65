"""What the arguments of loaders mean, and the words for those that mean nothing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.graphs import ShardedGraph
from shardpass.core.sampling import Settings
from shardpass.core.sharding import EdgeType, NodeType

Array = Any

_REASONS = {
    "num_workers": "batches are made in a thread of this process; `prefetch` says how many ahead",
    "subgraph_type": 'only the edges that were drawn are in a batch ("directional")',
    "directed": "only the edges that were drawn are in a batch",
    "disjoint": "a batch is one subgraph",
    "time_attr": "there is no temporal sampling",
    "input_time": "there is no temporal sampling",
    "temporal_strategy": "there is no temporal sampling",
    "edge_label_time": "there is no temporal sampling",
    "sampler": "seeds are dealt out to all ranks together; choose them by input_nodes",
    "batch_sampler": "seeds are dealt out to all ranks together; choose them by input_nodes",
    "generator": "everything random follows from `seed`",
    "worker_init_fn": "batches are made in a thread of this process",
    "neighbor_sampler": "ranks draw neighbours together",
    "transform_sampler_output": "use `transform`",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "num_workers": (0,),
    "subgraph_type": ("directional",),
    "directed": (True,),
    "disjoint": (False,),
    "temporal_strategy": ("uniform",),
    "is_sorted": (True, False),
    "filter_per_worker": (None, True, False),
    "persistent_workers": (True, False),
    "pin_memory": (False,),
}


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
    """What the arguments that the loaders have in common come to; `NeighborLoader` says what they mean.

    Raises:
        TypeError, ValueError: the argument that is wrong, in the words of `refuse`, `fanouts_of` and `wanted_fields`.
    """
    if not isinstance(graph, ShardedGraph):
        raise TypeError(f"{name} takes the graph that shardpass.load returned, found a {type(graph).__name__}")
    refuse(name, others)
    node_fields, edge_fields = wanted_fields(graph, node_attrs, edge_attrs)
    return Settings(
        fanouts_of(graph, num_neighbors), batch_size, shuffle, drop_last, replace, weight_attr, seed, prefetch,
        node_fields, edge_fields, wire=graph.options.wire_dtype,
    )  # fmt: skip


def refuse(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise for arguments of PyG's loaders that would change what is sampled and are not there.

    Raises:
        TypeError: names the first, with the reason.
    """
    for argument, value in kwargs.items():
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
        ValueError: a type that is not there, or what is neither a mask nor rows, or a row that comes twice.
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


def fanouts_of(graph: ShardedGraph, num_neighbors: Any) -> list[dict[EdgeType, int]]:
    """The fanout of each hop by edge type.

    Raises:
        ValueError: what is no list, an empty one, lists of different lengths, an unknown edge type, or a number below
            -1.
    """
    if not isinstance(num_neighbors, Mapping):
        given = {kind: _one_per_hop(num_neighbors) for kind in graph.edge_types}
    else:
        unknown = [kind for kind in num_neighbors if kind not in graph.edge_types]
        missing = [kind for kind in graph.edge_types if kind not in num_neighbors]
        if unknown or missing:
            raise ValueError(
                f"num_neighbors by edge type has {'unknown' if unknown else 'no entry for'} {(unknown or missing)[0]}; "
                f"expected a list for each of {graph.edge_types}"
            )
        given = {kind: _one_per_hop(num_neighbors[kind]) for kind in graph.edge_types}
    lengths = {len(numbers) for numbers in given.values()}
    if len(lengths) != 1:
        raise ValueError(f"num_neighbors has lists of different lengths: {given}; expected one number per hop")
    for numbers in given.values():
        for number in numbers:
            if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < -1:
                raise ValueError(f"num_neighbors holds {number!r}; expected an integer, -1 for all in-neighbours")
    return [{kind: int(numbers[hop]) for kind, numbers in given.items()} for hop in range(lengths.pop())]


def _one_per_hop(numbers: Any) -> list[Any]:
    found = numbers.tolist() if isinstance(numbers, (Tensor, np.ndarray)) else numbers
    if not isinstance(found, (list, tuple)) or not found:
        raise ValueError(f"num_neighbors is {numbers!r}; expected a list of one number per hop, such as [10, 5]")
    return list(found)


def wanted_fields(
    graph: ShardedGraph, node_attrs: Sequence[str] | None, edge_attrs: Sequence[str] | None
) -> tuple[dict[NodeType, list[str]], dict[EdgeType, list[str]]]:
    """The fields that come with a batch, by type: those named that a type has, or all.

    Raises:
        ValueError: a name that no type has.
    """
    nodes = {kind: sorted(graph.fields_of(kind)) for kind in graph.node_types}
    edges = {kind: sorted(graph.relations[kind].fields) for kind in graph.edge_types}
    return _chosen("node", nodes, node_attrs), _chosen("edge", edges, edge_attrs)


def _chosen(what: str, stored: dict[Any, list[str]], names: Sequence[str] | None) -> dict[Any, list[str]]:
    if names is None:
        return stored
    if isinstance(names, str):
        raise ValueError(f"{what}_attrs is {names!r}; expected a list of names, such as [{names!r}]")
    for name in names:
        if not any(name in held for held in stored.values()):
            raise ValueError(f"{what}_attrs names {name!r}, which is not stored; there are: {stored}")
    return {kind: [name for name in held if name in names] for kind, held in stored.items()}
