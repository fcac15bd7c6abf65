"""Parameters of wrapped models, rows of tables among them: trained as on the whole graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assignments, awkward_hetero_graph, run, shard_in_memory

from .how_much import ONE_TWO_FOUR, one_each
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH
from .test_pyg_tooling import Model, assert_exact_on_ranks, loss_of, made, of_ranks


@on_ranks(3)
def test_precision_freezing_and_apply_after_wrap(comm):
    graph = share(GRAPH, comm, chunk_bytes=700)
    model = sp.pyg.wrap(Model(), comm).double()
    model.apply(lambda m: m.weight.data.fill_(0.25) if isinstance(m, nn.Linear) else None)
    model.mlp.requires_grad_(False)
    model(graph.x, graph).sum().backward()
    sp.sync_gradients(model, comm)
    assert model.mlp[0].weight.grad is None and model.conv.att_src.grad is not None
    low = sp.pyg.wrap(made(lambda: gnn.SAGEConv(5, 4)), comm).half()
    assert low(graph.x.half(), graph).dtype == torch.float16


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

    of_ranks(work)


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

    results = of_ranks(work)
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


Y = torch.arange(GRAPH.num_nodes) % 4
EPOCHS = 20


class Featureless(nn.Module):
    """A graph without features: rows to be learned, in the manner of R-GCN."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.convs = nn.ModuleList([gnn.RGCNConv(6, 8, 2), gnn.RGCNConv(8, 4, 2)])

    def forward(self, edge_index, edge_type):
        h = self.convs[0](self.table.weight, edge_index, edge_type).relu()
        return self.convs[1](h, edge_index, edge_type)


class Recommender(gnn.LightGCN):
    """LightGCN with its table given."""

    def __init__(self, table):
        super().__init__(GRAPH.num_nodes, 6, 3)
        self.embedding = table

    def forward(self, edge_index, edge_type):
        return self.get_embedding(edge_index)


def trained_with(model, edge_index, edge_type, loss_of, step):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = loss_of(model(edge_index, edge_type))
        loss.backward()
        step()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize(("make", "mode"), one_each([Featureless, Recommender], ["sar", "halo"]))
def test_training_equals_that_of_the_whole_table(make, ranks, mode):
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"]
    edge_type = torch.arange(GRAPH.edge_index.size(1)) % 2

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm, sp.Options(mode=mode))
        with sp.seed(0, comm):
            table = sp.NodeEmbedding(graph, 6, dtype=torch.float64)
            model = make(table).double()
        first = table.weight.detach().clone()
        sp.pyg.wrap(model, comm, check=mode == "sar")
        everyone = torch.ones(graph.num_own_nodes, dtype=torch.bool)
        losses = trained_with(
            model,
            graph,
            edge_type[graph.edge_ids],
            lambda h: sp.cross_entropy(h[:, :4], Y[graph.node_ids], everyone, comm),
            lambda: sp.sync_gradients(model, comm),
        )
        return losses, first, graph.node_ids

    results = run(work, ranks)
    rows = torch.empty(GRAPH.num_nodes, 6, dtype=torch.float64)
    for _, first, ids in results:
        rows[ids] = first
    torch.manual_seed(0)
    torch.randint(2**62, ())
    whole = make(nn.Embedding.from_pretrained(rows, freeze=False)).double()
    expected = trained_with(whole, GRAPH.edge_index, edge_type, lambda h: F.cross_entropy(h[:, :4], Y), lambda: None)
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(torch.tensor(results[0][0]), torch.tensor(expected), rtol=1e-9, atol=0)


def test_first_values_do_not_depend_on_the_number_of_ranks():
    found = []
    for ranks in (1, 3):
        owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"]

        def work(comm, owners=owners):
            graph = shard_in_memory(GRAPH, owners, comm)
            with sp.seed(5, comm):
                return sp.NodeEmbedding(graph, 3).weight.detach(), graph.node_ids

        rows = torch.empty(GRAPH.num_nodes, 3)
        for weight, ids in run(work, ranks):
            rows[ids] = weight
        found.append(rows)
    assert torch.equal(*found)
    assert abs(float(found[0].std()) - 1) < 0.3 and len(torch.unique(found[0])) == found[0].numel()


@on_ranks(2)
def test_types_have_tables_of_their_own(comm):
    graph = awkward_hetero_graph()
    sharded = share(graph, comm)
    table = sp.NodeEmbedding(sharded, 4, "author")
    assert table().shape == (sharded["author"].num_own_nodes, 4) and table.total_nodes == 14
    for kind in (None, "editor"):
        with pytest.raises(ValueError, match=f"node_type={kind!r}; expected one of the types of this graph: "):
            sp.NodeEmbedding(sharded, 4, kind)


@on_ranks(2)
def test_copies_and_double_keep_the_rows_local(comm):
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    table = copy.deepcopy(sp.NodeEmbedding(graph, 3)).double()
    assert table.weight.shardpass_local and "of 41 'node' rows" in repr(table)


class OwnTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.conv = nn.Parameter(torch.randn(GRAPH.num_nodes, 5)), gnn.GCNConv(5, 4)

    def forward(self, x, edge_index):
        return self.conv(self.rows, edge_index)


class Embedded(OwnTable):
    def __init__(self):
        super().__init__()
        del self.rows
        self.table = nn.Embedding(GRAPH.num_nodes, 5)

    def forward(self, x, edge_index):
        return self.conv(self.table.weight, edge_index)


@pytest.mark.parametrize("make", [OwnTable, Embedded])
@pytest.mark.parametrize("check", [True, False])
@on_ranks(2)
def test_other_tables_by_node_are_refused(comm, make, check):
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    model = sp.pyg.wrap(make(), comm, check=check)
    with pytest.raises(RefusedError, match=r"a row for each of the 41 nodes .*NodeEmbedding\(graph, 5\) in its"):
        model(graph.x.float(), graph)


@pytest.mark.parametrize("shared", [False, True])
def test_all_ranks_skip_a_step_whose_gradient_is_infinite_on_one(shared):
    """As torch's scaler does it in one process, where the gradient of a row, or of a weight, overflows."""

    def epochs(model, edges, types, sync, rows, first):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", 1024.0)
        scales = []
        for epoch in range(4):
            optimizer.zero_grad()
            scaler.scale((model(edges, types)[:, 0] * rows).sum() / 41).backward()
            spoilt = model.convs[0].weight if shared else model.table.weight
            if epoch == 1 and first:
                spoilt.grad.view(-1)[0] = float("inf")
            sync(model, scaler)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    plain = Featureless(nn.Embedding(41, 6)).double()
    owners, types = torch.arange(41) % 3 // 2, torch.arange(220) % 2  # two ranks; node 0 is the first row of rank 0
    rows = torch.linspace(0, 1, 41).double()
    expected = epochs(copy.deepcopy(plain), GRAPH.edge_index, types, lambda model, scaler: None, rows, True)

    def rank(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        model = Featureless(sp.NodeEmbedding(graph, 6)).double()
        state = plain.state_dict() | {"table.weight": plain.table.weight.detach()[graph.node_ids]}
        model.load_state_dict(state)
        sp.pyg.wrap(model, comm)
        found = epochs(
            model, graph, types[graph.edge_ids], lambda m, scaler: sp.sync_gradients(m, comm, scaler=scaler),
            rows[graph.node_ids], shared or comm.rank == 0,
        )  # fmt: skip
        return graph.node_ids, found

    for ids, (scales, parameters) in run(rank, 2):
        assert scales == expected[0] == [1024.0, 512.0, 512.0, 512.0]
        torch.testing.assert_close(parameters[0], expected[1][0][ids])
        for mine, other in zip(parameters[1:], expected[1][1:]):
            torch.testing.assert_close(mine, other)
