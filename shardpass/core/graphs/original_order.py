"""Rows in the order that the graph had before it was partitioned, given to a rank that holds all of them.

On several ranks such a tensor is longer than own rows. On one rank, only its numbers tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from shardpass.core.following import user_line
from shardpass.core.graphs.graph import ShardedGraph
from shardpass.core.graphs.relation import OwnFields
from shardpass.core.ranks import torch_private
from shardpass.errors import RefusedError

_FEW = 64
_MANY = 2**27
"""Of so many edges the original numbers, 8 bytes each, are not made only to look."""


def refuse_original_order(arguments: object, graphs: Iterable[ShardedGraph]) -> None:
    """Raise if one of `arguments` is a stored field, but in the order of the graph before it was partitioned.

    It reads the fields that may be meant, so call it once.

    Raises:
        RefusedError: naming the field.
    """
    given = [leaf for leaf in torch_private.tree_leaves(arguments) if type(leaf) is Tensor and leaf.dim()]
    for graph in graphs:
        for total, fields, ids in _rows_of(graph):
            read = list(fields.read())
            for tensor in given:
                if len(tensor) != total or any(tensor is field for field in read):
                    continue
                for name, field in fields.items():
                    if _is_permuted(tensor, field, ids):
                        raise RefusedError(
                            f"{user_line()}: a tensor of shape {[*tensor.shape]} holds the field {name!r} in the order "
                            f"of the original graph, but partitioning has numbered nodes and edges anew. Take all "
                            f"fields of the graph that was loaded, as in graph.{name}, labels and masks too"
                        )


def _rows_of(graph: ShardedGraph) -> Iterator[tuple[int, OwnFields, Callable[[], Tensor]]]:
    """Of each kind of rows that this rank holds all of: their number, their fields, and their original numbers."""
    for kind, owned in graph.ownership.items():
        if owned.num_own(graph.comm.rank) == owned.num_total:
            yield owned.num_total, graph.fields_of(kind), partial(graph.node_ids_dict.__getitem__, kind)
    for edge_type, relation in graph.relations.items():
        if relation.shards.num_edges == graph.total_edges_of(edge_type) < _MANY:
            yield relation.shards.num_edges, relation.fields, relation.ids.read


def _is_permuted(tensor: Tensor, field: Tensor, ids: Callable[[], Tensor]) -> bool:
    """Whether ``tensor[ids()]`` are the rows of `field`, and `tensor` itself is not."""
    alike = tensor.is_floating_point() == field.is_floating_point() and tensor.device == field.device
    if not alike or tensor.shape != field.shape or not len(field):
        return False
    tensor = tensor.detach().to(field.dtype)
    few = torch.linspace(0, len(field) - 1, _FEW, device=field.device).long()
    if not _equal(tensor[ids()[few].to(few)], field[few]):
        return False
    return not _equal(tensor, field) and _equal(tensor[ids().to(few)], field)


def _equal(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())
