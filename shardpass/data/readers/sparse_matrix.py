"""Graphs whose edges are a sparse matrix, PyG's ``adj_t``: its entries become edges, and its values a field of theirs.

Neither SciPy nor torch_sparse is imported: whoever has such a matrix has imported it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardpass.data.raw import ADJACENCY


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse matrix of torch, of SciPy or of torch_sparse."""
    if isinstance(value, Tensor):
        return value.layout is not torch.strided
    return hasattr(value, "tocoo") or type(value).__name__ == "SparseTensor"


def with_edges(arrays: Mapping[Any, Any], what: str, is_square: bool = False) -> dict[Any, Any]:
    """A dict of arrays with edges and their weights in place of `adj_t`, if it is a sparse matrix.

    Then `adj_t` is the name of the weights, or missing where there are none, and `num_nodes` is there if `is_square`.
    """
    found, others = arrays.get(ADJACENCY), {name: value for name, value in arrays.items() if name != ADJACENCY}
    if not is_sparse(found):
        return dict(arrays)
    if others.get("edge_index") is not None:
        raise ValueError(
            f"{what} holds both edge_index and adj_t, which may differ: delete the one that your model is not called "
            f"with, as in del data.adj_t"
        )
    edge_index, values, (num_targets, num_sources) = _entries(found, f"adj_t of {what}")
    if is_square and num_targets != num_sources:
        raise ValueError(
            f"adj_t of {what} has the shape {[num_targets, num_sources]}; expected a row and a column for each node"
        )
    sizes = {"num_nodes": num_targets} if is_square else {}
    placed = {**sizes, **others, "edge_index": edge_index}
    if bool((values == 1).all()):  # which says the same as no weights
        return placed
    name = "edge_weight" if values.dim() == 1 else "edge_attr"
    if others.get(name) is not None:
        raise ValueError(
            f"{what} holds values of edges twice, in adj_t and as {name!r}: delete or rename that field, or set the "
            f"values of adj_t to 1"
        )
    return {**placed, name: values, ADJACENCY: name}


def with_edges_of_pyg(data: Any) -> Any:
    """A `Data` or `HeteroData` with edges and their weights in place of every `adj_t`; the same if it has none."""
    if not any(is_sparse(store.get(ADJACENCY)) for store in data.edge_stores):
        return data
    data, names = copy.copy(data), []
    for store in data.edge_stores:
        kind = getattr(store, "_key", None)
        placed = with_edges(dict(store.items()), f"edge type {kind}" if kind else "the Data object", kind is None)
        names += [placed.pop(ADJACENCY)] if isinstance(placed.get(ADJACENCY), str) else []
        store.pop(ADJACENCY, None)
        store.update(placed)
    setattr(data, ADJACENCY, weight_names(names))
    return data


def weight_names(names: Sequence[str]) -> str | None:
    """The graph field that says which edge fields were the values of `adj_t`; None where there are none."""
    return " ".join(dict.fromkeys(names)) or None


def refuse_matrix(edge_index: Any, what: str) -> None:
    """Raise if `edge_index` is a sparse matrix, of which nobody can tell which of its indices is the source."""
    if is_sparse(edge_index):
        raise ValueError(
            f"{what} is a sparse matrix ({type(edge_index).__name__}), and conventions differ on which of its indices "
            f"is the source. If entry (i, j) is the edge from j to i, as PyG's layers take it, pass it as adj_t. If it "
            f"is the edge from i to j, pass its transpose as adj_t. Values other than 1 become edge_weight"
        )


def _entries(matrix: Any, what: str) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """The edges of a matrix, [2, num_edges]: entry (i, j) is the edge from j to i. Their values, and the shape."""
    if isinstance(matrix, Tensor):
        targets, sources, values = _of_torch(matrix.detach(), what)
        shape = matrix.shape
    elif hasattr(matrix, "tocoo"):
        found = matrix.tocoo()
        targets, sources, values = (torch.as_tensor(array) for array in (found.row, found.col, found.data))
        shape = found.shape
    else:
        targets, sources, values = matrix.coo()
        shape = matrix.sizes()
    edge_index = torch.stack([sources.long(), targets.long()])
    return edge_index, torch.ones(1) if values is None else values, (int(shape[0]), int(shape[1]))


def _of_torch(matrix: Tensor, what: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values. Entries for the same place would be added up, where PyG keeps them apart."""
    matrix = matrix.to_sparse_coo()
    coalesced = matrix.coalesce()
    if matrix.sparse_dim() != 2:
        raise ValueError(f"{what} has the shape {list(matrix.shape)}; expected a matrix")
    if coalesced.values().size(0) != matrix._nnz():
        raise ValueError(f"{what} has several entries for one place: call coalesce(), if they are to be added up")
    rows, columns = coalesced.indices()
    return rows, columns, coalesced.values()
