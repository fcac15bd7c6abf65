"""Bar 1: every layer equals itself on the whole graph: outputs and gradients, float64, 1e-10, all modes and ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch_geometric")

import shardpass as sp
from shardpass.testing.graphs import WholeGraph, assignments
from shardpass.testing.parity import differences, evaluate_sharded, evaluate_whole

from .pyg_cases import GRAPH, LAYERS, MODELS, GatedConv
from .ranks import ONE_TO_FOUR, ONE_TWO_FOUR

BOUND = 1e-10
UNCHECKED = partial(sp.pyg.wrap, check=False)  # the self-check has tests of its own
MODES = ("sar", "keep", "halo")


def assert_exact(name, case, ranks, modes, options=None):
    make, call = case
    torch.manual_seed(0)
    model = make().double()
    whole = evaluate_whole(model, GRAPH, call)
    for where, owners in assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).items():
        for mode in modes:
            chosen = sp.Options(mode=mode, **(options or {}))
            sharded = evaluate_sharded(model, GRAPH, call, owners, ranks, UNCHECKED, chosen, whole)
            wrong = {key: error for key, error in differences(whole, sharded).items() if not error <= BOUND}
            assert not wrong, f"{name}, {ranks} ranks, {where}, {mode}: {wrong}"


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_the_whole_graph(name, ranks):
    # few edges per chunk and, on three ranks, few rows per fetch: every boundary is crossed
    assert_exact(name, LAYERS[name], ranks, MODES, {"chunk_bytes": 700, "block_rows": 3 if ranks == 3 else None})


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_the_whole_graph(name, ranks):
    assert_exact(name, MODELS[name], ranks, MODES)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_prefetch_does_not_matter(prefetch):
    assert_exact("GATConv", LAYERS["GATConv"], 4, ("sar",), {"prefetch": prefetch, "block_rows": 2})


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
    whole = evaluate_whole(model, graph, call)
    sharded = evaluate_sharded(model, graph, call, owners, ranks, UNCHECKED, sp.Options(mode=mode), whole)
    wrong = {key: error for key, error in differences(whole, sharded).items() if not error <= BOUND}
    assert not wrong


def test_a_parameter_in_message_gets_the_whole_gradient():
    torch.manual_seed(0)
    model = GatedConv(5, 3).double()
    whole = evaluate_whole(model, GRAPH, LAYERS["user's layer"][1])
    assert whole.parameters["gate.weight"].abs().max() > 0.1 and whole.parameters["scale"].abs().max() > 0.1
