"""`update` and `aggregate` of a layer take whatever PyG collects for them: ends of edges, counts, rows at the ends."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.utils import degree, scatter

from .one_by_one import assert_each_exact, refusals
from .pyg_cases import GRAPH


class Sums(gnn.MessagePassing):
    """Messages are source rows."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Mean(Sums):
    def update(self, out, index, dim_size):
        return out / degree(index, dim_size, out.dtype).clamp(min=1).view(-1, 1)


class AgainstTheEdges(Mean):
    def __init__(self):
        super().__init__(flow="target_to_source")


class Ends(Sums):
    def update(self, out, x_i, x_j, index, dim_size):
        return out + scatter(x_i * x_j, index, 0, dim_size)


class EndsOfAPair(Ends):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=(x, x.tanh()))


class Numbers(Sums):
    def update(self, out, edge_index, edge_index_i, edge_index_j, ptr, adj_t):
        assert ptr is None and adj_t is None
        once = scatter(out[edge_index[0]], edge_index[1], 0, out.size(0))
        return once - 2 * scatter(out[edge_index_j], edge_index_i, 0, out.size(0))


class Own(Sums):
    def update(self, out, x, scale=2.0):
        return out * scale + x


class Kept(Sums):
    """Its `aggregate` runs on all own edges at once, since it reads `edge_index`."""

    def aggregate(self, inputs, edge_index, edge_index_j, x_i, dim_size):
        return scatter(inputs * x_i, edge_index[1], 0, dim_size)


EXACT = [Mean, AgainstTheEdges, Ends, EndsOfAPair, Numbers, Own, Kept]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_what_pyg_collects_is_exact(ranks):
    assert_each_exact({kind.__name__: kind() for kind in EXACT}, GRAPH, ranks)


class ByCount(Sums):
    def update(self, out, dim_size):
        return out / dim_size


class BySources(Sums):
    def update(self, out, size_j):
        return out / size_j


class AggregatedByCount(Sums):
    def aggregate(self, inputs, edge_index, dim_size):
        return scatter(inputs, edge_index[1], 0, dim_size) / dim_size


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_counts_are_sizes_and_no_operands(ranks):
    found = refusals({kind.__name__: kind() for kind in (ByCount, BySources, AggregatedByCount)}, GRAPH, ranks)
    wrong = {name: text for name, text in found.items() if "the number of nodes that this rank holds" not in text}
    assert wrong == {}
