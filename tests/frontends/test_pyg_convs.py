"""Every layer of `torch_geometric.nn.conv` is exact on a sharded graph, or refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn.conv as pyg_convs

import shardpass as sp
import shardpass.core.aggregation.sharded_call as core_aggregate
from shardpass.core.aggregation.agreement import settle
from shardpass.errors import NeedsHaloError
from shardpass.frontends.pyg.refusals import REFUSED
from shardpass.testing import WholeHeteroGraph, evaluate_sharded, evaluate_whole, shard_in_memory

from .conv_cases import CONVS, ELSEWHERE, KERNEL, MORE_CONVS, ONE_PASS_SOFTMAX, ONE_SHOT, SORTED
from .how_much import SOME_OR_ALL, assert_case_exact
from .pyg_cases import GRAPH


@pytest.mark.parametrize(("ranks", "every_mode"), SOME_OR_ALL)
@pytest.mark.parametrize("name", MORE_CONVS)
def test_conv_equals_the_whole_graph(name, ranks, every_mode):
    assert_case_exact(MORE_CONVS[name], GRAPH, sp.pyg.wrap, ranks, every_mode, chunk_bytes=700)


@pytest.mark.parametrize(("ranks", "every_mode"), SOME_OR_ALL)
@pytest.mark.parametrize("name", ONE_SHOT)
def test_layers_that_see_whole_neighbourhoods(name, ranks, every_mode):
    assert_case_exact(ONE_SHOT[name], SORTED, sp.pyg.wrap, ranks, every_mode, modes=("halo",), chunk_bytes=700)


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


@pytest.mark.parametrize(("ranks", "every_mode"), SOME_OR_ALL)
@pytest.mark.parametrize("attention", [False, True])
def test_hypergraphs_are_graphs_of_two_types(attention, ranks, every_mode):
    def call(model, fields, edges):
        edge_index = edges[MEMBERS] if isinstance(edges, dict) else edges[MEMBERS].edge_index
        return {"node": model(fields["node"]["x"], edge_index, hyperedge_attr=fields["hyperedge"]["x"])}

    def make():
        return pyg_convs.HypergraphConv(5, 4, use_attention=attention)

    assert_case_exact((make, call), hypergraph(), sp.pyg.wrap, ranks, every_mode)


@pytest.mark.parametrize("name", ONE_SHOT)
def test_whole_neighbourhoods_need_halo_mode(name):
    make, call = ONE_SHOT[name]
    model = make().double()
    whole = evaluate_whole(model, SORTED, call)
    owners = torch.arange(SORTED.num_nodes) % 2
    with pytest.raises(NeedsHaloError, match="halo"):
        evaluate_sharded(model, SORTED, call, owners, 2, sp.pyg.wrap, sp.Options(mode="sar"), whole)


@pytest.mark.parametrize("name", CONVS)
def test_the_path_is_found_by_tracing(name, monkeypatch):
    """No table of classes says which layers are simple: what they do with their edges does."""
    found = []

    def recorded(*args):
        answer = settle(*args)
        found.append(answer[1])
        return answer

    monkeypatch.setattr(core_aggregate, "settle", recorded)
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
    make, call = CONVS[name]
    call(sp.pyg.wrap(make().double(), comm), {**dict(graph.node), **dict(graph.edge)}, graph)
    reductions = [reduction for structure in found for reduction in structure.reductions]
    simple = all(reduction.form != "general" for reduction in reductions)
    softmax = any(reduction.leader is not None for reduction in reductions)
    assert (simple, softmax) == (name in KERNEL, name in ONE_PASS_SOFTMAX)


def _exact() -> set[str]:
    return {name.split()[0] for name in (*CONVS, *ONE_SHOT)} | ELSEWHERE


CLASSES = [name for name in pyg_convs.__all__ if inspect.isclass(getattr(pyg_convs, name)) and name != "MessagePassing"]


@pytest.mark.parametrize("name", CLASSES)
def test_no_third_case(name):
    kinds = {kind.__name__ for kind in getattr(pyg_convs, name).__mro__}
    assert (name in _exact()) != bool(kinds & set(REFUSED)), f"{name}: give it a case, or refuse it by name"
