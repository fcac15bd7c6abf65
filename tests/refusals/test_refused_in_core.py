"""Mistakes that the engine itself tells: about a rank's share of a graph, owners, sizes, norms and double backward."""

import io
import pickle
from functools import partial

import torch

from shardpass.core.graphs import reduce_rows
from shardpass.core.ranks import parse_bytes
from shardpass.core.sharding import Ownership
from shardpass.core.training import DistributedBatchNorm
from shardpass.errors import RefusedError

from .told import assert_told, of, rows_of


def _use(use, comm, graph):
    print(use(graph))


def _of_nothing(use, comm, graph):
    use()


def _norm(rows, comm, graph):
    DistributedBatchNorm(3, comm)(rows)


def _twice(compute, comm, graph):
    rows = torch.randn(graph.relation.plan.num_own_src, 3, requires_grad=True)
    torch.autograd.grad(compute(rows, comm, graph).square().sum(), rows, create_graph=True)


COUNTS = {
    f"num_{what}": (
        lambda g, what=what: getattr(g, f"num_{what}"),
        rf"`num_{what}`.*graph.num_own_{what} counts.*graph.total_{what} those of",
    )
    for what in ("nodes", "edges")
}
FIELDS = {
    AttributeError: (
        lambda g: g.adj_t,
        "this graph has no field 'adj_t'; there are the node fields x and the edge fields edge_attr, edge_weight",
    ),
    KeyError: (lambda g: g.node["feat"], "no field 'feat' is stored for this graph; there are: x"),
    ValueError: (lambda g: g.num_classes, "this graph has no labels: no node field 'y' is stored"),
    TypeError: (lambda g: pickle.dump(g.edge_index, io.BytesIO()), "belongs to its process; save the store's path"),
}
EDGE_INDEX = {
    "a sort of sources": (
        lambda g: g.edge_index[0].sort(), "`sort` on source node ids of a sharded graph.*node or edge field"
    ),
    "unique ends": (lambda g: g.edge_index.unique(), "`unique` on the edge_index of a sharded graph"),
    "rows by sources": (
        lambda g: torch.zeros(3)[g.edge_index[0]], "a tensor with 3 rows is indexed by source node; expected"
    ),
}  # fmt: skip
OFFSETS, OUTSIDE = (
    "offsets start at 0 and have one more entry than there are ranks",
    r"lies outside \[0, 5\); check the",
)
OWNERS = {
    **{f"offsets {given}": (partial(Ownership, given), OFFSETS) for given in ((), (0,), (1, 2))},
    "decreasing offsets": (lambda: Ownership((0, 3, 2)), r"offsets never decrease, got \(0, 3, 2\)"),
    "a node of none": (lambda: Ownership((0, 0, 0)).owner_of(torch.tensor([0])), "node id 0 lies outside"),
    **{
        f"ids {ids}": (
            lambda ids=ids: Ownership((0, 3, 5)).owner_of(torch.tensor(ids)),
            f"node id {bad} {OUTSIDE} edge list",
        )
        for ids, bad in (([0, 5], 5), ([-1, 9], -1), ([7, 3], 7))
    },
    **{
        f"the size {text!r}": (partial(parse_bytes, text), "expected a number of bytes")
        for text in ("", "six", "6 GiBs", "-1GB", 0, "0", True, float("nan"), float("inf"))
    },
}
NORMS = {
    "other channels": (torch.ones(4, 5), r"expected \[rows, 3\] input, found \[4, 5\]"),
    "other channels of a batch": (torch.ones(4, 5, 2), r"expected \[batch, 3, \.\.\.\] input, found \[4, 5, 2\]"),
    "four dimensions": (torch.ones(4, 3, 2, 2), r"expected 2D or 3D input \(got 4D input\)"),
    "float64": (torch.ones(4, 3).double(), "expected float32 input, found float64"),
    "integers": (torch.ones(4, 3).long(), "expected float32 input, found int64"),
}
DOUBLE = {
    "a product of rows twice": (
        lambda rows, comm, graph: reduce_rows(rows, "prod", comm),
        r"double backward through a product over ranks.*create_graph=True",
    ),
}
ONE = {**of(_of_nothing, OWNERS, ValueError), **of(_norm, NORMS, ValueError)}
THREE = {
    **of(_use, COUNTS),
    **{f"{error.__name__} of a field": (error, words, partial(_use, use)) for error, (use, words) in FIELDS.items()},
    **of(_use, EDGE_INDEX),
    **of(_twice, DOUBLE),
    "the least of integers": (
        RefusedError, "the min of integers", lambda comm, graph: reduce_rows(torch.arange(3), "min", comm)
    ),
}  # fmt: skip


@rows_of(ONE, THREE)
def test_a_mistake_is_told_by_the_engine(row, ranks, kind):
    assert_told(row, ranks, kind)
