"""What was refused inside a model though it is right runs and is exact; where a refusal stays, its words help."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run

from . import inside_refused as tables
from .inside_model import GRAPH, OWNERS, TEAMS, Together, built, called, cases, own_fields, refused_or_why

MUST_RUN, WORDS = cases(tables.MUST_RUN), cases(tables.WORDS)


@pytest.fixture(scope="module")
def together(doubles, tmp_path_factory):
    return Together(MUST_RUN, tmp_path_factory.mktemp("must run"))


@pytest.mark.parametrize("name", MUST_RUN)
def test_what_is_right_runs_and_is_exact(name, together):
    wrong = together.wrong(name)
    assert not wrong, "\n".join([str(MUST_RUN[name]), *wrong])


@pytest.mark.parametrize("name", WORDS)
def test_a_refusal_says_what_helps(name, doubles, tmp_path):
    case = WORDS[name]
    model = built(case, tmp_path)
    called(copy.deepcopy(model), dict(GRAPH.node | GRAPH.edge), GRAPH.edge_index)  # it runs on the whole graph
    wrong = refused_or_why(model, case)
    assert not wrong, "\n".join([str(case), *wrong])


CHECKED = cases("""
a scale that is negative at one node
    scale = torch.where(x[:, :1] == SEEN, -1.0, 1.0).expand(n, 8)
    h = torch.distributions.Normal(h, scale, validate_args=True).log_prob(torch.zeros_like(h))
""")


@pytest.mark.parametrize("ranks", OWNERS)
def test_a_check_of_arguments_that_fails_at_one_node_ends_the_call_on_every_rank(ranks, doubles, tmp_path):
    (case,) = CHECKED.values()
    case.lines["top"] = [f"SEEN = {float(GRAPH.node['x'][5, 0])!r}"]
    model = built(case, tmp_path)
    with pytest.raises(ValueError, match="scale"):
        called(model, dict(GRAPH.node | GRAPH.edge), GRAPH.edge_index)

    def job(comm, graph):
        called(sp.pyg.wrap(copy.deepcopy(model), comm), own_fields(graph), graph)

    found = TEAMS[ranks].run(job)
    assert all(isinstance(error, Exception) for error in found)
    assert not any(isinstance(error, RefusedError) for error in found), found
    assert any(isinstance(error, ValueError) and "scale" in str(error) for error in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fields_first_read_in_inference_mode_can_be_trained_on(ranks, tmp_path):
    data = Data(x=GRAPH.node["x"], edge_index=GRAPH.edge_index, y=GRAPH.node["y"])
    sp.partition(data, tmp_path / "parts", parts=2, method="random")

    def work(comm):
        graph = sp.load(tmp_path / "parts", comm)
        with sp.seed(0, comm):
            model = gnn.GCN(6, 8, 2, 8).double()
        model = sp.pyg.wrap(model, comm)
        with torch.inference_mode():
            model(graph.x, graph)
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, None, comm)
        loss.backward()
        sp.sync_gradients(model, comm)
        return [p.grad.abs().sum() for p in model.parameters()]

    assert all(torch.isfinite(torch.stack(found)).all() for found in run(work, ranks))


@pytest.mark.parametrize("ranks", OWNERS)
def test_features_in_a_sparse_tensor_are_exact_or_refused_alike(ranks, doubles, tmp_path):
    (case,) = cases("sparse features\n    h = h.relu()\n").values()
    model = built(case, tmp_path)
    fields = dict(GRAPH.node | GRAPH.edge)
    expected = called(model, fields, GRAPH.edge_index)

    def job(comm, graph):
        own = own_fields(graph) | {"x": graph.x.detach().to_sparse()}
        return (called(sp.pyg.wrap(copy.deepcopy(model), comm), own, graph) - expected[graph.node_ids]).abs().max()

    found = TEAMS[ranks].run(job)
    assert not any(isinstance(one, Exception) and not isinstance(one, RefusedError) for one in found), found
    assert len({isinstance(one, RefusedError) for one in found}) == 1
    assert all(isinstance(one, RefusedError) or one < 1e-10 for one in found), found
