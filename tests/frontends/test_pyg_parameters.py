"""Parameters of wrapped models: changed, parametrised, clipped, averaged and trained as on the whole graph."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardpass as sp
from shardpass.errors import RefusedError

from .pyg_cases import GRAPH
from .test_pyg_tooling import Model, assert_exact_on_ranks, loss_of, made, on_ranks


def test_precision_freezing_and_apply_after_wrap():
    def work(comm, graph):
        model = sp.pyg.wrap(Model(), comm).double()
        model.apply(lambda m: m.weight.data.fill_(0.25) if isinstance(m, nn.Linear) else None)
        model.mlp.requires_grad_(False)
        model(graph.x, graph).sum().backward()
        sp.sync_gradients(model, comm)
        assert model.mlp[0].weight.grad is None and model.conv.att_src.grad is not None
        low = sp.pyg.wrap(made(lambda: gnn.SAGEConv(5, 4)), comm).half()
        assert low(graph.x.half(), graph).dtype == torch.float16

    on_ranks(work)


@pytest.mark.parametrize("how", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrised_weights_in_messages(how):
    assert_exact_on_ranks(made(lambda: gnn.EdgeConv(how(nn.Linear(10, 4)))), bound=1e-9)


def test_spectral_norm_is_exact_outside_messages_and_refused_inside():
    class Dense(Model):
        def __init__(self):
            super().__init__()
            self.mlp[0] = parametrizations.spectral_norm(self.mlp[0])

    assert_exact_on_ranks(made(Dense))
    inside = made(lambda: gnn.EdgeConv(parametrizations.spectral_norm(nn.Linear(10, 4))))
    assert_exact_on_ranks(copy.deepcopy(inside).eval())

    def work(comm, graph):
        with pytest.raises(RefusedError, match="inside a message changes a tensor made outside it"):
            sp.pyg.wrap(copy.deepcopy(inside), comm)(graph.x, graph)

    on_ranks(work)


class WithTable(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.conv = table, gnn.GCNConv(5, 4)

    def forward(self, edge_index):
        return self.conv(self.table.weight, edge_index)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm_counts_rows_owned_by_ranks_once(max_norm):
    def work(comm, graph):
        with sp.seed(0, comm):
            model = WithTable(sp.NodeEmbedding(graph, 5, dtype=torch.float64)).double()
        first = model.table.weight.detach().clone()
        sp.pyg.wrap(model, comm)
        loss_of(model(graph), graph.node_ids).backward()
        norm = sp.clip_grad_norm(model, max_norm, comm)
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step()
        grads = (model.table.weight.grad, model.conv.lin.weight.grad, model.conv.lin.weight.detach().clone())
        return norm, graph.node_ids, first, *grads, model.conv.state_dict()

    results = on_ranks(work)
    rows = torch.empty(GRAPH.num_nodes, 5, dtype=torch.float64)
    for _, ids, first, *_ in results:
        rows[ids] = first
    whole = WithTable(nn.Embedding.from_pretrained(rows, freeze=False)).double()
    start = copy.deepcopy(results[0][-1])
    start["lin.weight"] = results[0][5] + 0.1 * results[0][4]  # before the step
    start["bias"] = torch.zeros(4, dtype=torch.float64)
    whole.conv.load_state_dict(start)
    out = whole(GRAPH.edge_index)
    loss_of(out).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
    for norm, ids, _, table_grad, grad, *_ in results:
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(table_grad, whole.table.weight.grad[ids])
        torch.testing.assert_close(grad, whole.conv.lin.weight.grad)


def test_training_with_clipping_foreach_and_ema_equals_the_whole_graph():
    def trained(model, step, x, edge_index, objective):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(4):
            optimizer.zero_grad(set_to_none=True)
            objective(model(x, edge_index)).backward()
            step(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            return average(x, edge_index)

    plain = made()

    def work(comm, graph):
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        objective = lambda out: sp.mean(out.square().sum(1), None, comm)  # noqa: E731
        out = trained(model, lambda m: sp.sync_gradients(m, comm), graph.x, graph, objective)
        return out, graph.node_ids

    expected = trained(
        copy.deepcopy(plain), lambda m: None, GRAPH.node["x"], GRAPH.edge_index, lambda out: out.square().sum() / 41
    )
    for out, ids in on_ranks(work):
        torch.testing.assert_close(out, expected[ids], rtol=0, atol=1e-7)
