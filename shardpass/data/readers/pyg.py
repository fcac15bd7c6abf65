"""PyG's `Data` and `HeteroData`. torch_geometric is not imported: whoever has such an object has imported it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from typing import Any

from shardpass.data.raw import EDGE, NODE, EdgeArrays, EdgeType, RawGraph, Scalar
from shardpass.data.readers.mapping import as_scalar, edge_ends, is_scalar


def is_pyg(data: Any, name: str) -> bool:
    """Whether `data` is a PyG object of the class `name` of `torch_geometric.data`."""
    kind = getattr(sys.modules.get("torch_geometric.data"), name, None)
    return kind is not None and isinstance(data, kind)


def read_data(data: Any, drop: Collection[str] = ()) -> RawGraph:
    """The graph of a `Data`: every field, by PyG's own rule of what is per node and per edge."""
    num_nodes = _num_nodes(data, "the Data object")
    ends = edge_ends(_edge_index(data, "the Data object"), "edge_index")
    node_fields, edge_fields, graph_fields = _sorted_fields(data, drop, "", ("edge_index",))
    source = "torch_geometric Data"
    return RawGraph({NODE: num_nodes}, {EDGE: ends}, {NODE: node_fields}, {EDGE: edge_fields}, graph_fields, source)


def read_hetero(data: Any, drop: Collection[str] = ()) -> RawGraph:
    """The graph of a `HeteroData`, every field included."""
    num_nodes: dict[str, int] = {}
    edges: dict[EdgeType, EdgeArrays] = {}
    node_fields, edge_fields = {}, {}
    graph_fields: dict[str, Scalar] = {}
    for kind in data.node_types:
        num_nodes[kind] = _num_nodes(data[kind], f"node type {kind!r}")
        node_fields[kind], _, _ = _sorted_fields(data[kind], drop, f" of {kind!r}", ())
    for kind in data.edge_types:
        edges[kind] = edge_ends(_edge_index(data[kind], f"edge type {kind}"), f"edge_index of {kind}")
        _, edge_fields[kind], _ = _sorted_fields(data[kind], drop, f" of {kind}", ("edge_index",))
    for name, value in data._global_store.items():
        if name not in drop:
            graph_fields[name] = _graph_field(name, value, "")
    source = "torch_geometric HeteroData"
    return RawGraph(num_nodes, edges, node_fields, edge_fields, graph_fields, source)


def _sorted_fields(
    store: Any, drop: Collection[str], where: str, skip: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Scalar]]:
    """The node, edge and graph fields of a PyG storage; of one type, when it belongs to a `HeteroData`."""
    node_fields, edge_fields, graph_fields = {}, {}, {}
    for name, value in store.items():
        if name in skip or name in drop or name == "num_nodes" or value is None:
            continue
        if hasattr(value, "shape") and len(value.shape) > 0 and store.is_node_attr(name):
            node_fields[name] = value
        elif hasattr(value, "shape") and len(value.shape) > 0 and store.is_edge_attr(name):
            edge_fields[name] = value
        elif where:  # one type of a HeteroData has no place for numbers and strings of its own
            raise ValueError(_unplaced(name, value, where))
        else:
            graph_fields[name] = _graph_field(name, value, where)
    return node_fields, edge_fields, graph_fields


def _graph_field(name: str, value: Any, where: str) -> Scalar:
    if not is_scalar(value):
        raise ValueError(_unplaced(name, value, where))
    return as_scalar(value)


def _unplaced(name: str, value: Any, where: str) -> str:
    shape = f"of the shape {list(value.shape)}" if hasattr(value, "shape") else f"({type(value).__name__})"
    return (
        f"field {name!r}{where} {shape} is neither per node, nor per edge, nor one number or string of the graph, "
        f"so it cannot be kept: delete it from the object, or leave it out with "
        f"shardpass.data.read(data, drop=[{name!r}])"
    )


def _edge_index(store: Any, what: str) -> Any:
    if "edge_index" not in store:
        hint = "; it holds adj_t: do not apply ToSparseTensor before partitioning" if "adj_t" in store else ""
        raise ValueError(f"{what} has no edge_index{hint}")
    return store["edge_index"]


def _num_nodes(store: Any, what: str) -> int:
    if "num_nodes" in store:
        return int(store["num_nodes"])
    names = [name for name, value in store.items() if name != "edge_index" and hasattr(value, "shape")]
    with warnings.catch_warnings():
        # without x PyG guesses from the largest id in edge_index, with a warning; a field of that length confirms it
        warnings.simplefilter("ignore")
        if not any(store.is_node_attr(name) for name in names):
            raise ValueError(f"the number of nodes of {what} is unknown: no field tells it; set its num_nodes")
        return int(store.num_nodes)
