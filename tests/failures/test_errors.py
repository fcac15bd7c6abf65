"""Mistakes in the user's program: every rank ends within seconds, saying what happened and on which rank."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import SAGEConv, SGConv

from shardpass.errors import CommunicationError, DivergenceError

from .training import CLASSES, FEATURES, RANKS, Skips, Turn, train

models = pytest.mark.parametrize("model", ["GCN", "GAT"])


def twist(change):
    """A step in which ``change(turn)`` comes first, on the culprit in the second epoch only."""

    def step(turn: Turn):
        if turn.culprit:
            change(turn)
        turn.step()

    return step


# ---- features and dtypes


@models
def test_a_rank_with_other_features(store, model):
    def narrow(turn):
        turn.x = turn.x[:, :4]

    outcome = train(store, twist(narrow), model=model)
    outcome.assert_began_on(1, RuntimeError, "mat1 and mat2 shapes cannot be multiplied (15x4 and 6x8)")


@pytest.mark.parametrize("mode", ["sar", "halo"])
def test_other_features_where_the_layer_itself_does_not_notice(store, mode):
    class First(nn.Module):
        """Messages are sent before any weight is applied."""

        def __init__(self):
            super().__init__()
            self.conv = SGConv(FEATURES, CLASSES, K=2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    def narrow(turn):
        turn.x = turn.x[:, :4]

    outcome = train(store, twist(narrow), model=First(), mode=mode)
    outcome.assert_all_say(
        "SGConv", "Rank 0: source 'x' float32 with [6] per row", "Rank 1: source 'x' float32 with [4] per row"
    )


@models
def test_a_rank_with_other_rows(store, model):
    def cut(turn):
        turn.x = torch.rand(len(turn.x) - 1, turn.x.size(1))

    outcome = train(store, twist(cut), model=model)
    if model == "GAT":
        outcome.assert_began_on(1, ValueError, "on rank 1: `", "14 rows", "expected 15 (the own")
    else:  # in PyG's own arithmetic, before a message is sent
        outcome.assert_began_on(1, RuntimeError, "index 14 is out of bounds for dimension 0 with size 14")


@models
def test_features_of_another_dtype_than_the_model(store, model):
    def step(turn):
        turn.x = turn.x.double()
        turn.step()

    outcome = train(store, step, model=model)
    outcome.assert_all_say("double != float")


@models
def test_a_rank_with_other_dtypes(store, model):
    def double(turn):
        turn.x = turn.x.double()

    outcome = train(store, twist(double), model=model)
    if model == "GAT":
        outcome.assert_began_on(1, RuntimeError, "double != float")
    else:  # ranks compare notes before the weights are applied
        outcome.assert_all_say("Rank 0: float32 rows", "Rank 1: float64 rows", "same widths and dtypes")


@models
def test_integer_features(store, model):
    def step(turn):
        turn.x = turn.x.long()
        turn.step()

    outcome = train(store, step, model=model)
    assert all(isinstance(error, RuntimeError) for error in outcome.errors), outcome.words()
    outcome.assert_all_say("long int" if model == "GAT" else "Long")


def test_models_that_differ(store):
    def build(model):
        return nn.Sequential(nn.Linear(2, 3)) if torch.rand(()) < 2 and next(turn) == 1 else model

    turn = iter(range(RANKS))
    outcome = train(store, twist_model=build)
    outcome.assert_all_say("the models differ", "build the same model on every rank")


# ---- exceptions


@models
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_between_layers(store, model, where):
    def fail(*_):
        raise ValueError("boo")

    def step(turn):
        if turn.culprit:
            if where == "forward":
                turn.model.convs[1].register_forward_pre_hook(fail)
            else:
                turn.model.convs[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        turn.step()

    train(store, step, model=model).assert_began_on(1, ValueError, "boo")


@models
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_inside_a_message(store, model, where):
    def fail(*_):
        raise ValueError("boo")

    def step(turn):
        if turn.culprit:
            conv = turn.model.convs[1]
            if where == "forward":
                conv.register_message_forward_pre_hook(fail)
            else:
                conv.lin.weight.register_hook(fail)
        turn.step()

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

    def harm(turn):
        turn.model._harms = True

    outcome = train(store, twist(harm), model=Maxima(), mode=mode)
    outcome.assert_began_on(1, RuntimeError, "has been modified by an inplace operation")


# ---- ranks that take different paths


@pytest.mark.parametrize("mode", ["sar", "halo"])
@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_skips_a_layer(store, mode, layer, shared):
    def skip(turn):
        turn.model.without = layer

    outcome = train(store, twist(skip), model=Skips(shared), mode=mode)
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


@models
def test_a_rank_without_backward(store, model):
    def step(turn):
        if not turn.culprit:
            return turn.step()
        turn.loss(turn.forward())

    train(store, step, model=model).assert_all_say("ranks", "depends on the rank")


def test_a_rank_whose_loss_is_no_function_of_the_model(store):
    def step(turn):
        if not turn.culprit:
            return turn.step()
        turn.loss(turn.forward())
        torch.zeros((), requires_grad=True).backward()

    train(store, step).assert_all_say("ranks", "depends on the rank")
