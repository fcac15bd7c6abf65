"""PyG's layers and models, each equal to itself on the whole graph: outputs and gradients, or refused by name."""

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
import torch_geometric.nn.conv as pyg_convs

import shardpass as sp
from shardpass.core.aggregation import sharded_call
from shardpass.errors import NeedsHaloError
from shardpass.frontends.pyg.refusals import REFUSED
from shardpass.testing import (
    WholeGraph,
    WholeHeteroGraph,
    assert_exact,
    evaluate_sharded,
    evaluate_whole,
    shard_in_memory,
)

from .conv_cases import CONVS, ELSEWHERE, MORE_CONVS, ONE_SHOT, SORTED
from .example_models import EXAMPLES
from .how_much import MODES, ONE_PART_EMPTY, assert_case_exact, in_turn
from .pyg_cases import GRAPH, LAYERS, MODELS, GatedConv


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(LAYERS))
def test_layer_equals_the_whole_graph(name, ranks, modes):
    # few edges per chunk and, on three ranks, few rows per fetch: every boundary is crossed
    block_rows = 6 if ranks == 3 else None
    assert_case_exact(LAYERS[name], GRAPH, sp.pyg.wrap, ranks, modes, chunk_bytes=1200, block_rows=block_rows)


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(MODELS))
def test_model_equals_the_whole_graph(name, ranks, modes):
    assert_case_exact(MODELS[name], GRAPH, sp.pyg.wrap, ranks, modes)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_prefetch_does_not_matter(prefetch):
    assert_case_exact(LAYERS["GATConv"], GRAPH, sp.pyg.wrap, 4, ONE_PART_EMPTY, prefetch=prefetch, block_rows=2)


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(1, 12))
    num_edges = draw(st.integers(0, 40))
    ranks = draw(st.integers(1, 4))
    ends = st.lists(st.integers(0, num_nodes - 1), min_size=num_edges, max_size=num_edges)
    edge_index = torch.tensor([draw(ends), draw(ends)], dtype=torch.int64).view(2, -1)
    owners = torch.tensor(draw(st.lists(st.integers(0, ranks - 1), min_size=num_nodes, max_size=num_nodes)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    # few distinct values: ties
    x = torch.randint(-2, 3, (num_nodes, 5), generator=generator).double()
    fields = {
        "edge_attr": torch.randn(num_edges, 3, generator=generator, dtype=torch.float64),
        "edge_weight": torch.rand(num_edges, generator=generator, dtype=torch.float64),
    }
    return WholeGraph(num_nodes, edge_index, {"x": x}, fields), owners, ranks


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    graphs(),
    st.sampled_from(["SAGEConv max", "GATConv edges", "user's layer", "GCNConv weighted"]),
    st.sampled_from(MODES),
)
def test_random_graphs(drawn, name, mode):
    graph, owners, ranks = drawn
    make, call = LAYERS[name]
    torch.manual_seed(1)
    model = make().double()
    assert_exact(model, graph, call, sp.pyg.wrap, ranks=ranks, modes=(mode,), owners={"drawn": owners})


def test_a_parameter_in_message_gets_the_whole_gradient():
    torch.manual_seed(0)
    model = GatedConv(5, 3).double()
    whole = evaluate_whole(model, GRAPH, LAYERS["user's layer"][1])
    assert whole.parameters["gate.weight"].abs().max() > 0.1 and whole.parameters["scale"].abs().max() > 0.1


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(EXAMPLES))
def test_example_equals_the_whole_graph(name, ranks, modes):
    assert_case_exact(EXAMPLES[name], GRAPH, sp.pyg.wrap, ranks, modes)


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(MORE_CONVS))
def test_conv_equals_the_whole_graph(name, ranks, modes):
    assert_case_exact(MORE_CONVS[name], GRAPH, sp.pyg.wrap, ranks, modes, chunk_bytes=1200)


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(ONE_SHOT, ("halo",)))
def test_layers_that_see_whole_neighbourhoods(name, ranks, modes):
    assert_case_exact(ONE_SHOT[name], SORTED, sp.pyg.wrap, ranks, modes, chunk_bytes=1200)


MEMBERS = ("node", "in", "hyperedge")


def hypergraph():
    """Nodes in hyperedges; the last hyperedge of some rank has no node, and some nodes are in none."""
    generator = torch.Generator().manual_seed(2)
    ends = torch.stack(
        [torch.randint(0, 17, (60,), generator=generator), torch.randint(0, 9, (60,), generator=generator)]
    )
    ends[1, ends[1] == 3], ends[1, 0] = 2, 10  # PyG guesses the number of hyperedges from the largest
    x = torch.randn(19, 5, generator=generator, dtype=torch.float64)
    attr = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    return WholeHeteroGraph(
        {"node": 19, "hyperedge": 11}, {MEMBERS: ends}, {"node": {"x": x}, "hyperedge": {"x": attr}}
    )


@pytest.mark.parametrize(("attention", "ranks", "modes"), in_turn([False, True]))
def test_hypergraphs_are_graphs_of_two_types(attention, ranks, modes):
    def call(model, fields, edges):
        edge_index = edges[MEMBERS] if isinstance(edges, dict) else edges[MEMBERS].edge_index
        return {"node": model(fields["node"]["x"], edge_index, hyperedge_attr=fields["hyperedge"]["x"])}

    def make():
        return pyg_convs.HypergraphConv(5, 4, use_attention=attention)

    assert_case_exact((make, call), hypergraph(), sp.pyg.wrap, ranks, modes)


@pytest.mark.parametrize("name", ONE_SHOT)
def test_whole_neighbourhoods_need_halo_mode(name):
    make, call = ONE_SHOT[name]
    model = make().double()
    whole = evaluate_whole(model, SORTED, call)
    owners = torch.arange(SORTED.num_nodes) % 2
    with pytest.raises(NeedsHaloError, match="halo"):
        evaluate_sharded(model, SORTED, call, owners, 2, sp.pyg.wrap, sp.Options(mode="sar"), whole)


def _exact() -> set[str]:
    return {name.split()[0] for name in (*CONVS, *ONE_SHOT)} | ELSEWHERE


CLASSES = [name for name in pyg_convs.__all__ if inspect.isclass(getattr(pyg_convs, name)) and name != "MessagePassing"]


@pytest.mark.parametrize("name", CLASSES)
def test_no_third_case(name):
    kinds = {kind.__name__ for kind in getattr(pyg_convs, name).__mro__}
    assert (name in _exact()) != bool(kinds & set(REFUSED)), f"{name}: give it a case, or refuse it by name"


def spread(index, rows):
    return index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)


class MeanConv(gnn.MessagePassing):
    """The mean of transformed neighbours, taken in `aggregate` in one of the ways that torch offers."""

    def __init__(self, kind):
        super().__init__(aggr=None)
        self.kind, self.lin, self.root = kind, nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x), root=self.root(x))

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, root, dim_size):
        rows, into = spread(index, inputs), inputs.new_full((dim_size, 4), 2.0)
        if self.kind == "from messages alone":
            return into.scatter_reduce(0, rows, inputs, "mean", include_self=False)
        if self.kind == "with a constant":
            return torch.scatter_reduce(into, 0, rows, inputs, "mean")
        if self.kind == "in place, last dimension":
            rows = index.expand(4, -1)
            return into.t().clone().scatter_reduce_(-1, rows, inputs.t(), reduce="mean", include_self=False).t()
        if self.kind == "with the node itself":
            return torch.scatter_reduce(root, 0, rows, inputs, "mean", include_self=True)
        return root.clone().scatter_reduce_(0, rows, inputs, reduce="mean", include_self=False)


class CentredConv(gnn.MessagePassing):
    """Messages less the mean of their destination's, squashed: two passes over the edges."""

    def __init__(self, kind):
        super().__init__(aggr="sum")
        self.kind, self.lin, self.root = kind, nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x), root=self.root(x))

    def message(self, x_j, index, size_i, root):
        base = root if "node itself" in self.kind else x_j.new_zeros(size_i, 4)
        mean = base.scatter_reduce(0, spread(index, x_j), x_j, "mean", include_self="node itself" in self.kind)
        return (x_j - mean[index]).tanh() * root[index]  # a rank without nodes has no row to look up


KINDS = {
    "from messages alone": MeanConv,
    "with a constant": MeanConv,
    "in place, last dimension": MeanConv,
    "with the node itself": MeanConv,
    "the node itself where it has no neighbour": MeanConv,
    "in message": CentredConv,
    "in message, with the node itself": CentredConv,
}


def call(model, inputs, graph):
    return model(inputs["x"], graph)


@pytest.mark.parametrize(("kind", "ranks", "modes"), in_turn(KINDS))
def test_a_mean_by_scatter_reduce_equals_the_whole_graph(kind, ranks, modes):
    case, block_rows = (lambda: KINDS[kind](kind), call), 3 if ranks == 3 else None
    assert_case_exact(case, GRAPH, sp.pyg.wrap, ranks, modes, chunk_bytes=1200, block_rows=block_rows)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind] is MeanConv])
def test_kernels_compute_it(kind, monkeypatch):
    found = []

    def recorded(*args):
        answer = settle(*args)
        found.append(answer[1])
        return answer

    settle = sharded_call.settle
    monkeypatch.setattr(sharded_call, "settle", recorded)
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
    sp.pyg.wrap(MeanConv(kind).double(), comm)(graph.x, graph)
    forms = [reduction.form for structure in found for reduction in structure.reductions]
    assert forms == (["general", "ones"] if "last dimension" in kind else ["copy", "ones"])


def test_means_of_integers_round_down():
    class Rounded(MeanConv):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=(x * 4).long()[:, :4], root=None)

    for kind in ("from messages alone", "with a constant"):
        model = Rounded(kind)
        whole = model(GRAPH.node["x"], GRAPH.edge_index)
        comm = sp.connect("local")
        graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
        found = sp.pyg.wrap(model, comm)(graph.x, graph)
        assert whole.dtype == found.dtype and torch.equal(whole[graph.node_ids], found)
