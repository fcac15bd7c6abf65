"""Graphs of several types: models equal themselves on the whole graph, float64, 1e-10, all modes and ranks."""

import copy
import warnings

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.graphs.union import Unions
from shardpass.errors import DivergenceError, RefusedError
from shardpass.testing import assert_exact, cotangent, hetero_assignments

from .hetero_cases import GRAPH, LAYERS, METADATA, MODELS, TwoLayers, by_type
from .how_much import assert_case_exact, in_turn, some_by_default
from .on_ranks import on_ranks, on_shares, share

BOUND = 1e-10
CITES, WRITES, BY = METADATA[1][:3]


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(LAYERS))
def test_layer_equals_the_whole_graph(name, ranks, modes):
    # few edges per chunk and, on three ranks, few rows per fetch: every boundary is crossed
    block_rows = 6 if ranks == 3 else None
    assert_case_exact(LAYERS[name], GRAPH, sp.pyg.wrap, ranks, modes, chunk_bytes=1200, block_rows=block_rows)


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(MODELS))
def test_model_equals_the_whole_graph(name, ranks, modes):
    assert_case_exact(MODELS[name], GRAPH, sp.pyg.wrap, ranks, modes)


@pytest.mark.parametrize(
    "name", some_by_default([*LAYERS, *MODELS], "HeteroConv mixed", "HGTConv", "HANConv", "to_hetero SAGE")
)
def test_models_are_followed_without_a_warning(name):
    make, call = {**LAYERS, **MODELS}[name]
    model = make().double()  # here, since torch.fx patches all modules while it traces one

    def work(comm, graph):
        fields = {kind: dict(graph[kind]) for kind in (*METADATA[0], *METADATA[1])}
        call(sp.pyg.wrap(copy.deepcopy(model), comm), fields, graph)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_shares(GRAPH, work)


@pytest.mark.parametrize("name", some_by_default(["HGT", "HAN", "to_hetero SAGE"], "HAN", "to_hetero SAGE"))
def test_every_rank_answers_in_backward_whatever_types_its_loss_reaches(name):
    make, call = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    used = ["paper", "venue"]  # by the loss of rank 0 and of rank 1

    def work(comm, graph):
        mine, kind = sp.pyg.wrap(copy.deepcopy(model), comm), used[comm.rank]
        out = call(mine, {k: {"x": x} for k, x in graph.x_dict.items()}, graph)[kind]
        whole = torch.empty(GRAPH.num_nodes[kind], out.size(1), dtype=torch.float64)
        (out * cotangent(whole)[graph[kind].node_ids]).sum().backward()
        sp.sync_gradients(mine, comm)
        return {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}, graph.node_ids_dict

    (found, ids), (_, other_ids) = on_shares(GRAPH, work)
    out = call(model, GRAPH.node, dict(GRAPH.edges))
    loss = sum(
        (out[kind] * cotangent(torch.empty_like(out[kind])))[rows[kind]].sum()
        for kind, rows in zip(used, (ids, other_ids), strict=True)
    )
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter, grad in expected.items():
        torch.testing.assert_close(found[parameter], grad, rtol=0, atol=BOUND)


@on_ranks(2)
def test_a_union_of_relations_is_made_once_for_all_layers_and_calls(comm):
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(TwoLayers(lambda i, o: gnn.HGTConv(i, o, METADATA)).double(), comm)
    for _ in range(3):
        model(graph.x_dict, graph)
    plans = [relation.plan for relation in graph.relations.values()]
    count, halo_of_union, halo = (
        sum(len(plan.comm.caches.of(Unions, plan).made) for plan in plans),
        plans[0].comm.caches.of(Unions, plans[0]).made[0].edge_index.plan.num_halo,
        graph.num_halo,
    )
    assert count == 1 and halo_of_union == halo  # HGT keeps a row per relation


@pytest.mark.parametrize("against", [False, True])
def test_hgt_takes_relations_in_any_order_and_against_their_direction(against):
    """PyG itself needs them in the order of the metadata."""
    torch.manual_seed(0)
    plain = gnn.HGTConv(5, 4, METADATA).double()
    expected = plain(by_type(GRAPH.node, "x"), GRAPH.edges | ({BY: GRAPH.edges[WRITES].flip(0)} if against else {}))

    def work(comm, graph):
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        edges = graph.edge_index_dict | ({BY: graph[WRITES].edge_index.flip(0)} if against else {})
        out = model(graph.x_dict, edges if against else dict(reversed(list(edges.items()))))
        for kind, rows in graph.node_ids_dict.items():
            torch.testing.assert_close(out[kind], expected[kind][rows], rtol=0, atol=BOUND)

    on_shares(GRAPH, work)


def test_semantic_attention_is_that_of_the_whole_graph():
    torch.manual_seed(0)
    plain = gnn.HANConv(5, 4, METADATA).double()
    _, expected = plain(by_type(GRAPH.node, "x"), GRAPH.edges, return_semantic_attention_weights=True)

    def work(comm, graph):
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        _, found = model(graph.x_dict, graph, return_semantic_attention_weights=True)
        for kind in expected:
            torch.testing.assert_close(found[kind], expected[kind], rtol=0, atol=BOUND)

    on_shares(GRAPH, work, owners="types apart")


LAZY = {
    "HeteroConv": lambda: gnn.HeteroConv({kind: gnn.SAGEConv((-1, -1), 4) for kind in METADATA[1]}),
    "HGTConv": lambda: gnn.HGTConv(-1, 4, METADATA),
    "to_hetero": lambda: gnn.to_hetero(gnn.GraphSAGE((-1, -1), 6, 2, 4), METADATA),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_layers_take_their_widths_from_a_call_on_made_up_nodes(name):
    lazy = LAZY[name]().double()

    def work(comm, graph):
        model = copy.deepcopy(lazy)
        with pytest.raises(RefusedError, match="has no shape yet"):
            sp.pyg.wrap(model, comm)
        with torch.no_grad():
            nodes = {kind: torch.zeros(2, width).double() for kind, width in graph.num_features.items()}
            model(nodes, {kind: torch.zeros(2, 1, dtype=torch.long) for kind in graph.edge_types})
        out = sp.pyg.wrap(model, comm)(graph.x_dict, graph)
        assert {kind: len(rows) for kind, rows in out.items()} == {k: graph[k].num_own_nodes for k in out}

    on_shares(GRAPH, work, owners="types apart")


@pytest.mark.parametrize("name", some_by_default(MODELS, "to_hetero SAGE", "HGT"))
def test_a_copy_of_a_wrapped_model_is_wrapped_and_uses_its_own_parameters(name):
    make, call = MODELS[name]
    plain = make().double()

    def work(comm, graph):
        fields = {kind: dict(graph[kind]) for kind in (*METADATA[0], *METADATA[1])}
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        twin = copy.deepcopy(model)
        assert sp.pyg.wrap(twin, comm) is twin and list(twin.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(2)
        mine, other = call(model, fields, graph), call(twin, fields, graph)
        assert not any(torch.equal(mine[kind], other[kind]) for kind in mine if mine[kind].numel())
        torch.stack([rows.sum() for rows in other.values()]).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())

    on_shares(GRAPH, work)


@pytest.mark.parametrize("name", ["HGTConv", "HANConv", "HeteroConv SAGE"])
def test_ordinary_tensors_are_refused(name):
    make, call = LAYERS[name]
    with pytest.raises(RefusedError, match="Pass the graph that shardpass"):
        call(sp.pyg.wrap(make().double(), sp.connect("local")), GRAPH.node, dict(GRAPH.edges))


MISUSES = {
    "ordinary edges beside sharded ones": (
        lambda edges, nodes: edges.update({WRITES: torch.zeros(2, 3, dtype=torch.long)}),
        "take them all from graph.edge_index_dict",
    ),
    "edges under the name of another type": (
        lambda edges, nodes: edges.update({WRITES: edges[BY]}),
        "go from 'paper' to 'author'; expected edges of that type",
    ),
    "rows of another type": (
        lambda edges, nodes: nodes.update(author=torch.zeros(1, 5).double()),
        "expected|need",
    ),
    "a missing type": (lambda edges, nodes: nodes.pop("venue"), ""),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize(
    "name", some_by_default(["HeteroConv SAGE", "HGTConv", "HANConv"], "HeteroConv SAGE", "HGTConv")
)
def test_dicts_that_do_not_fit_are_told_on_every_rank(name, misuse):
    change, words = MISUSES[misuse]

    def work(comm, graph):
        model = sp.pyg.wrap(LAYERS[name][0]().double(), comm)
        edges, nodes = graph.edge_index_dict, graph.x_dict
        change(edges, nodes)
        with pytest.raises((ValueError, RefusedError, KeyError, AttributeError, TypeError), match=words):
            model(nodes, edges)

    on_shares(GRAPH, work)


@pytest.mark.parametrize("which", ["nodes", "edges"])
@on_ranks(2)
def test_ranks_that_pass_types_in_another_order_are_told(comm, which):
    """HANConv communicates in that order, on tensors that look alike."""
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(gnn.HANConv(5, 4, METADATA).double(), comm, check=False)
    nodes, edges = graph.x_dict, graph.edge_index_dict
    if comm.rank == 1 and which == "nodes":
        nodes = dict(reversed(list(nodes.items())))
    if comm.rank == 1 and which == "edges":
        edges = dict(reversed(list(edges.items())))
    with pytest.raises(DivergenceError, match=r"types of the arguments: ranks disagree"):
        model(nodes, edges)


@on_ranks(2)
def test_an_edge_type_that_hgt_does_not_know_is_told(comm):
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(gnn.HGTConv(5, 4, (METADATA[0], [CITES])).double(), comm)
    with pytest.raises(ValueError, match=r"are not edge types of this layer"):
        model(graph.x_dict, graph)


def test_reversed_relations_are_refused_by_bases_with_the_way_out():
    plain = MODELS["to_hetero_with_bases SAGE"][0]().double()

    def work(comm, graph):
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        with pytest.raises(RefusedError, match="ToUndirected"):
            model(graph.x_dict, {**graph.edge_index_dict, BY: graph[WRITES].edge_index.flip(0)})

    on_shares(GRAPH, work)


class OwnHAN(gnn.HANConv):
    """A forward of the user's own, which hides the mean over nodes."""

    def forward(self, x_dict, edge_index_dict):
        return super().forward(x_dict, edge_index_dict)


def test_derived_layers_with_a_forward_of_their_own_are_refused():
    with pytest.raises(RefusedError, match="OwnHAN cannot be exact"):
        sp.pyg.wrap(OwnHAN(5, 4, METADATA), sp.connect("local"))


def test_rgcn_that_would_number_the_nodes_itself_is_refused():
    def work(comm, graph):
        model = sp.pyg.wrap(gnn.RGCNConv(23, 4, 2).double(), comm)
        edges = graph[CITES]
        kinds = edges.edge_ids % 2
        with pytest.raises(RefusedError, match=r"pass x=graph.node_ids"):
            model(None, edges.edge_index, kinds)
        return model(graph["paper"].node_ids, edges.edge_index, kinds), graph["paper"].node_ids, model.state_dict()

    results = on_shares(GRAPH, work)
    plain = gnn.RGCNConv(23, 4, 2).double()
    plain.load_state_dict(results[0][2])
    expected = plain(None, GRAPH.edges[CITES], torch.arange(60) % 2)
    for out, ids, _ in results:
        torch.testing.assert_close(out, expected[ids], rtol=0, atol=BOUND)


GUARDS = [
    lambda e: e.size(1) > 0,
    lambda e: e.numel(),
    lambda e: e.shape[1] >= 1,
    lambda e: not e.size(1) < 1,
]


class Guarded(torch.nn.Module):
    """It leaves out edge types without edges."""

    def __init__(self, guard):
        super().__init__()
        self.conv, self.guard = LAYERS["HeteroConv SAGE"][0](), guard

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, {kind: edges for kind, edges in edge_index_dict.items() if self.guard(edges)})


def three_calls(m, fields, graph):
    edges = graph if isinstance(graph, dict) else graph.edge_index_dict
    found = [m(by_type(fields, "x"), edges) for _ in range(3)]  # the third is not followed
    return {kind: sum(out[kind] for out in found) for kind in found[0]}


def test_types_that_only_this_rank_lacks_are_not_left_out():
    torch.manual_seed(0)
    owners = {"empty part": hetero_assignments(GRAPH, 3)["empty part"]}
    model = Guarded(lambda e: all(guard(e) for guard in GUARDS)).double()
    assert_exact(model, GRAPH, three_calls, sp.pyg.wrap, ranks=3, modes=("sar",), owners=owners)


@on_ranks(2)
def test_whether_this_rank_has_no_edges_is_refused(comm):
    graph = share(GRAPH, comm)
    with pytest.raises(RefusedError, match=r"hetero\.py:\d+: .*== 0.*whether there are \d+ edges.*Ask `> 0`"):
        model = sp.pyg.wrap(Guarded(lambda e: not e.size(1) == 0).double(), comm)  # noqa: SIM201
        model(graph.x_dict, graph.edge_index_dict)
