"""Following rows through a wrapped PyG model: exact models pass it, others are refused at the line that mixes rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.utils import add_self_loops, degree, scatter, softmax, to_dense_batch

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing.graphs import assignments, shard_in_memory
from shardpass.testing.run import run

from .conv_cases import CONVS, ONE_SHOT, SORTED, _plain
from .pyg_cases import GRAPH, MODELS


def called(make, call, graph=GRAPH, mode="sar", ranks=2, check=True, times=1):
    """What the model gives on each rank, or the refusal."""
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)["random"]

    def work(comm):
        sharded = shard_in_memory(graph, owners, comm, sp.Options(mode=mode))
        model = sp.pyg.wrap(make().double(), comm, check=check)
        for _ in range(times):
            out = call(model, {**dict(sharded.node), **dict(sharded.edge)}, sharded)
        return out

    return run(work, ranks)


@pytest.mark.long
@pytest.mark.parametrize("name", [*CONVS, *MODELS])
def test_every_exact_layer_and_model_passes(name):
    called(*{**CONVS, **MODELS}[name])


@pytest.mark.parametrize("name", ["SAGEConv median", "SAGEConv lstm"])
def test_whole_neighbourhoods_pass(name):
    called(*ONE_SHOT[name], graph=SORTED, mode="halo")


class Net(nn.Module):
    """A model whose `between` is a program between two layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = gnn.GCNConv(5, 6), gnn.SAGEConv(6, 6)

    def forward(self, x, edge_index):
        return self.last(self.between(self.conv(x, edge_index), x, edge_index), edge_index)

    def between(self, h, x, edge_index):
        return h


class Centred(Net):
    def between(self, h, x, edge_index):
        return h - h.mean(0)  # here


class Hubs(Net):
    def between(self, h, x, edge_index):
        return h + h[degree(edge_index[1], h.size(0)) > 15].sum(0)  # here


class Branch(Net):
    def between(self, h, x, edge_index):
        return h if x.sum() > 0 else -h  # here


class Quotient(Net):
    def between(self, h, x, edge_index):
        return h / len(h) ** 0 / h.shape[0]  # here


class Ids(Net):
    def between(self, h, x, edge_index):
        return h * torch.arange(h.size(0)).view(-1, 1)  # here


class EdgeIds(Net):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index, torch.arange(edge_index.size(1)).double())  # here


class TopRows(Net):
    def between(self, h, x, edge_index):
        return h[h.sum(1).topk(3).indices]  # here


class OtherMask(Net):
    def between(self, h, x, edge_index):
        half = h[x[:, 0] > 0]
        other = h[x[:, 0] <= 0]
        return h + (half[: min(len(half), len(other))] + other[: min(len(half), len(other))]).sum(0)  # here


class Straight(Net):
    """Its output is right; a threshold in backward is each rank's own."""

    def between(self, h, x, edge_index):
        scaled = h / h.detach().abs().max()  # here
        return h + (scaled - scaled.detach())


class Attention(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=0.5)

    def between(self, h, x, edge_index):
        return self.inner(h, h, h)[0]  # here


class EdgeMean(Net):
    def forward(self, x, edge_index, edge_weight):
        return self.conv(x, edge_index, edge_weight / edge_weight.mean())  # here


class Pooled(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).mean(0)  # here


class Clamped(gnn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j / x_j.norm(dim=0).clamp(min=12)  # here


class ScaledByAll(gnn.MessagePassing):
    """The message takes a number over all own nodes that it was not given."""

    def forward(self, x, edge_index):
        self.scale = x.abs().mean()  # here
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * self.scale


class Later(Net):
    calls = 0

    def between(self, h, x, edge_index):
        self.calls += 1
        return h if self.calls < 2 else h - h.mean(0)  # here


class Kept(Net):
    """It uses the mean of the call before."""

    mean = None

    def between(self, h, x, edge_index):
        shift = 0 if self.mean is None else self.mean
        self.mean = h.detach().mean(0)  # here
        return h - shift


class InTraining(Net):
    def between(self, h, x, edge_index):
        return h - h.mean(0) if self.training else h  # here


class Aggregated(Net):
    """An aggregation of the user's that PyG calls, and looks into where it fails."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.SAGEConv(5, 6, aggr=OffCentre())


class OffCentre(gnn.aggr.Aggregation):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x - x.mean(0), index, ptr, dim_size, dim)  # here


class Branching(gnn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * 2 if (x_j > 1).any() else x_j  # here


class Dense(Net):
    def between(self, h, x, edge_index):
        rows, mask = to_dense_batch(h, edge_index.batch)  # here
        return rows[mask]


OFFENDERS = [Centred, Hubs, Branch, Quotient, Ids, EdgeIds, TopRows, OtherMask, Straight, Attention]
OFFENDERS += [EdgeMean, Pooled, Clamped, ScaledByAll, Later, Kept, InTraining, Aggregated, Branching, Dense]


def _with_weights(model, fields, graph):
    return model(fields["x"], graph, fields["edge_weight"])


def line_of(kind):
    lines = Path(__file__).read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith(f"class {kind.__name__}(")))
    return 1 + next(n for n in range(start, len(lines)) if lines[n].endswith("# here"))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", OFFENDERS)
def test_what_mixes_rows_is_refused_at_its_line(kind, ranks):
    call = _with_weights if kind is EdgeMean else _plain
    with pytest.raises(RefusedError, match=re.escape(f"{Path(__file__).name}:{line_of(kind)}: ")):
        called(kind, call, ranks=ranks, times=2)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shape", [(GRAPH.num_nodes,), (6, GRAPH.num_nodes), (GRAPH.num_nodes, 1)])
def test_a_parameter_with_an_entry_per_node_is_refused(shape, ranks):
    class PerNode(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(shape))

        def between(self, h, x, edge_index):
            own = self.scale.view(-1, GRAPH.num_nodes)[:, : h.size(0)]
            return h * own.T

    with pytest.raises(RefusedError, match=r"NodeEmbedding|field"):
        called(PerNode, _plain, ranks=ranks)


def test_distances_of_all_pairs_are_refused_on_a_rank_without_rows_too():
    """There torch's backward kills the process."""

    class Distances(Net):
        def between(self, h, x, edge_index):
            return h / nn.functional.pdist(h).mean()

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.long), comm)
        with pytest.raises(
            RefusedError, match=r"nn\.functional\.pdist\(h\)\.mean\(\): `\w*pdist\w*` puts rows together"
        ):
            sp.pyg.wrap(Distances().double(), comm)(graph.x, graph).sum().backward()

    run(work, 2)


class Looked(Net):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def between(self, h, x, edge_index):
        return h + self.table((x[:, :2] > 0).long()).view(h.size(0), 6, -1).sum(-1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Embedding(2, 6, scale_grad_by_freq=True), "divides its gradient by how often an index"),
        (lambda: nn.EmbeddingBag(2, 6), "`embedding_bag` puts together depends on its offsets"),
        (lambda: nn.Embedding(2, 6, padding_idx=0), None),
    ],
)
def test_embeddings_whose_rows_depend_on_others_are_refused(make, why):
    if why is None:
        called(lambda: Looked(make()), _plain)
        return
    with pytest.raises(RefusedError, match=rf"self\.table\(.*: .*{why}"):
        called(lambda: Looked(make()), _plain)


def test_every_rank_raises():
    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm)
        with pytest.raises(RefusedError, match="puts rows together"):
            sp.pyg.wrap(Centred().double(), comm)(graph.x, graph)

    run(work, 3)


def test_the_check_can_be_left_out():
    assert [out.size(1) for out in called(Centred, _plain, check=False)] == [6, 6]


class Custom(gnn.MessagePassing):
    """GCN as the tutorial writes it."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 6)

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        scale = deg.pow(-0.5)
        scale[scale == float("inf")] = 0
        return self.propagate(edge_index, x=self.lin(x), norm=scale[row] * scale[col])

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Noisy(Net):
    def between(self, h, x, edge_index):
        h = h + torch.normal(0.0, 1.0, h.shape) + torch.randint(0, 3, (h.size(0), 1))
        return nn.functional.gumbel_softmax(nn.functional.rrelu(h, training=self.training))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop = gnn.GATConv(5, 6, dropout=0.5), nn.Dropout(0.5)

    def forward(self, x, edge_index):
        return self.drop(torch.nn.functional.dropout(self.conv(x, edge_index), 0.3, self.training))


class Reduced(Net):
    """A sum over own rows that goes to all ranks before it is used."""

    def between(self, h, x, edge_index):
        comm = edge_index.plan.comm
        return h - sp.all_reduce_sum(h.sum(0), comm) / GRAPH.num_nodes


class Attentive(Net):
    """The attention of every edge, which the model looks at edge by edge."""

    def __init__(self):
        super().__init__()
        self.gat = gnn.GATConv(6, 6)

    def between(self, h, x, edge_index):
        h, (edges, alpha) = self.gat(h, edge_index, return_attention_weights=True)
        return h + torch.zeros_like(h).index_add(0, edges[1], alpha.expand(-1, 6).relu())


class Scattered(Net):
    """A sum over in-edges that the model writes itself, before a layer."""

    def between(self, h, x, edge_index):
        row, col = edge_index
        weight = softmax((h[row] * h[col]).sum(-1), col, num_nodes=h.size(0))
        return scatter(weight.unsqueeze(-1) * h[row], col, 0, h.size(0), "sum")


@pytest.mark.parametrize("kind", [Custom, Noisy, Dropping, Reduced, Attentive, Scattered])
def test_what_does_not_mix_rows_passes(kind):
    called(kind, _plain, ranks=3, times=2)


def test_attention_weights_are_rows_of_edges():
    class Mean(Attentive):
        def between(self, h, x, edge_index):
            h, (_, alpha) = self.gat(h, edge_index, return_attention_weights=True)
            return h * alpha.mean()

    with pytest.raises(RefusedError, match="`mean` puts rows together, over the edges"):
        called(Mean, _plain)


def test_the_random_numbers_of_training_stay_as_they_are():
    def drawn(check):
        torch.manual_seed(3)
        called(Dropping, _plain, ranks=1, check=check, times=2)
        return torch.rand(3)

    assert torch.equal(drawn(True), drawn(False))


class Data:
    pass


class FromObject(Centred):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


class Holding(Centred):
    def forward(self, x):
        return super().forward(x, self.graph.edge_index)


def test_a_graph_that_is_no_argument_is_followed_too():
    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
        data = Data()
        data.x, data.edge_index = graph.x, graph.edge_index
        with pytest.raises(RefusedError, match="puts rows together"):
            sp.pyg.wrap(FromObject().double(), comm)(data)
        model = Holding().double()
        model.graph = graph
        with pytest.raises(RefusedError, match="puts rows together"):
            sp.pyg.wrap(model, comm)(graph.x)
        data.edge_index = graph.layers(graph.x[:, 0] > 0, 1)[0]
        with pytest.raises(RefusedError, match=r"pass what graph\.layers returned as an argument"):
            sp.pyg.wrap(FromObject().double(), comm)(data)

    run(work, 2)


def test_widths_equal_to_the_number_of_nodes_are_no_rows():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lin, self.shift = gnn.GCNConv(5, 21), nn.Linear(21, 21), nn.Parameter(torch.ones(21))

        def forward(self, x, edge_index):
            return self.lin(self.conv(x, edge_index)) * self.shift + torch.zeros(21)

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
        sp.pyg.wrap(Wide().double(), comm)(graph.x, graph)
        return graph.num_own_nodes

    assert 21 in run(work, 2)
