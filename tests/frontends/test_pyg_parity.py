"""Bar 1: every layer equals itself on the whole graph: outputs and gradients, float64, 1e-10, all modes and ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch_geometric")

import shardpass as sp
from shardpass.testing import WholeGraph, assert_exact, evaluate_whole

from .how_much import MODES, SOME_OR_ALL, assert_case_exact
from .pyg_cases import GRAPH, LAYERS, MODELS, GatedConv


@pytest.mark.parametrize(("ranks", "every_mode"), SOME_OR_ALL)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_the_whole_graph(name, ranks, every_mode):
    # few edges per chunk and, on three ranks, few rows per fetch: every boundary is crossed
    block_rows = 3 if ranks == 3 else None
    assert_case_exact(LAYERS[name], GRAPH, sp.pyg.wrap, ranks, every_mode, chunk_bytes=700, block_rows=block_rows)


@pytest.mark.parametrize(("ranks", "every_mode"), SOME_OR_ALL)
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_the_whole_graph(name, ranks, every_mode):
    assert_case_exact(MODELS[name], GRAPH, sp.pyg.wrap, ranks, every_mode)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_prefetch_does_not_matter(prefetch):
    assert_case_exact(LAYERS["GATConv"], GRAPH, sp.pyg.wrap, 4, modes=("sar",), prefetch=prefetch, block_rows=2)


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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
