"""Rows in the order that the graph had before it was partitioned, given to a rank that holds all of them.

On several ranks such a tensor is longer than own rows. On one rank, only its numbers tell. The same goes for rows of
another graph that was partitioned on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import combinations

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


def refuse_two_numberings(arguments: object, graphs: Collection[ShardedGraph]) -> None:
    """Raise if `arguments` belong to graphs that number the same count of nodes differently. Call it once.

    Raises:
        RefusedError: two graphs, or a graph and a field of another.
    """
    leaves = torch_private.tree_leaves(arguments)
    used = [graph for graph in graphs if any(_stands_for(leaf, graph) for leaf in leaves)]
    for graph, other in combinations(used, 2):
        if _numbers_differently(graph, other):
            raise RefusedError(_TWO_STORES.format(line=user_line(), what="two graphs"))
    own = {id(field) for graph in used for field in _read_fields(graph)}
    for other in (graph for graph in graphs if used and graph not in used):
        foreign = {id(field) for field in _read_fields(other)} - own
        given = any(id(leaf) in foreign for leaf in leaves)
        if given and any(_numbers_differently(graph, other) for graph in used):
            raise RefusedError(_TWO_STORES.format(line=user_line(), what="a graph and a field of another graph"))


_TWO_STORES = (
    "{line}: the model is given {what}, which were partitioned on their own and number as many nodes differently. If "
    "these are the same nodes, put the edges of both into one graph before you partition, as edge types of it (see "
    "the page on link prediction). If they are not, and the model keeps them apart, wrap it with check=False"
)


def _stands_for(leaf: object, graph: ShardedGraph) -> bool:
    plan = getattr(leaf, "plan", None)
    is_of = plan is not None and any(relation.plan is plan for relation in graph.relations.values())
    return leaf is graph or getattr(leaf, "core", None) is graph or is_of


def _numbers_differently(graph: ShardedGraph, other: ShardedGraph) -> bool:
    """Whether two graphs have as many nodes of a type, but other ones on this rank or in another order."""
    for kind in {*graph.ownership} & {*other.ownership}:
        mine, theirs = graph.node_ids_dict[kind], other.node_ids_dict[kind]
        if graph.ownership[kind].num_total == other.ownership[kind].num_total and not torch.equal(mine, theirs):
            return True
    return False


def _read_fields(graph: ShardedGraph) -> list[Tensor]:
    return [field for kind in graph.ownership for field in graph.fields_of(kind).read()]


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
    numbers = ids()  # on the host for nodes, on the device for edges
    if not _equal(tensor[numbers[few.to(numbers.device)].to(few)], field[few]):
        return False
    return not _equal(tensor, field) and _equal(tensor[numbers.to(few)], field)


def _equal(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())
