"""PyG's `Data` and `HeteroData`. torch_geometric is not imported: whoever has such an object has imported it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from shardpass.data.raw import EDGE, NODE, RawGraph, Scalar
from shardpass.data.readers.mapping import as_scalar, edge_ends, is_scalar
from shardpass.data.readers.sparse_matrix import is_sparse, with_edges_of_pyg
from shardpass.data.rows import as_tensor


def is_pyg(data: Any, name: str) -> bool:
    """Whether `data` is a PyG object of the class `name` of `torch_geometric.data`."""
    kind = getattr(sys.modules.get("torch_geometric.data"), name, None)
    return kind is not None and isinstance(data, kind)


def read_data(data: Any, drop: Collection[str] = (), node_id: str | None = None) -> RawGraph:
    """The graph of a `Data`: every field, by PyG's own rule of what is per node and per edge. `node_id` is per node."""
    data, what = with_edges_of_pyg(data), "the Data object"
    drop = {*drop, "ptr"} if is_pyg(data, "Batch") else drop  # which says no more than batch
    ends = edge_ends(_edge_index(data, what), "edge_index")
    num_nodes = _num_nodes(data, what)
    links, of_graphs = _links(data, drop), _of_graphs(data, drop)
    node_fields, edge_fields, others = _sorted_fields(data, {*drop, *links, *of_graphs}, node_id)
    counts = num_nodes, ends.src.shape[0]
    scalars = {
        name: _graph_field(name, value, _unplaced(name, value, "", node_fields, others, counts))
        for name, value in others.items()
    }
    return RawGraph(
        {NODE: num_nodes},
        {EDGE: ends},
        {NODE: node_fields},
        {EDGE: edge_fields},
        {**scalars, **of_graphs},
        "torch_geometric Data",
        links={EDGE: links} if links else {},
    )


def read_hetero(data: Any, drop: Collection[str] = (), node_id: str | None = None) -> RawGraph:
    """The graph of a `HeteroData`, every field included. `node_id` is per node, where a type has it."""
    if is_pyg(data, "Batch"):
        raise ValueError(
            "a Batch of HeteroData has no readout by graph here, since rows of one type of several graphs cannot be "
            "pooled over ranks: take the graphs of batch.to_data_list() one by one"
        )
    data = with_edges_of_pyg(data)
    num_nodes, edges, fields, links = {}, {}, {}, {}
    for kind in data.node_types:
        num_nodes[kind] = _num_nodes(data[kind], f"node type {kind!r}")
    for kind in data.edge_types:
        edges[kind] = edge_ends(_edge_index(data[kind], f"edge type {kind}"), f"edge_index of {kind}")
    for kind in (*num_nodes, *edges):
        links[kind] = {} if kind in num_nodes else _links(data[kind], drop)
        ids = node_id if kind in num_nodes else None
        of_nodes, of_edges, others = _sorted_fields(data[kind], {*drop, *links[kind]}, ids)
        if others:  # one type has no place for numbers and strings of its own
            name, value = next(iter(others.items()))
            counts = num_nodes.get(kind), len(edges[kind].src) if kind in edges else None
            raise ValueError(_unplaced(name, value, f" of {kind!r}", of_nodes, others, counts))
        fields[kind] = of_nodes if kind in num_nodes else of_edges
    scalars = {name: _graph_field(name, value) for name, value in data._global_store.items() if name not in drop}
    node_fields, edge_fields = ({kind: fields[kind] for kind in kinds} for kinds in (num_nodes, edges))
    links = {kind: fields for kind, fields in links.items() if fields}
    source = "torch_geometric HeteroData"
    return RawGraph(num_nodes, edges, node_fields, edge_fields, scalars, source, links=links)


def _links(store: Any, drop: Collection[str]) -> dict[str, Any]:
    """Pairs of nodes to score, ``edge_label_index``, and their labels, ``edge_label``, as `RandomLinkSplit` makes."""
    found = {}
    for index, pairs in store.items():
        name = index.removesuffix("_index")
        is_links = name not in (index, "edge") and (name.endswith("edge_label") or name in store)
        if not is_links or index in drop or getattr(pairs, "ndim", 0) != 2 or len(pairs) != 2:
            continue
        found[index] = pairs
        if name not in drop and getattr(store.get(name), "shape", ())[:1] == pairs.shape[1:]:
            found[name] = store[name]
    return found


def _of_graphs(data: Any, drop: Collection[str]) -> dict[str, Any]:
    """The fields with a row for each graph: of a PyG `Batch`, whose graphs are joined to one here, or of one graph."""
    found, count = {}, data.num_graphs if is_pyg(data, "Batch") else 1
    for name, value in data.items():
        if name in drop or "edge" in name or is_sparse(value) or getattr(value, "shape", ())[:1] != (count,):
            continue
        if data.is_node_attr(name):
            continue
        if count == data.num_edges and not is_pyg(data, "Batch"):
            continue
        if count == data.num_edges:
            raise ValueError(
                f"field {name!r} has {count} rows, as many as there are graphs, and edges: if it is per edge, let "
                f"its name begin with edge_; if it is per graph, leave it out with drop=[{name!r}] of "
                f"shardpass.shard or shardpass.data.read, and give it to your script yourself"
            )
        found[name] = as_tensor(value, f"field {name!r}")
    return found


def _sorted_fields(
    store: Any, drop: Collection[str], node_id: str | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The fields of a PyG storage that are per node, those that are per edge, and all others."""
    of_nodes, of_edges, others = {}, {}, {}
    for name, value in store.items():
        if name in ("edge_index", "num_nodes", *drop) or value is None:
            continue
        has_rows = len(getattr(value, "shape", ())) > 0
        if name == node_id or (has_rows and store.is_node_attr(name)):
            of_nodes[name] = value
        elif has_rows and store.is_edge_attr(name):
            of_edges[name] = value
        else:
            others[name] = value
    return of_nodes, of_edges, others


def _graph_field(name: str, value: Any, words: str = "") -> Scalar:
    if not is_scalar(value):
        raise ValueError(words or _unplaced(name, value))
    return as_scalar(value)


def _unplaced(
    name: str, value: Any, where: str = "", nodes: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None, counts: tuple[int | None, int | None] = (None, None),
) -> str:  # fmt: skip
    """Why the field cannot be kept.

    Args:
        nodes: the fields that are per node. others: those that are neither per node nor per edge.
        counts: nodes and edges, where they are known.
    """
    shape = f"of the shape {list(value.shape)}" if hasattr(value, "shape") else f"({type(value).__name__})"
    rows = f", the rows of {', '.join(nodes)}" if nodes else ""
    of_nodes, of_edges = ("" if n is None else f" ({n}{more})" for n, more in zip(counts, (rows, "")))
    return (
        f"field {name!r}{where} {shape} is neither per node{of_nodes}, nor per edge{of_edges}, nor one number or "
        f"string of the graph, so it cannot be kept: correct it, delete it from the object, or leave it out with "
        f"drop=[{name!r}] of shardpass.shard or shardpass.data.read{_or_else(name, value, nodes or {}, others or {})}"
    )


def _or_else(name: str, value: Any, nodes: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """What else the mistake may be, the end of an error sentence."""
    if isinstance(value, list | tuple):
        return f"; if it holds the ids of the nodes, pass node_id={name!r} to shardpass.partition"
    if is_sparse(value):
        return f"; if it holds features, pass torch.from_numpy({name}.toarray())"
    if not nodes or "edge" in name or not getattr(value, "shape", ()):
        return ""
    alike = [other for other, rows in others.items() if getattr(rows, "shape", ())[:1] == value.shape[:1]]
    return f". If there are {value.shape[0]} nodes, the rows of {', '.join(alike)}, correct {', '.join(nodes)} instead"


def _edge_index(store: Any, what: str) -> Any:
    if "edge_index" not in store:
        hints = {
            "adj": "; torch_geometric.utils.dense_to_sparse makes it of a dense matrix",
            "face": "; torch_geometric.transforms.FaceToEdge() makes it of face",
        }
        raise ValueError(f"{what} has no edge_index{next((hints[name] for name in hints if name in store), '')}")
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
