"""The self-check of wrap: exact models pass it, others are refused by the name of the part that differs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.core.wrapping import outermost
from shardpass.errors import RefusedError
from shardpass.testing.graphs import assignments, shard_in_memory
from shardpass.testing.run import run

from .conv_cases import CONVS, ONE_SHOT, SORTED, _plain
from .pyg_cases import GRAPH, MODELS

accepted = pytest.mark.filterwarnings("error:.*self-check")
"""The model is neither refused nor, which a warning would say, left unchecked."""


def called(make, call, graph=GRAPH, mode="sar", ranks=2, check=True, times=1):
    """What the check says of a model: nothing, a warning, or a refusal."""
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)["random"]

    def work(comm):
        sharded = shard_in_memory(graph, owners, comm, sp.Options(mode=mode))
        model = sp.pyg.wrap(make().double(), comm, check=check)
        for _ in range(times):
            out = call(model, {**dict(sharded.node), **dict(sharded.edge)}, sharded)
        return out

    return run(work, ranks)


@accepted
@pytest.mark.parametrize(
    "name", ["GCNConv", "GATConv edges", "PNAConv", "DirGNNConv", "ChebConv", "GATConv attention weights"]
)
def test_exact_layers_pass(name):
    called(*CONVS[name])


@accepted
@pytest.mark.long
@pytest.mark.parametrize("name", [*CONVS, *MODELS])
def test_every_exact_layer_and_model_passes(name):
    called(*{**CONVS, **MODELS}[name])


@accepted
@pytest.mark.parametrize("name", ["SAGEConv median", "SAGEConv lstm"])
def test_whole_neighbourhoods_pass(name):
    called(*ONE_SHOT[name], graph=SORTED, mode="halo")


@accepted
@pytest.mark.parametrize("name", ["GCN", "EdgeCNN with BatchNorm"])
def test_models_pass(name):
    called(*MODELS[name])


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class WithPart(nn.Module):
    def __init__(self, part=None):
        super().__init__()
        self.conv, self.part = gnn.GCNConv(5, 6), part or nn.Identity()

    def forward(self, x, edge_index):
        return self.part(self.conv(x, edge_index)).tanh()


class Largest(nn.Module):
    """Its output is right; a threshold in backward is each rank's own."""

    def forward(self, x):
        return x + (x / x.detach().abs().max() - (x / x.detach().abs().max()).detach())


class Ids(WithPart):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index) * torch.arange(x.size(0)).view(-1, 1)


class EdgeIds(WithPart):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index, torch.arange(edge_index.size(1)).double())


class Softmax(WithPart):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).softmax(0)


class Pooled(WithPart):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index).mean(0)


class TopRows(WithPart):
    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return h[h.sum(1).topk(3).indices]


class SomeRows(WithPart):
    """Statistics over the labelled rows, which it returns."""

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        mask = x[:, 0] > 0
        return h[mask] - h[mask].mean(0)


class SortedRows(SomeRows):
    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return h[x[:, 0] > 0].sort(0).values


class Masked(WithPart):
    """An infinite column beside a wrong one."""

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return torch.cat([h - h.detach().mean(0), h.new_full((len(h), 1), float("-inf"))], 1)


class Counted(WithPart):
    """Integers that are off by one."""

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return h, 100000 + (x.sum() * 50).long()


OFFENDERS = {
    "statistics of some rows": (SomeRows, "another output 0"),
    "sorted rows": (SortedRows, "another output 0"),
    "infinite values": (Masked, "another output 0"),
    "integers": (Counted, "another output 1"),
    "mean": (lambda: WithPart(Centre()), "first part whose output differs is 'part'"),
    "gradient": (lambda: WithPart(Largest()), "another gradient"),
    "node ids": (Ids, "another output 0"),
    "edge ids": (EdgeIds, "first part whose output differs is 'conv'"),
    "softmax": (Softmax, "All its parts agree"),
    "pooled": (Pooled, "another output 0"),
    "top rows": (TopRows, "another output 0"),
    "batch norm of its own": (lambda: WithPart(Standardise()), "'part'"),
    "unknown module": (lambda: WithPart(nn.Sequential(nn.Linear(6, 6), Attention())), "'part.1"),
}


class Standardise(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=0.5)

    def forward(self, x):
        return self.inner(x, x, x)[0]


@pytest.mark.parametrize("name", OFFENDERS)
def test_offenders_are_refused_by_name_on_every_rank(name):
    make, words = OFFENDERS[name]
    said = []
    for mode in ("sar", "halo"):
        with pytest.raises(RefusedError, match="self-check: on a small random graph") as error:
            called(make, _plain, mode=mode)
        said.append(str(error.value))
    assert all(words in text for text in said), said


def test_the_check_can_be_left_out(monkeypatch):
    monkeypatch.setattr(outermost, "check_model", lambda *args: pytest.fail("it was checked"))
    assert [out.size(1) for out in called(lambda: WithPart(Centre()), _plain, check=False)] == [6, 6]


class Dropping(nn.Module):
    """Dropout everywhere, in a message too; the check switches it off."""

    def __init__(self):
        super().__init__()
        self.conv, self.drop = gnn.GATConv(5, 6, dropout=0.5), nn.Dropout(0.5)

    def forward(self, x, edge_index):
        return self.drop(torch.nn.functional.dropout(self.conv(x, edge_index), 0.3, self.training))


@accepted
def test_dropout_is_no_difference():
    called(Dropping, _plain)


def test_the_random_numbers_of_training_stay_as_they_are():
    def drawn(check):
        torch.manual_seed(3)
        called(lambda: WithPart(nn.Identity()), _plain, ranks=1, check=check, times=2)
        return torch.rand(3)

    assert torch.equal(drawn(True), drawn(False))


class NeedsMany(WithPart):
    def forward(self, x, edge_index):
        assert x.size(0) in (20, 21, 41), "only the real graph"
        return self.conv(x, edge_index)


def test_what_cannot_be_checked_is_said():
    with pytest.warns(UserWarning, match="runs without the self-check: it does not run on a small random graph"):
        called(NeedsMany, lambda m, i, g: m(i["x"], g), ranks=1)


class Embedded(nn.Module):
    """Categories instead of features: the check must use values that occur."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(4, 5), gnn.GCNConv(5, 6)

    def forward(self, kinds, edge_index):
        return self.conv(self.table(kinds), edge_index)


@accepted
def test_categories_stay_such():
    called(Embedded, lambda m, i, g: m((i["x"][:, 0] > 0).long() + 2, g))


class TrainingOnly(WithPart):
    """Right in eval, wrong in training."""

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return h - h.mean(0) if self.training else h


def test_both_training_modes_are_checked():
    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
        model = sp.pyg.wrap(TrainingOnly().double(), comm).eval()
        model(graph.x, graph)
        with pytest.raises(RefusedError, match="self-check"):
            model.train()(graph.x, graph)

    run(work, 2)


class Data:
    pass


class FromObject(WithPart):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


def test_a_graph_that_the_check_does_not_see_is_said():
    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
        data = Data()
        data.x, data.edge_index = graph.x, graph.edge_index
        sp.pyg.wrap(FromObject().double(), comm)(data)
        data.edge_index = graph.layers(graph.x[:, 0] > 0, 1)[0]
        with pytest.raises(RefusedError, match=r"pass what graph\.layers returned as an argument"):
            sp.pyg.wrap(FromObject().double(), comm)(data)

    with pytest.warns(UserWarning, match="runs without the self-check: the graph is not among the arguments"):
        run(work, 2)


def test_outputs_inside_objects_are_said():
    class Boxed(WithPart):
        def forward(self, x, edge_index):
            box = Data()
            box.out = super().forward(x, edge_index)
            return box

    with pytest.warns(UserWarning, match="returns no floating point tensor"):
        called(Boxed, lambda m, i, g: m(i["x"], g).out)


class Noisy(WithPart):
    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        h = h + torch.normal(0.0, 1.0, h.shape) + torch.randint(0, 3, (len(h), 1))
        return nn.functional.gumbel_softmax(nn.functional.rrelu(h, training=self.training))


class Float32(WithPart):
    def forward(self, x, edge_index):
        state = torch.zeros(len(x), 5)
        return self.conv(x.float() + state, edge_index)


@accepted
def test_noise_and_fixed_dtypes_are_no_difference():
    called(Noisy, _plain)

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
        sp.pyg.wrap(Float32(), comm)(graph.x.float(), graph)

    run(work, 2)
