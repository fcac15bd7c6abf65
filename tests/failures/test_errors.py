"""Mistakes in the user's program: every rank ends within seconds, saying what happened and on which rank."""

from itertools import product

import pytest
import torch
from torch import nn
from torch_geometric.nn import SAGEConv, SGConv

from shardpass.errors import CommunicationError, DivergenceError

from .training import CLASSES, FEATURES, RANKS, Skips, fault, train

models = pytest.mark.parametrize("model", ["GCN", "GAT"])


# ---- features and dtypes


def features(change):
    return lambda turn: setattr(turn, "x", change(turn.x))


def double_rows(turn):
    turn.x = turn.x.double()
    turn.step()


def integer_rows(turn):
    turn.x = turn.x.long()
    turn.step()


narrow = features(lambda x: x[:, :4])
cut = features(lambda x: torch.rand(len(x) - 1, x.size(1)))


@pytest.mark.parametrize(
    ("change", "model", "kind", "words"),
    [
        (narrow, "GCN", RuntimeError, ["mat1 and mat2 shapes cannot be multiplied (15x4 and 6x8)"]),
        (narrow, "GAT", RuntimeError, ["mat1 and mat2 shapes cannot be multiplied (15x4 and 6x8)"]),
        # in PyG's own arithmetic, before a message is sent
        (cut, "GCN", RuntimeError, ["index 14 is out of bounds for dimension 0 with size 14"]),
        (cut, "GAT", ValueError, ["on rank 1: `", "14 rows", "expected 15 (the own"]),
        (features(torch.Tensor.double), "GAT", RuntimeError, ["double != float"]),
    ],
)
def test_a_rank_with_other_features(store, change, model, kind, words):
    train(store, fault(change), model=model).assert_began_on(1, kind, *words)


def test_a_rank_with_other_dtypes_that_the_ranks_compare_before_the_weights_are_applied(store):
    outcome = train(store, fault(features(torch.Tensor.double)))
    outcome.assert_all_say("Rank 0: float32 rows", "Rank 1: float64 rows", "same widths and dtypes")


@pytest.mark.parametrize("mode", ["sar", "halo"])
def test_other_features_where_the_layer_itself_does_not_notice(store, mode):
    class First(nn.Module):
        """Messages are sent before any weight is applied."""

        def __init__(self):
            super().__init__()
            self.conv = SGConv(FEATURES, CLASSES, K=2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    outcome = train(store, fault(narrow), model=First(), mode=mode)
    outcome.assert_all_say(
        "SGConv", "Rank 0: source 'x' float32 with [6] per row", "Rank 1: source 'x' float32 with [4] per row"
    )


@pytest.mark.parametrize(
    ("step", "model", "words"),
    [
        (double_rows, "GCN", "double != float"),
        (double_rows, "GAT", "double != float"),
        (integer_rows, "GCN", "Long"),
        (integer_rows, "GAT", "long int"),
    ],
)
def test_features_of_another_dtype_than_the_model(store, step, model, words):
    outcome = train(store, step, model=model)
    assert all(isinstance(error, RuntimeError) for error in outcome.errors), outcome.words()
    outcome.assert_all_say(words)


def test_models_that_differ(store):
    def build(model):
        return nn.Sequential(nn.Linear(2, 3)) if torch.rand(()) < 2 and next(turn) == 1 else model

    turn = iter(range(RANKS))
    outcome = train(store, twist_model=build)
    outcome.assert_all_say("the models differ", "build the same model on every rank")


# ---- exceptions


def boo(*_):
    raise ValueError("boo")


FAIL = {
    "between layers, forward": lambda convs: convs[1].register_forward_pre_hook(boo),
    "between layers, backward": lambda convs: convs[0].register_forward_hook(
        lambda module, args, out: out.register_hook(boo) and None
    ),
    "in a message, forward": lambda convs: convs[1].register_message_forward_pre_hook(boo),
    "in a message, backward": lambda convs: convs[1].lin.weight.register_hook(boo),
}


@pytest.mark.parametrize(("where", "model"), zip(FAIL, ("GCN", "GAT", "GAT", "GCN")))
def test_an_exception(store, where, model):
    step = fault(lambda turn: FAIL[where](turn.model.convs))
    train(store, step, model=model).assert_began_on(1, ValueError, "boo")


@models
def test_a_tensor_changed_in_place_between_forward_and_backward(store, model):
    def change(turn):
        if not turn.culprit:
            return turn.step()
        kept = []
        turn.model.convs[1].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        loss = turn.loss(turn.forward())
        kept[0].add_(1)
        loss.backward()

    outcome = train(store, change, model=model)
    outcome.assert_began_on(1, RuntimeError, "has been modified by an inplace operation")


@pytest.mark.parametrize("mode", ["sar", "keep", "halo"])
def test_a_message_input_changed_in_place(store, mode):
    """What the engine itself has saved is watched, too."""

    class Maxima(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.conv = nn.Linear(FEATURES, 8), SAGEConv(8, CLASSES, aggr="max", root_weight=False)
            self._harms = False

        def forward(self, x, edge_index):
            x = self.lin(x)
            out = self.conv(x, edge_index)
            if self._harms:
                x.add_(1)
            return out

    outcome = train(store, fault(lambda turn: setattr(turn.model, "_harms", True)), model=Maxima(), mode=mode)
    outcome.assert_began_on(1, RuntimeError, "has been modified by an inplace operation")


# ---- ranks that take different paths


@pytest.mark.parametrize(("layer", "mode"), product((1, 2, 3), ("sar", "halo")))
def test_a_rank_that_skips_a_layer(store, layer, mode):
    shared = (layer == 2) == (mode == "sar")  # one and the same layer for all
    step = fault(lambda turn: setattr(turn.model, "without", layer))
    outcome = train(store, step, model=Skips(shared), mode=mode)
    assert any(isinstance(error, DivergenceError) for error in outcome.errors), outcome.words()
    outcome.assert_all_say("ranks 0, 2 are in", "rank 1 is in", "depends on the rank")


def test_a_rank_that_skips_a_layer_in_evaluation(store):
    def step(turn):
        turn.step()
        turn.model.without = 1 if turn.culprit else -1
        with torch.no_grad():
            turn.forward()

    train(store, step, model=Skips()).assert_all_say("ranks 0, 2 are in", "rank 1 is in", "depends on the rank")


@models
def test_a_rank_with_fewer_epochs(store, model):
    def step(turn):
        if turn.comm.rank != 1 or turn.epoch < 2:
            turn.step()

    outcome = train(store, step, model=model)
    assert outcome.errors[1] is None and isinstance(outcome.raised, CommunicationError)
    for error in (outcome.errors[0], outcome.errors[2]):
        assert "rank 1 ended first, after fewer calls than the others make" in str(error), outcome.words()
    outcome.assert_nobody_timed_out()


LOSSES = {"none": lambda: None, "no function of the model": lambda: torch.zeros((), requires_grad=True).backward()}


@pytest.mark.parametrize(("model", "loss"), [("GCN", "none"), ("GAT", "none"), ("GCN", "no function of the model")])
def test_a_rank_without_backward(store, model, loss):
    def step(turn):
        if not turn.culprit:
            return turn.step()
        turn.loss(turn.forward())
        LOSSES[loss]()

    train(store, step, model=model).assert_all_say("ranks", "depends on the rank")
