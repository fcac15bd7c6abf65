"""Adjacency matrices, by which PyG calls models and layers: refused, with how to pass their edges and their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import is_sparse

from shardpass.core.following import user_line
from shardpass.core.graphs import Relation, ShardedEdgeIndex, ShardedGraph
from shardpass.core.ranks import plain_of, torch_private
from shardpass.errors import RefusedError

_VALUES = ("edge_weight", "edge_attr", "edge_type")
"""The arguments by which layers take what PyG reads from an adjacency matrix too."""
_INSTEAD = (
    "nodes of a sharded graph are numbered anew on every rank. Give the matrix to shardpass.partition as data.adj_t: "
    "it becomes the edges, and its values graph.edge_weight. Pass the graph in its place, and the values as "
    "edge_weight=graph.edge_weight. torch.sparse.mm(adj, x) is torch_geometric.nn.SimpleConv('sum')(x, edge_index, "
    "edge_weight)"
)


def refuse_sparse(names: dict[str, Any], has_graph: bool) -> None:
    """Raise if one of the arguments of a model, by their names, is a sparse tensor.

    Args:
        has_graph: a graph is among them, so that the tensor holds features.

    Raises:
        RefusedError: naming the argument.
    """
    for name, value in names.items():
        for leaf in torch_private.tree_leaves(value):
            leaf = plain_of(leaf)
            if not is_sparse(leaf) and not hasattr(leaf, "tocoo"):
                continue
            kind = str(leaf.layout).removeprefix("torch.") if isinstance(leaf, Tensor) else type(leaf).__name__
            if has_graph:
                raise RefusedError(
                    f"{user_line()}: `{name}` is sparse ({kind}), and rows of sparse tensors can neither be followed "
                    f"nor sent to other ranks: pass {name}.to_dense()"
                )
            raise RefusedError(f"{user_line()}: `{name}` is a sparse matrix ({kind}), but {_INSTEAD}")


def refuse_sparse_buffers(model: nn.Module) -> None:
    """Raise if a buffer of a model is sparse, which ranks cannot send.

    Raises:
        RefusedError: naming the buffer.
    """
    for name, matrix in model.named_buffers():
        _refuse_kept(name, matrix)


def refuse_matrices(model: nn.Module, totals: list[int]) -> None:
    """Raise if a model keeps an adjacency matrix of a graph whose types have `totals` nodes.

    Raises:
        RefusedError: naming the attribute.
    """
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not set(totals).isdisjoint(value.shape):
                _refuse_kept(f"{prefix}.{name}".lstrip("."), value)


def _refuse_kept(name: str, matrix: Tensor) -> None:
    if matrix.layout is not torch.strided:
        raise RefusedError(f"the model keeps {name!r}, a sparse matrix of shape {list(matrix.shape)}, but {_INSTEAD}")


def check_weights(name: str, layer: MessagePassing, names: list[str], given: dict[str, Any]) -> None:
    """Raise if a layer is given no weights, where PyG's would read those of the matrix that its edges were made of.

    Args:
        names: of the arguments of its `forward`.
        given: those of this call.

    Raises:
        RefusedError: saying how to pass them.
    """
    edges = [v.relation if isinstance(v, ShardedGraph) and v.is_homogeneous else v for v in given.values()]
    found = next((v.plan.weights for v in edges if isinstance(v, (ShardedEdgeIndex, Relation))), None)
    if found is None or any(given.get(value) is not None for value in _VALUES):
        return
    taken = next((value for value in (found, "edge_weight") if value in names), None)
    if taken is None and not layer.fuse:
        return
    what = f"pass {taken}=graph.{found}" if taken else "it takes no weights, so use a layer that does, as GraphConv"
    raise RefusedError(
        f"{user_line()}: {name} is called without the values of the adj_t that this graph was made of, by "
        f"which PyG multiplies messages unasked: {what}. To do without them, leave them out with drop=[{found!r}] of "
        f"shardpass.shard or shardpass.data.read"
    )
