"""What this frontend uses of DGL beyond its documented interface, in one place.

`tests/frontends/test_dgl_private.py` says which of these a release of DGL no longer has.
"""

from __future__ import annotations

import traceback
from itertools import islice
from typing import Any

import dgl
from dgl.backend import edge_softmax as softmax_kernel
from dgl.base import ALL, is_all
from dgl.function.base import BuiltinFunction, TargetCode
from dgl.function.message import BinaryMessageFunction, CopyMessageFunction
from dgl.heterograph_index import HeteroGraphIndex
from dgl.ops.edge_softmax import edge_softmax
from dgl.udf import EdgeBatch, NodeBatch
from torch import Tensor

__all__ = [
    "ALL",
    "ATTRIBUTES",
    "GLOBALS",
    "BinaryMessageFunction",
    "BuiltinFunction",
    "CopyMessageFunction",
    "EdgeBatch",
    "HeteroGraphIndex",
    "NodeBatch",
    "TargetCode",
    "is_all",
    "local_index",
    "scores_of_softmax",
    "softmax_kernel",
]

_READOUTS = frozenset(["sum_nodes", "mean_nodes", "max_nodes", "softmax_nodes", "broadcast_nodes"])
_NORM = frozenset(["EdgeWeightNorm"])
_SOFTMAX = frozenset(["edge_softmax"])

GLOBALS: dict[str, frozenset[str]] = {
    "AGNNConv": _SOFTMAX,
    "APPNPConv": _NORM,
    "AvgPooling": frozenset(["mean_nodes"]),
    "ChebConv": frozenset(["broadcast_nodes"]),
    "DotGatConv": _SOFTMAX,
    "EdgeWeightNorm": frozenset(["reverse"]),
    "GATConv": _SOFTMAX,
    "GATv2Conv": _SOFTMAX,
    "GCN2Conv": _NORM,
    "GlobalAttentionPooling": frozenset(["sum_nodes", "softmax_nodes"]),
    "LabelPropagation": frozenset(["F"]),
    "MaxPooling": frozenset(["max_nodes"]),
    "SGConv": _NORM,
    "Set2Set": frozenset(["sum_nodes", "softmax_nodes", "broadcast_nodes"]),
    "SumPooling": frozenset(["sum_nodes"]),
    "TAGConv": _NORM,
    "WeightAndSum": frozenset(["sum_nodes"]),
}
"""Global names that the ``forward`` of a class of ``dgl.nn`` uses and that `layers.py` gives another meaning there."""

ATTRIBUTES: dict[str, frozenset[str]] = {
    "GatedGraphConv": frozenset(["_n_etypes", "_n_steps", "_out_feats", "linears", "gru"]),
    "GroupRevRes": frozenset(["_forward"]),
}
"""Attributes of a layer of ``dgl.nn`` that `layers.py` reads or calls."""


def local_index(src_rows: Tensor, dst_rows: Tensor, num_src: int, num_dst: int) -> Any:
    """A graph index of the given edges, on which DGL's kernels run. It cannot be walked along out-edges."""
    block = dgl.create_block((src_rows, dst_rows), num_src_nodes=num_src, num_dst_nodes=num_dst)
    return block.formats(["coo", "csc"])._graph


def scores_of_softmax() -> Tensor | None:
    """The scores for which ``edge_softmax`` reads the index of a graph; `None` where something else reads it."""
    near = (frame for frame, _ in islice(traceback.walk_stack(None), 5))
    found = next((frame.f_locals["logits"] for frame in near if frame.f_code is edge_softmax.__code__), None)
    return found if isinstance(found, Tensor) else None
