"""What a layer or a model does with edge_index: PyG's functions, its rows rearranged, what update() takes."""

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric import nn as gnn
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, scatter

from shardpass import pyg
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, assert_exact, assignments, run, shard_in_memory

from .how_much import ONE_OR_THREE, ONE_PART_EMPTY, assert_exact_in
from .one_by_one import assert_each_exact, refusals
from .pyg_cases import GRAPH


def on_ranks(work, ranks=3, kind="random"):
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[kind]
    return run(lambda comm: work(shard_in_memory(GRAPH, owners, comm)), ranks)


def by_node(parts, like):
    """Rows of all ranks in the original order, from ``(node_ids, rows)``."""
    out = torch.full_like(like, -77)
    for ids, rows in parts:
        out[ids] = rows
    return out


@pytest.mark.parametrize(
    ("add", "ranks", "kind"), [(True, 1, "random"), (True, 3, "no edges"), (False, 3, "empty part")]
)
def test_gcn_norm_of_pyg_as_it_is(add, ranks, kind):
    def degree_and_pairs(edge_index, weight, x):
        index, weight = gcn_norm(edge_index, weight, x.size(0), False, add, dtype=torch.float64)
        messages = x[index[0]] * weight.view(-1, 1)
        return torch.zeros_like(x).index_add(0, index[1], messages), index.size(1)

    whole, num_edges = degree_and_pairs(GRAPH.edge_index, GRAPH.edge["edge_weight"], GRAPH.node["x"])
    results = on_ranks(lambda g: (g.node_ids, *degree_and_pairs(g.edge_index, g.edge_weight, g.x)), ranks, kind)
    torch.testing.assert_close(by_node([r[:2] for r in results], whole), whole, rtol=0, atol=1e-12)
    assert sum(r[2] for r in results) == num_edges


def test_self_loops_of_pyg_as_they_are():
    def count(graph):
        index, n = graph.edge_index, graph.num_own_nodes
        removed, attr = utils.remove_self_loops(index, graph.edge_attr)
        added, _ = utils.add_self_loops(index, graph.edge_attr, fill_value="mean", num_nodes=n)
        remaining, weight = utils.add_remaining_self_loops(index, graph.edge_weight, 7.0, n)
        assert attr.size(0) == removed.size(1)
        return removed.size(1), added.size(1), remaining.size(1), weight.sum()

    class Whole:
        edge_index, num_own_nodes = GRAPH.edge_index, GRAPH.num_nodes
        edge_attr, edge_weight = GRAPH.edge["edge_attr"], GRAPH.edge["edge_weight"]

    right, results = count(Whole), on_ranks(count)
    for k in range(4):
        torch.testing.assert_close(torch.as_tensor(sum(r[k] for r in results)), torch.as_tensor(right[k]))


class Unnumbered(torch.nn.Module):
    """A layer that adds self-loops without saying how many nodes there are, after it has removed those there were."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.SimpleConv("sum")

    def forward(self, x, edge_index):
        edge_index, _ = utils.remove_self_loops(edge_index)
        return self.conv(x, utils.add_self_loops(edge_index)[0])


UNNUMBERED = {"EG": lambda: gnn.EGConv(5, 4, ["sum", "max"], num_heads=2), "own": Unnumbered}
LAST = GRAPH.num_nodes - 1


def with_last_edges(*edges):
    """The awkward graph, whose last node is isolated, with some more edges."""
    more = torch.cat([GRAPH.edge_index, torch.tensor(edges, dtype=torch.long).view(-1, 2).T], 1)
    return WholeGraph(GRAPH.num_nodes, more, {"x": GRAPH.node["x"]})


ENDS = {"to": [(3, LAST)], "from": [(LAST, 3)], "from, four": [(LAST, 3), (LAST, 4), (LAST, 5), (LAST, 6)]}
# whether other ranks have dropped the only edge is not known
NUMBERED = [("EG", "to", 3), ("EG", "from", 3), ("EG", "from, four", 1), ("own", "to", 3), ("own", "from", 1)]
NUMBERED += [("own", "from, four", 3)]


@pytest.mark.parametrize(("name", "ends", "ranks"), NUMBERED)
def test_the_number_of_nodes_is_that_of_the_whole_list(name, ends, ranks):
    edges = ENDS[ends]
    model = UNNUMBERED[name]().double()
    assert_exact_in(ONE_PART_EMPTY, model, with_last_edges(*edges), lambda m, i, e: m(i["x"], e), pyg.wrap, ranks)


@pytest.mark.parametrize(("edges", "name", "ranks"), [([], "EG", 3), ([], "own", 1), ([(LAST, LAST)], "own", 3)])
def test_a_number_that_pyg_would_not_get_is_refused(edges, name, ranks):
    model = UNNUMBERED[name]().double()
    with pytest.raises(
        RefusedError, match=r"the last node of the original graph, on rank \d, has no edge, so PyG would add none"
    ):
        assert_exact(
            model, with_last_edges(*edges), lambda m, i, e: m(i["x"], e), pyg.wrap, ranks=ranks, modes=("sar",)
        )


def test_self_loops_for_a_given_number_of_nodes_are_added_whatever_was_asked_before():
    def work(graph):
        conv, x, index = pyg.wrap(gnn.SimpleConv("sum"), graph.comm), graph.x, graph.edge_index
        utils.dropout_node(index, 0.5, training=False)  # asks for the largest id
        return graph.node_ids, conv(x, utils.add_self_loops(index, num_nodes=x.size(0))[0])

    loops = torch.cat([GRAPH.edge_index, torch.arange(GRAPH.num_nodes).expand(2, -1)], 1)
    whole = gnn.SimpleConv("sum")(GRAPH.node["x"], loops)
    torch.testing.assert_close(by_node(on_ranks(work), whole), whole)


def _apart(h, source, target):
    return torch.zeros_like(h).index_add(0, target, h[source])


def _degrees(h, ids):
    return h * degree(ids, h.size(0), h.dtype).view(-1, 1)


LISTS = {
    "[[1, 0]]": lambda e: e[[1, 0]],
    "[[0, 1]]": lambda e: e[[0, 1]],
    "[[1, 0], :]": lambda e: e[[1, 0], :],
    "[tensor]": lambda e: e[torch.tensor([1, 0])],
    "index_select": lambda e: e.index_select(0, torch.tensor([1, 0])),
    "[:]": lambda e: e[:],
    "[...]": lambda e: e[...],
    "[0:2]": lambda e: e[0:2],
    "flip": lambda e: e.flip(0),
    "flipud": lambda e: torch.flipud(e),
    "roll": lambda e: e.roll(1, 0),
    "permute": lambda e: e.permute(0, 1),
    "reshape": lambda e: e.reshape(2, -1),
    "view": lambda e: e.view(2, e.size(1)),
    "unbind, stack": lambda e: torch.stack(e.unbind()),
    "stack of the reverse": lambda e: torch.stack([e[1], e[0]]),
    "vstack": lambda e: torch.vstack([e[1], e[0]]),
    "chunk, cat": lambda e: torch.cat([*e.chunk(2)]),
    "chunk, cat of the reverse": lambda e: torch.cat([*e.chunk(2)][::-1]),
}
ROWS = {
    "chunk": lambda m, h, e, w: _apart(h, *(row.view(-1) for row in e.chunk(2))),
    "split": lambda m, h, e, w: _apart(h, *(row.squeeze(0) for row in e.split(1))),
    "tensor_split": lambda m, h, e, w: _apart(h, *(row[0] for row in e.tensor_split(2))),
    "select": lambda m, h, e, w: _apart(h, e.select(0, 0), e.select(0, 1)),
    "narrow": lambda m, h, e, w: _apart(h, e.narrow(0, 0, 1).flatten(), e[1:].flatten()),
    "degrees both ways": lambda m, h, e, w: _degrees(h, e.reshape(-1)) + _degrees(h, e.view(-1)),
    "degrees of the reverse": lambda m, h, e, w: _degrees(h, e.flip(0).flatten()),
}


def _passes(change):
    return lambda m, h, e, w: m.last(h, change(e), w)


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
def test_rearranged_rows_are_exact(ranks):
    assert_each_exact(ROWS | {name: _passes(change) for name, change in LISTS.items()}, GRAPH, ranks)


BY_POSITION = {
    "a slice": lambda m, h, e, w: m.last(h, e[:, :10]),
    "a slice longer than the list": lambda m, h, e, w: m.last(h, e[:, :1000]),
    "an edge": lambda m, h, e, w: h + e[:, 5].sum(),
    "narrow": lambda m, h, e, w: m.last(h, e.narrow(1, 0, 3)),
    "chunks of edges": lambda m, h, e, w: m.last(h, e.chunk(3, 1)[0]),
    "pieces longer than the list": lambda m, h, e, w: m.last(h, e.split(1000, 1)[0]),
    "flip of edges": lambda m, h, e, w: m.last(h, e.flip(1), w),
    "t": lambda m, h, e, w: m.last(h, e.t()[w > 0.5].t()),
    "T": lambda m, h, e, w: m.last(h, e.T.T),
    "transpose": lambda m, h, e, w: m.last(h, e.transpose(0, 1).transpose(0, 1)),
    "a row twice": lambda m, h, e, w: m.last(h, e[[1, 1]]),
}


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
def test_what_takes_edges_by_their_position_is_refused(ranks):
    words = "on the edge_index of a sharded graph gives neither the list [2, num_edges] nor one of its rows"
    slices = "`a slice [:, a:b]` on the edge_index of a sharded graph"
    found = refusals(BY_POSITION, GRAPH, ranks).items()
    assert {name: text for name, text in found if words not in text and slices not in text} == {}


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


class WithOwnRows(Sums):
    """Its `aggregate` takes rows of all own nodes, as boundary conditions of paths are."""

    def aggregate(self, inputs, index, dim_size, x):
        return torch.maximum(scatter(inputs, index, 0, dim_size), x)


class WithOwnRowsBehind(WithOwnRows):
    """The same with the nodes in dimension 1, and the channels in front."""

    def forward(self, x, edge_index):
        self.node_dim = 1
        return self.propagate(edge_index, x=x.t()).t()

    def aggregate(self, inputs, index, dim_size, x):
        return torch.maximum(scatter(inputs, index, 1, dim_size), x)


EXACT = [Mean, AgainstTheEdges, Ends, EndsOfAPair, Numbers, Own, Kept, WithOwnRows, WithOwnRowsBehind]


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
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


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
def test_the_counts_are_sizes_and_no_operands(ranks):
    found = refusals({kind.__name__: kind() for kind in (ByCount, BySources, AggregatedByCount)}, GRAPH, ranks)
    wrong = {name: text for name, text in found.items() if "the number of nodes that this rank holds" not in text}
    assert wrong == {}
