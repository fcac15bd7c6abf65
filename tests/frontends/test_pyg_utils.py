"""PyG's functions on edge_index in a model's own code: exact on the stand-in, or refused by name."""

import re
from inspect import signature

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
import torch_geometric.utils as pyg
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.frontends.pyg import functions
from shardpass.testing import assignments, run, shard_in_memory

from .how_much import ONE_TWO_FOUR
from .on_ranks import on_ranks, share
from .one_by_one import assert_each_exact, refusals
from .pyg_cases import GRAPH

N = GRAPH.num_nodes


def _passes(change):
    """Messages along the edges that a function makes of the list and its weights."""

    def between(m, h, e, w):
        out = change(e, w, h.size(0))
        return m.last(h, *out) if isinstance(out, tuple) else m.last(h, out)

    return between


def _times(values):
    """The rows times the number that a function gives for each node."""
    return lambda m, h, e, w: h * values(h, e, w).to(h.dtype).view(-1, 1)


STRUCTURE = {
    "add_self_loops": lambda e, w, n: pyg.add_self_loops(e, w, 2.0, n),
    "add_self_loops: mean": lambda e, w, n: pyg.add_self_loops(e, w, "mean", n),
    "add_remaining_self_loops": lambda e, w, n: pyg.add_remaining_self_loops(e, w, 0.5, n),
    "remove_self_loops": lambda e, w, n: pyg.remove_self_loops(e, w),
    "segregate_self_loops": lambda e, w, n: pyg.segregate_self_loops(e, w)[:2],
    "segregate_self_loops: loops": lambda e, w, n: pyg.segregate_self_loops(e, w)[2:],
    "get_laplacian": lambda e, w, n: pyg.get_laplacian(e, w, "sym", num_nodes=n),
    "get_laplacian: rw": lambda e, w, n: pyg.get_laplacian(e, w, "rw", num_nodes=n),
    "normalize_edge_index": lambda e, w, n: pyg.normalize_edge_index(e, n),
    "normalize_edge_index: rw": lambda e, w, n: pyg.normalize_edge_index(e, n, False, False),
    "degree": lambda e, w, n: (e, w * pyg.degree(e[1], n, w.dtype)[e[1]]),
    "degree: sources": lambda e, w, n: (e, w * pyg.degree(e[0], n, w.dtype)[e[0]]),
    "softmax": lambda e, w, n: (e, pyg.softmax(w, e[1], num_nodes=n)),
    "softmax: sources": lambda e, w, n: (e, pyg.softmax(w, e[0], num_nodes=n)),
    "mask_to_index": lambda e, w, n: (e[:, pyg.mask_to_index(w > 0.5)], w[w > 0.5]),
    "normalized_cut": lambda e, w, n: (e, pyg.normalized_cut(e, w, n).clamp(max=9)),
    "dropout_edge": lambda e, w, n: pyg.dropout_edge(e, training=False)[0],
    "dropout_node": lambda e, w, n: pyg.dropout_node(e, training=False)[0],
    "dropout_adj": lambda e, w, n: pyg.dropout_adj(e, w, training=False),
}
EXACT = {name: _passes(change) for name, change in STRUCTURE.items()} | {
    "scatter": lambda m, h, e, w: pyg.scatter(h[e[0]], e[1], 0, h.size(0), "max"),
    "scatter: sources": lambda m, h, e, w: pyg.scatter(h[e[1]], e[0], 0, h.size(0), "mean"),
    "get_self_loop_attr": _times(lambda h, e, w: pyg.get_self_loop_attr(e, w, h.size(0))),
    "index_to_mask": _times(lambda h, e, w: pyg.index_to_mask(e[1], h.size(0))),
    "index_to_mask: sources": _times(lambda h, e, w: pyg.index_to_mask(e[0], h.size(0))),
    "index_to_mask: both": _times(lambda h, e, w: pyg.index_to_mask(e.view(-1), h.size(0))),
    "subgraph": lambda m, h, e, w: m.last(h, *pyg.subgraph(h[:, 0] > 0, e, w)),
    "bipartite_subgraph": lambda m, h, e, w: m.last(h, *pyg.bipartite_subgraph((h[:, 0] > 0, h[:, 1] > 0), e, w)),
}


@pytest.mark.parametrize("ranks", [4, pytest.param(1, marks=pytest.mark.long)])
def test_functions_that_look_at_rows_one_by_one_are_exact(ranks):
    assert_each_exact(EXACT, GRAPH, ranks)


_IDS = "sorts, compares or makes up ids of nodes, which every rank numbers anew; apply it before you partition"
_ANSWER = "gives one answer for the whole graph, of which this rank has a part; compute it before you partition"
_MATRIX = r"no rank has the whole matrix; .*torch_geometric\.nn\.SimpleConv\('sum'\)"
_NEGATIVES = r"shardpass\.negative_sampling\(graph\) draws them"
_ORDER = "an order of its own, on which layers do not depend; leave it out, or sort before you partition"
_BATCH = "use a readout over graph.batch"
INSTEAD = {
    "coalesce": (lambda m, h, e, w: m.last(h, pyg.coalesce(e, num_nodes=h.size(0))), _IDS),
    "to_undirected": (lambda m, h, e, w: m.last(h, pyg.to_undirected(e)), _IDS),
    "add_random_edge": (lambda m, h, e, w: m.last(h, pyg.add_random_edge(e, 0.3)[0]), _IDS),
    "remove_isolated_nodes": (lambda m, h, e, w: m.last(h, pyg.remove_isolated_nodes(e)[0]), _IDS),
    "k_hop_subgraph": (lambda m, h, e, w: m.last(h, pyg.k_hop_subgraph(0, 1, e, num_nodes=len(h))[1]), _IDS),
    "get_ppr": (lambda m, h, e, w: m.last(h, *pyg.get_ppr(e, num_nodes=h.size(0))), _IDS),
    "sort_edge_index": (lambda m, h, e, w: m.last(h, *pyg.sort_edge_index(e, w, h.size(0), False)), _ORDER),
    "lexsort": (lambda m, h, e, w: m.last(h, e[:, pyg.lexsort([e[0], e[1]])]), _ORDER),
    "index_sort": (lambda m, h, e, w: m.last(h, e[:, pyg.index_sort(e[1])[1]]), _ORDER),
    "group_argsort": (lambda m, h, e, w: m.last(h, e, pyg.group_argsort(w, e[1], num_groups=h.size(0)) + w), _ORDER),
    "is_undirected": (lambda m, h, e, w: h if pyg.is_undirected(e) else -h, _ANSWER),
    "contains_self_loops": (lambda m, h, e, w: h if pyg.contains_self_loops(e) else -h, _ANSWER),
    "contains_isolated_nodes": (lambda m, h, e, w: h if pyg.contains_isolated_nodes(e, h.size(0)) else -h, _ANSWER),
    "homophily": (lambda m, h, e, w: h * pyg.homophily(e, (h[:, 0] > 0).long()), _ANSWER),
    "assortativity": (lambda m, h, e, w: h * pyg.assortativity(e), _ANSWER),
    "structured_negative_sampling_feasible": (
        lambda m, h, e, w: h if pyg.structured_negative_sampling_feasible(e, h.size(0)) else -h,
        _ANSWER,
    ),
    "to_dense_adj": (lambda m, h, e, w: pyg.to_dense_adj(e, edge_attr=w, max_num_nodes=h.size(0))[0] @ h, _MATRIX),
    "to_torch_coo_tensor": (lambda m, h, e, w: pyg.to_torch_coo_tensor(e, w, h.size(0)) @ h, _MATRIX),
    "to_torch_csr_tensor": (lambda m, h, e, w: pyg.to_torch_csr_tensor(e, w, h.size(0)) @ h, _MATRIX),
    "to_torch_csc_tensor": (lambda m, h, e, w: pyg.to_torch_csc_tensor(e, w, h.size(0)) @ h, _MATRIX),
    "to_torch_sparse_tensor": (lambda m, h, e, w: pyg.to_torch_sparse_tensor(e, w, h.size(0)) @ h, _MATRIX),
    "to_scipy_sparse_matrix": (lambda m, h, e, w: h * pyg.to_scipy_sparse_matrix(e).nnz, "that before you partition"),
    "negative_sampling": (lambda m, h, e, w: m.last(h, pyg.negative_sampling(e, h.size(0))), _NEGATIVES),
    "batched_negative_sampling": (
        lambda m, h, e, w: m.last(h, pyg.batched_negative_sampling(e, torch.zeros(len(h), dtype=int))),
        _NEGATIVES,
    ),
    "structured_negative_sampling": (lambda m, h, e, w: h + pyg.structured_negative_sampling(e)[2].sum(), _NEGATIVES),
    "unbatch_edge_index": (
        lambda m, h, e, w: m.last(h, pyg.unbatch_edge_index(e, torch.zeros(len(h), dtype=torch.long))[0]),
        _BATCH,
    ),
    "to_dense_batch": (lambda m, h, e, w: h + pyg.to_dense_batch(h, torch.zeros(len(h), dtype=int))[0].sum(), _BATCH),
    "shuffle_node": (lambda m, h, e, w: pyg.shuffle_node(h)[0], "takes rows of all nodes or edges together"),
    "trim_to_layer": (lambda m, h, e, w: m.last(h, pyg.trim_to_layer(1, [4, 3], [5, 6], h, e)[1]), "leave it out"),
}
UNLESS = {
    "degree": (_times(lambda h, e, w: pyg.degree(e[1])), r"without `num_nodes` .*pass num_nodes=x\.size\(0\)"),
    "scatter": (lambda m, h, e, w: pyg.scatter(h[e[0]], e[1]), r"without `dim_size` .*pass dim_size=x\.size\(0\)"),
    "normalized_cut": (lambda m, h, e, w: m.last(h, e, pyg.normalized_cut(e, w)), "without `num_nodes`"),
    "index_to_mask": (_times(lambda h, e, w: pyg.index_to_mask(e[1])), "without `size`"),
    "dropout_edge": (lambda m, h, e, w: m.last(h, pyg.dropout_edge(e, 0.3, True)[0]), "with force_undirected=True"),
    "dropout_adj": (lambda m, h, e, w: m.last(h, pyg.dropout_adj(e, w, 0.3, True)[0]), "with force_undirected=True"),
    "dropout_node": (
        lambda m, h, e, w: m.last(h, pyg.dropout_node(e, 0.3, relabel_nodes=True)[0]),
        "with relabel_nodes=True",
    ),
    "subgraph": (lambda m, h, e, w: m.last(h, pyg.subgraph(h[:, 0] > 0, e, w, True)[0]), "with relabel_nodes=True"),
    "bipartite_subgraph": (
        lambda m, h, e, w: m.last(h, pyg.bipartite_subgraph((h[:, 0] > 0, h[:, 0] > 0), e, w, True)[0]),
        "with relabel_nodes=True",
    ),
}


@pytest.mark.parametrize(("table", "ranks"), [(INSTEAD, 1), (UNLESS, 3)], ids=["always", "as it is called"])
def test_functions_that_cannot_be_exact_say_what_to_do(table, ranks):
    found = refusals({name: between for name, (between, _) in table.items()}, GRAPH, ranks)
    about = {name: f"torch_geometric.utils.{name} cannot be exact in a model on a sharded graph: " for name in table}
    wrong = {
        name: text for name, text in found.items() if about[name] not in text or re.search(table[name][1], text) is None
    }
    assert wrong == {}, "\n".join(f"{name}: {text}" for name, text in wrong.items())


OTHERS = {
    "to_edge_index spmm": "take a sparse matrix, which a model is not given",
    "to_networkx to_networkit to_cugraph to_dgl to_trimesh to_rdmol to_smiles": "another library or a whole Data",
    "dropout_path": "needs pyg-lib",
    "unbatch to_nested_tensor segment": "as to_dense_batch and shuffle_node",
    "mask_select select narrow": "torch's own functions on edge_index: tests/frontends/test_pyg_rearranged.py",
    "segment_logsumexp group_cat one_hot cumsum": "of rows alone",
    "dense_to_sparse": "makes edges from a dense matrix",
    "is_sparse is_torch_sparse_tensor": "look at the class of a tensor",
    "geodesic_distance": "on meshes",
}


def test_every_function_of_pyg_that_takes_edges_is_in_a_table():
    taking = {"edge_index", "index", "adj", "src", "keys", "inputs"}
    names = [name for name in pyg.__all__ if not taking.isdisjoint(signature(getattr(pyg, name)).parameters)]
    known = {name.split(":")[0] for name in EXACT} | {*INSTEAD, *UNLESS, *" ".join(OTHERS).split()}
    assert [name for name in names if name not in known] == []
    assert (
        functions.INSTEAD.keys() - known == set() and functions.UNLESS.keys() - {*UNLESS, "get_self_loop_attr"} == set()
    )


class Dropping(nn.Module):
    """Drops edges or nodes in every forward, and keeps what it dropped."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.second = function, gnn.GCNConv(5, 6), gnn.SAGEConv(6, 4, aggr="max")

    def forward(self, x, edge_index):
        edge_index, self.kept, *_ = self.function(edge_index, 0.4, training=self.training)
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize("function", [pyg.dropout_edge, pyg.dropout_node], ids=lambda f: f.__name__)
def test_dropped_edges_are_those_of_one_mask_over_the_whole_graph(function, ranks):
    """What the ranks kept, put together, is a mask of the whole graph that gives the same output and gradients."""
    torch.manual_seed(0)
    model = Dropping(function).double()
    state = model.state_dict()
    owners = assignments(N, ranks, GRAPH.edge_index)["random"]

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        mine = Dropping(function).double()
        mine.load_state_dict(state)
        mine = sp.pyg.wrap(mine, comm)
        x = graph.x.clone().requires_grad_()
        out = mine(x, graph)
        out.square().sum().backward()
        return graph.node_ids, graph.edge_ids[mine.kept], out.detach(), x.grad

    results = run(work, ranks)
    kept = torch.cat([edges for _, edges, _, _ in results]).sort().values
    assert 0 < len(kept) < GRAPH.edge_index.size(1) and len(kept.unique()) == len(kept)
    edges = GRAPH.edge_index[:, kept]
    x = GRAPH.node["x"].clone().requires_grad_()
    expected = model.second(model.first(x, edges).relu(), edges)
    expected.square().sum().backward()
    for ids, _, out, grad in results:
        torch.testing.assert_close(out, expected[ids], rtol=0, atol=1e-10)
        torch.testing.assert_close(grad, x.grad[ids], rtol=0, atol=1e-10)
    if function is pyg.dropout_node:
        gone = torch.ones(GRAPH.edge_index.size(1), dtype=torch.bool)
        gone[kept] = False
        nodes = set(range(N)) - set(edges.flatten().tolist())
        assert all(int(a) in nodes or int(b) in nodes for a, b in GRAPH.edge_index[:, gone].t())


@pytest.mark.parametrize("function", [pyg.dropout_edge, pyg.dropout_node], ids=lambda f: f.__name__)
@on_ranks(2)
def test_evaluation_drops_nothing(comm, function):
    torch.manual_seed(0)
    model = Dropping(function).double().eval()
    expected = model(GRAPH.node["x"], GRAPH.edge_index)
    graph = share(GRAPH, comm)
    mine = Dropping(function).double().eval()
    mine.load_state_dict(model.state_dict())
    torch.testing.assert_close(sp.pyg.wrap(mine, comm)(graph.x, graph), expected[graph.node_ids])


OUTSIDE = {
    "add_random_edge": lambda g: pyg.add_random_edge(g.edge_index, 0.3),
    "coalesce": lambda g: pyg.coalesce(g.edge_index),
    "to_dense_adj": lambda g: pyg.to_dense_adj(g.edge_index),
    "to_torch_coo_tensor": lambda g: pyg.to_torch_coo_tensor(g.edge_index),
}


@pytest.mark.parametrize("name", OUTSIDE)
@on_ranks(2)
def test_outside_of_a_model_they_are_refused_too(comm, name):
    with pytest.raises(RefusedError, match="of a sharded graph"):
        OUTSIDE[name](share(GRAPH, comm))
