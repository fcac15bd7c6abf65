"""Ranks that differ are told so in every kind of call; and what may differ is not refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.errors import CommunicationError, DivergenceError
from shardpass.testing import run, shard_in_memory

from .how_much import one_each
from .inside_model import GRAPH
from .on_ranks import on_ranks

OWNERS = {
    1: torch.zeros(GRAPH.num_nodes, dtype=torch.long),
    3: torch.arange(GRAPH.num_nodes) % 2 * 2,  # rank 1 has no rows
    4: torch.arange(GRAPH.num_nodes) % 4,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = gnn.GATConv(6, 4, heads=2)
        self.norm, self.act = nn.BatchNorm1d(8), nn.LeakyReLU(0.1)
        self.head = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 8))
        self.register_buffer("shift", torch.zeros(8))
        self.register_buffer("order", torch.arange(8))
        self.dropout = 0.0

    def forward(self, x, edges):
        h = F.dropout(self.act(self.norm(self.first(x, edges))), self.dropout, self.training)
        return self.head(h + self.shift)[:, self.order]


def built(comm, kind=Net):
    with sp.seed(0, comm):
        model = kind().double()
    return model


def graph_of(comm):
    return shard_in_memory(GRAPH, OWNERS[comm.size], comm)


def train(model, graph, comm):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sp.cross_entropy(model(graph.x, graph), graph.y, graph.m, comm).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model, graph, comm):
    with torch.no_grad():
        return model(graph.x, graph)


def measure(model, graph, comm):
    return sp.accuracy(evaluate(model.eval(), graph, comm), graph.y, None, comm)


def gather(model, graph, comm):
    return sp.gather(graph, evaluate(model.eval(), graph, comm))


def inference_mode(model, graph, comm):
    with torch.inference_mode():
        return model.eval()(graph.x, graph)


CALLS = {call.__name__: call for call in (train, evaluate, measure, gather, inference_mode)}


def reset(model):
    model.head[1].reset_parameters()


def loaded(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def written(model):
    with torch.no_grad():
        model.first.bias.add_(0.3)


def half(model):
    model.load_state_dict({name: value.half() for name, value in model.state_dict().items()})


def spoilt(model):
    model.first.bias.data[0] = float("nan")


def evaluates(model):
    model.norm.train(not model.norm.training)


def frozen(model):
    model.first.bias.requires_grad_(False)


OPTIONS = {
    "first.add_self_loops = True on rank 0, first.add_self_loops = False": lambda m: setattr(
        m.first, "add_self_loops", False
    ),
    "first.negative_slope": lambda m: setattr(m.first, "negative_slope", 0.3),
    "first.concat": lambda m: setattr(m.first, "concat", False),
    "head.0.p = 0.0 on rank 0, head.0.p = 0.5": lambda m: setattr(m.head[0], "p", 0.5),
    "norm.eps": lambda m: setattr(m.norm, "eps", 1e-3),
    "norm.training": evaluates,
    ".dropout": lambda m: setattr(m, "dropout", 0.5),
    "act: LeakyReLU on rank 0, act: ReLU": lambda m: setattr(m, "act", nn.ReLU()),
    r"first.bias: float64 \[8\] on rank 0, first.bias: float64 \[8\] without a gradient": frozen,
}
VALUES = {
    "parameter 'first.att_src' is not the same": loaded,
    "parameter 'head.1.weight' is not the same": reset,
    "parameter 'first.bias' is not the same": written,
    "parameter 'first.bias' is not the same on": spoilt,
    "is not the same on rank 0": half,
    "buffer 'shift' is not the same": lambda m: m.shift.add_(1),
    "buffer 'order' is not the same": lambda m: m.order[:1].add_(1),
    "buffer 'norm.running_mean' is not the same": lambda m: m.norm.running_mean.add_(1),
}


def differs_after_wrap(change, call, ranks):
    """Ranks differ by `change` on the last rank, after a step that is right."""

    def work(comm):
        graph, model = graph_of(comm), sp.pyg.wrap(built(comm), comm)
        train(model, graph, comm)
        if comm.rank == comm.size - 1:
            change(model)
        CALLS[call](model, graph, comm)

    run(work, ranks)


@pytest.mark.parametrize("words", {**OPTIONS, **VALUES})
def test_what_differs_is_found_in_the_next_call(words):
    with pytest.raises(DivergenceError, match=rf"{words}.* rank 3"):
        differs_after_wrap({**OPTIONS, **VALUES}[words], "evaluate", 4)


@pytest.mark.parametrize(
    ("call", "change"), one_each(CALLS, [loaded, OPTIONS[".dropout"], VALUES["buffer 'shift' is not the same"]])
)
def test_every_kind_of_call_finds_it(call, change):
    with pytest.raises(DivergenceError, match=r"not the same on rank 0 and rank 2|the models differ: .dropout"):
        differs_after_wrap(change, call, 3)


@pytest.mark.long
@pytest.mark.processes
def test_processes_find_it():
    with pytest.raises(DivergenceError, match=r"parameter 'first.att_src' is not the same on rank 0 and rank 1"):
        sp.spawn(_loaded_on_one, 2, "processes")


def _loaded_on_one(comm):
    graph = shard_in_memory(GRAPH, OWNERS[4] % 2, comm)
    model = sp.pyg.wrap(built(comm), comm)
    if comm.rank == 1:
        loaded(model)
    gather(model, graph, comm)


@pytest.mark.parametrize("words", OPTIONS)
@on_ranks(3)
def test_options_are_compared_by_wrap(comm, words):
    with pytest.raises(ValueError, match=f"the models differ: {words}.* rank 2; build the same model on every rank"):
        model = built(comm)
        if comm.rank == 2:
            OPTIONS[words](model)
        sp.pyg.wrap(model, comm)


def test_inference_and_checkpoints_find_it(tmp_path):
    def work(comm, call):
        graph, model = graph_of(comm), sp.pyg.wrap(built(comm), comm)
        if comm.rank == 0:
            loaded(model)
        call(model, graph, comm)

    def infer(model, graph, comm):
        sp.infer(model, graph, tmp_path / "logits.npy")

    def save(model, graph, comm):
        sp.save_checkpoint(tmp_path / "a", comm, model)

    for call in (infer, save):
        with pytest.raises(DivergenceError, match=r"parameter 'first.att_src' is not the same on rank 0 and rank 1"):
            run(lambda comm, call=call: work(comm, call), 3)
    assert not [*tmp_path.iterdir()]


def test_a_model_that_trains_on_batches_is_compared_with_its_gradients():
    def work(comm, change):
        model = built(comm)
        sp.sync_parameters(model, comm)
        if comm.rank == 1:
            change(model)
        sp.cross_entropy(model.head(torch.ones(3, 8).double()), torch.zeros(3).long(), None, comm).backward()
        sp.sync_gradients(model, comm)

    for words in ("first.concat", "parameter 'head.1.weight' is not the same"):
        with pytest.raises(DivergenceError, match=words):
            run(lambda comm, words=words: work(comm, {**OPTIONS, **VALUES}[words]), 3)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_part_that_is_called_by_itself(is_trained):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = Net(), nn.Linear(8, 8)

        def forward(self, x, edges):
            return self.head(self.encoder(x, edges))

    def work(comm):
        graph, model = graph_of(comm), sp.pyg.wrap(built(comm, Parts), comm)
        with nullcontext() if is_trained else torch.no_grad():
            z = model.encoder(graph.x, graph)
            if comm.rank == 0 and not is_trained:
                model.head(z)  # communicates with nobody
            if comm.rank == 2:
                nn.init.ones_(model.head.weight)
            if is_trained:
                model.head(z)
            model(graph.x, graph)

    name = "'weight'" if is_trained else "'head.weight'"
    with pytest.raises(DivergenceError, match=f"parameter {name} is not the same on rank 0 and rank 2"):
        run(work, 3)


def measures(rows, y, mask, comm):
    return {
        "cross_entropy": lambda: sp.cross_entropy(rows, y, mask, comm),
        "mean": lambda: sp.mean(rows, mask, comm),
        "sum": lambda: sp.sum(rows, mask, comm),
        "accuracy": lambda: sp.accuracy(rows, y, mask, comm),
        "mae": lambda: sp.mae(rows, rows, mask, comm),
        "f1": lambda: sp.f1(rows, y, mask, comm),
        "roc_auc": lambda: sp.roc_auc(rows, (rows > 0).long(), mask, comm),
        "average_precision": lambda: sp.average_precision(rows, (rows > 0).long(), mask, comm),
    }


@pytest.mark.parametrize("name", measures(None, None, None, None))
@pytest.mark.parametrize("ranks", [1, 4])
def test_masks_and_widths_that_differ(name, ranks):
    def work(comm, is_masked=False, is_wide=False):
        is_last = comm.rank == comm.size - 1
        rows = torch.linspace(-1, 1, 40).double().view(8, 5)[:, : 4 if is_wide and is_last else 5]
        mask = torch.ones(8, dtype=torch.bool) if is_masked and is_last else None
        return measures(rows, torch.arange(8) % 4, mask, comm)[name]()

    if ranks == 1:
        assert run(lambda comm: work(comm, True, True), 1) == run(lambda comm: work(comm, False, True), 1)
        return
    last = ranks - 1
    for kwargs, words in (
        ({"is_masked": True}, rf"\[num_own, 5\] without a mask.* on rank 0, float64 \[num_own, 5\].* on rank {last}"),
        ({"is_wide": True}, rf"\[num_own, 5\] without a mask.* on rank 0, float64 \[num_own, 4\] .* on rank {last}"),
    ):
        with pytest.raises(DivergenceError, match=f"{name}: ranks pass different kinds of rows: float64 {words}"):
            run(lambda comm, kwargs=kwargs: work(comm, **kwargs), ranks)


@on_ranks(3)
def test_gathered_rows_whose_width_differs(comm):
    with pytest.raises(CommunicationError, match="gather rows"):
        graph = graph_of(comm)
        sp.gather(graph, graph.x[:, : 3 + comm.rank])


class Many(Net):
    """What ranks may differ in, or change alike."""

    def __init__(self, graph):
        super().__init__()
        self.table = sp.NodeEmbedding(graph, 6)
        self.rank, self.num_own, self._name = graph.comm.rank, graph.num_own_nodes, f"rank {graph.comm.rank}"
        self.lazy = nn.LazyLinear(8)
        self.lazy(torch.ones(1, 8))
        self.rate = 1.0
        self.register_buffer("latest", None)

    def forward(self, x, edges):
        h = self.lazy(super().forward(x + self.table(), edges)) * self.rate
        self.latest = h.detach()
        return h


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_may_differ_or_changes_alike_is_not_refused(ranks):
    torch.manual_seed(0)
    state = Net().double().state_dict()

    def work(comm):
        graph = graph_of(comm)
        with sp.seed(0, comm):
            model = Many(graph).double()
        model = sp.pyg.wrap(model, comm)
        model.head[0].p = 0.5
        losses = []
        for step in range(6):
            model.train()
            train(model, graph, comm)
            model.first.bias.requires_grad_(step % 2 == 0)
            model.rate *= 0.9
            losses.append(measure(model, graph, comm))
            if step == 3:
                model.load_state_dict(state, strict=False)
        gather(model, graph, comm)
        inference_mode(copy.deepcopy(model), graph, comm)
        assert model.latest.shape == (graph.num_own_nodes, 8)
        return losses

    found = run(work, ranks)
    assert all(losses == found[0] for losses in found)


@on_ranks(3)
def test_exact_copies_of_a_model_that_trains_on_batches(comm):
    graph, model = graph_of(comm), built(comm)
    whole = sp.pyg.exact(model, comm)
    for step in range(2):
        model.norm(torch.randn(3 + comm.rank, 8).double())  # another batch on each rank, and more of them on rank 0
        if comm.rank == 0 and step:
            model.norm(torch.randn(3, 8).double())
        gather(whole, graph, comm)
