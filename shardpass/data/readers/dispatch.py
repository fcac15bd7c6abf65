"""`read`: whatever the user has, as one checked `RawGraph`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardpass.core.sharding import HOST
from shardpass.data.raw import RawGraph
from shardpass.data.readers.dgl import is_dgl, read_dgl
from shardpass.data.readers.dgl_partitions import read_dgl_partition
from shardpass.data.readers.graph_files import GraphFiles, stream_edge_list
from shardpass.data.readers.mapping import read_mapping
from shardpass.data.readers.npz import read_npz
from shardpass.data.readers.ogb import PREFIX, is_ogb, stream_ogb
from shardpass.data.readers.pyg import is_pyg, read_data, read_hetero
from shardpass.data.readers.sparse_matrix import is_sparse

_KNOWN = (
    "a PyG Data or HeteroData, a DGLGraph, a path to .npz or to the .json of a DGL partition, a dict of arrays, "
    "or a RawGraph (shardpass.data.read_edge_list makes one of an edge list with features)"
)
_LIBRARIES = {
    "networkx": ": pass torch_geometric.utils.from_networkx(graph)",
    "ase": ": pass a dict, {'edge_index': (j, i), 'pos': atoms.positions}, with i and j of ase.neighborlist",
    "meshio": (
        ": pass Data(pos=..., face=...) of its points and triangles, [3, num_triangles], after "
        "torch_geometric.transforms.FaceToEdge()"
    ),
}
"""What to pass in place of objects of a library."""


def read(
    data: Any, *, drop: Sequence[str] = (), node_id: str | None = None, device: torch.device | None = HOST,
    edges_are_known: bool = False,
) -> RawGraph:  # fmt: skip
    """The graph in `data`, checked, with its original node ids and edge order.

    Args:
        data: a PyG `Data` or `HeteroData`, a `DGLGraph`, the path of an `.npz` or of the `.json` of a
            DGL partition (see `read_dgl_partition`), a dict of arrays (see `read_mapping`) or a `RawGraph`. All fields
            are kept; one that can be placed nowhere is an error.
        drop: names of fields to leave out.
        node_id: the node field that holds your own ids, such as the list `name` of a `Data`: strings or any integers.
            They become the `names` of the graph.
        device, edges_are_known: see `RawGraph.validate`.

    Raises:
        ValueError, TypeError: what is wrong with the data: what was found, what is expected, what to do.
    """
    graph = _read(data, drop, node_id)
    if node_id is not None:
        graph = _named(graph, node_id)
    if drop:
        graph = replace(
            graph,
            node_fields={kind: _without(fields, drop) for kind, fields in graph.node_fields.items()},
            edge_fields={kind: _without(fields, drop) for kind, fields in graph.edge_fields.items()},
            graph_fields=_without(graph.graph_fields, drop),
        )
    return graph.validate(device=device, edges_are_known=edges_are_known)


def stream_files(data: Any, drop: Sequence[str] = (), keep: Sequence[str] = ()) -> GraphFiles | None:
    """What `data` names, if it is to be read piece by piece: a directory of files, or a dataset of OGB; else None.

    Raises:
        ValueError: a directory of another kind, or a dataset that is not there and cannot be downloaded.
    """
    if isinstance(data, GraphFiles):
        return data
    if not isinstance(data, str | os.PathLike):
        return None
    path = Path(data)
    if is_ogb(path) or (not path.exists() and path.name == str(data) and path.name.startswith(PREFIX)):
        if keep:
            raise ValueError(f"keep= (--keep) names columns of a file of features, and {data} is a dataset of OGB")
        return stream_ogb(data, drop=tuple(drop))
    return replace(stream_edge_list(path, keep=keep), drop=tuple(drop)) if path.is_dir() else None


def _named(graph: RawGraph, node_id: str) -> RawGraph:
    """The graph with a node field as the names of its nodes."""
    names = {kind: fields[node_id] for kind, fields in graph.node_fields.items() if node_id in fields}
    if not names:
        found = sorted({name for fields in graph.node_fields.values() for name in fields})
        raise ValueError(f"node_id={node_id!r}: there is no such node field; there are {', '.join(found) or 'none'}")
    fields = {kind: _without(fields, (node_id,)) for kind, fields in graph.node_fields.items()}
    return replace(graph, node_fields=fields, names={**graph.names, **names})


def _read(data: Any, drop: Sequence[str], node_id: str | None) -> RawGraph:
    if isinstance(data, RawGraph):
        return data
    if isinstance(data, str | os.PathLike):
        return _read_path(Path(data))
    if is_pyg(data, "HeteroData"):
        return read_hetero(data, drop, node_id)
    if is_pyg(data, "Data"):
        return read_data(data, drop, node_id)
    if is_dgl(data):
        return read_dgl(data)
    if isinstance(data, Mapping):
        return read_mapping(_without(data, drop))
    raise TypeError(f"cannot read a graph from a {type(data).__name__}{_hint(data)}; expected {_KNOWN}")


def _hint(data: Any) -> str:
    """What to pass in place of some things that people have."""
    if is_sparse(data):
        return ": pass a dict, {'adj_t': matrix, 'x': features}, in which entry (i, j) is the edge from j to i"
    if isinstance(data, torch.Tensor):
        return ": pass a dict, {'edge_index': edges, 'x': features}"
    if isinstance(data, GraphFiles):
        return ": shardpass.partition reads files piece by piece, and shardpass.load gives each rank its share"
    if hint := _LIBRARIES.get(type(data).__module__.split(".")[0]):
        return hint
    if isinstance(data, list | tuple) and len(data) == 1:
        return ": pass its only item, data[0]"
    if isinstance(data, list | tuple):
        return ": one graph is expected; torch_geometric.data.Batch.from_data_list joins several"
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return ": of a dataset pass the graph in it, dataset[0]"
    return ""


def _read_path(path: Path) -> RawGraph:
    if path.is_dir():
        raise ValueError(
            f"{path} is a directory; of a DGL partition pass the .json in it, and a directory of edges and features to "
            "shardpass.partition itself"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix == ".json":
        return read_dgl_partition(path)
    if path.suffix in (".npy", ".csv", ".txt"):
        raise ValueError(
            f"{path}: an edge list alone does not tell the number of nodes; "
            f"pass shardpass.data.read_edge_list({path.name!r}, num_nodes=...), or features=... or labels=..."
        )
    if path.suffix in (".pt", ".pth", ".pkl"):
        raise ValueError(f"{path} is a pickle, which can run code: load it yourself in Python and pass the object")
    raise ValueError(f"cannot read a graph from {path}; expected {_KNOWN}")


def _without(fields: Mapping[Any, Any], drop: Sequence[str]) -> dict[Any, Any]:
    return {name: values for name, values in fields.items() if name not in drop}
