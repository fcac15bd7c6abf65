"""Mistakes in the user's program: every rank ends within seconds, saying what happened and on which rank."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCNConv, SAGEConv, SGConv, TopKPooling

from shardpass.errors import CommunicationError, DivergenceError, RefusedError, ShardpassError

from .training import CLASSES, FEATURES, RANKS, Skips, fault, train


class Layers(Skips):
    """A list of layers, each called as `call` says."""

    def __init__(self, *layers, call=lambda conv, x, edge_index: conv(x, edge_index)):
        super().__init__()
        self.convs, self.call = nn.ModuleList(layers), call

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = self.call(conv, x, edge_index)
        return x


class Maxima(nn.Module):
    """What the engine itself has saved is watched, too."""

    def __init__(self):
        super().__init__()
        self.lin, self.conv = nn.Linear(FEATURES, 8), SAGEConv(8, CLASSES, aggr="max", root_weight=False)
        self._harms = False  # by its name no setting of the model, which ranks compare

    def forward(self, x, edge_index):
        x = self.lin(x)
        out = self.conv(x, edge_index)
        if self._harms:
            x.add_(1)
        return out


def features(change):
    return lambda turn: setattr(turn, "x", change(turn.x))


narrow = features(lambda x: x[:, :4])
cut = features(lambda x: torch.rand(len(x) - 1, x.size(1)))
double = features(torch.Tensor.double)


def boo(*_):
    raise ValueError("boo")


def change_in_place(turn):
    if not turn.culprit:
        return turn.step()
    kept = []
    turn.model.convs[1].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    loss = turn.loss(turn.forward())
    kept[0].add_(1)
    loss.backward()


def skip_in_evaluation(turn):
    turn.step()
    turn.model.without = 1 if turn.culprit else -1
    with torch.no_grad():
        turn.forward()


def without_backward(turn, loss=lambda: None):
    if not turn.culprit:
        return turn.step()
    turn.loss(turn.forward())
    loss()


def other_steps(turn):
    turn.step()
    if turn.culprit:
        for parameter in turn.model.parameters():
            parameter.data.mul_(1.5)


def frozen(turn, on_culprit, elsewhere, epoch):
    """A step before which, in an epoch, some parameters of a GCN are frozen: those whose names begin so."""
    if turn.epoch == epoch:
        for name, parameter in turn.model.named_parameters():
            parameter.requires_grad_(not name.startswith(on_culprit if turn.comm.rank == 1 else elsewhere))
    turn.step()


def wrapped_by_ddp(turn):
    turn.model = nn.parallel.DistributedDataParallel(turn.model)


def cause_and_consequence(turn):
    if turn.culprit:
        raise KeyError("the cause")
    try:
        turn.step()
    except CommunicationError as error:
        raise ShardpassError(f"what follows: {error}") from error


class Mistake(NamedTuple):
    """What each rank does in an epoch, what the errors say, and how the model is made."""

    step: Callable
    words: tuple[str, ...]
    options: dict = {}


HOOKS = {
    "between layers, forward": ("GCN", lambda convs: convs[1].register_forward_pre_hook(boo)),
    "between layers, backward": ("GAT", lambda convs: convs[0].register_forward_hook(
        lambda module, args, out: out.register_hook(boo) and None)),
    "in a message, forward": ("GAT", lambda convs: convs[1].register_message_forward_pre_hook(boo)),
    "in a message, backward": ("GCN", lambda convs: convs[1].lin.weight.register_hook(boo)),
}  # fmt: skip
MATRICES = "mat1 and mat2 shapes cannot be multiplied (15x4 and 6x8)"
CHANGED = "has been modified by an inplace operation"
ONE_BEGINS = {  # the error of rank 1, of which the others tell
    "narrow features, GCN": (RuntimeError, Mistake(fault(narrow), (MATRICES,))),
    "narrow features, GAT": (RuntimeError, Mistake(fault(narrow), (MATRICES,), {"model": "GAT"})),
    "a row too few, GCN": (  # in PyG's own arithmetic, before a message is sent
        RuntimeError, Mistake(fault(cut), ("index 14 is out of bounds for dimension 0 with size 14",))),
    "a row too few, GAT": (
        ValueError, Mistake(fault(cut), ("on rank 1: `", "14 rows", "expected 15 (the own"), {"model": "GAT"})),
    "float64, GAT": (RuntimeError, Mistake(fault(double), ("double != float",), {"model": "GAT"})),
    **{f"an exception {where}": (
        ValueError, Mistake(fault(lambda turn, hook=hook: hook(turn.model.convs)), ("boo",), {"model": model}))
       for where, (model, hook) in HOOKS.items()},
    **{f"a tensor changed between forward and backward, {model}": (
        RuntimeError, Mistake(change_in_place, (CHANGED,), {"model": model})) for model in ("GCN", "GAT")},
    **{f"a message input changed in place, {mode}": (
        RuntimeError, Mistake(fault(lambda turn: setattr(turn.model, "_harms", True)), (CHANGED,),
                              {"model": Maxima(), "mode": mode})) for mode in ("sar", "keep", "halo")},
    "another error follows from the first": (KeyError, Mistake(cause_and_consequence, ("the cause",))),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_BEGINS)
def test_what_goes_wrong_on_a_rank_is_told_by_all(store, name):
    kind, mistake = ONE_BEGINS[name]
    train(store, mistake.step, **mistake.options).assert_began_on(1, kind, *mistake.words)


DIFFERENT = ("depends on the rank",)
OTHER_PATHS = ("ranks 0, 2 are in", "rank 1 is in", "depends on the rank")
FROZEN = [("convs.1.bias", "-", "convs.1.bias"), ("-", "convs.0", "convs.0"), ("convs", "-", "convs.0")]
THREE = (GCNConv(FEATURES, 8), GCNConv(8, 8), GCNConv(8, CLASSES))
AGAIN = Layers(*THREE, call=lambda conv, x, edge_index: (
    conv(x, edge_index) if conv.in_channels == FEATURES else checkpoint(conv, x, edge_index, use_reentrant=True)
))  # fmt: skip
ALL_SAY = {
    "other dtypes, for which one rank makes other weights": Mistake(
        fault(double), ("the ranks are in different calls", "halo fetch", "depends on the rank or on its own data")),
    **{f"other features where the layer itself does not notice, {mode}": Mistake(
        fault(narrow),
        ("SGConv", "Rank 0: source 'x' float32 with [6] per row", "Rank 1: source 'x' float32 with [4] per row"),
        {"model": Layers(SGConv(FEATURES, CLASSES, K=2)), "mode": mode}) for mode in ("sar", "halo")},
    **{f"a rank that skips layer {layer}, {mode}": Mistake(
        fault(lambda turn, layer=layer: setattr(turn.model, "without", layer)), OTHER_PATHS,
        {"model": Skips(shared=(layer == 2) == (mode == "sar")), "mode": mode})
       for layer, mode in product((1, 2, 3), ("sar", "halo"))},
    "a rank that skips a layer in evaluation": Mistake(skip_in_evaluation, OTHER_PATHS, {"model": Skips()}),
    "a rank without backward, GCN": Mistake(without_backward, DIFFERENT),
    "a rank without backward, GAT": Mistake(without_backward, DIFFERENT, {"model": "GAT"}),
    "a loss that is no function of the model": Mistake(
        partial(without_backward, loss=lambda: torch.zeros((), requires_grad=True).backward()), DIFFERENT),
    "a rank that takes other steps": Mistake(
        other_steps, ("is not the same on rank 0 and rank 1", "Or a rank takes other steps than the others")),
    **{f"parameters frozen on a rank, {name} and {other}, epoch {epoch}": Mistake(
        partial(frozen, on_culprit=name, elsewhere=other, epoch=epoch),
        (f"the models differ: {found}", "without a gradient"))
       for (name, other, found), epoch in product(FROZEN, (0, 1))},
    "parameters of one shape, of which each is frozen on another rank": Mistake(  # their gradients would be added up
        partial(frozen, on_culprit="convs.1.bias", elsewhere="convs.0.bias", epoch=0),
        ("the models differ: convs.0.bias", "without a gradient"), {"model": Layers(*THREE)}),
    "reentrant checkpointing": Mistake(lambda turn: turn.step(), ("use_reentrant=False",), {"model": AGAIN}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL_SAY)
def test_a_mistake_is_told_by_all(store, name):
    mistake = ALL_SAY[name]
    outcome = train(store, mistake.step, **mistake.options)
    outcome.assert_all_say(*mistake.words)
    if mistake.words == OTHER_PATHS:
        assert any(isinstance(error, DivergenceError) for error in outcome.errors), outcome.words()


@pytest.mark.parametrize("model", ["GCN", "GAT"])
def test_a_rank_with_fewer_epochs(store, model):
    def step(turn):
        if turn.comm.rank != 1 or turn.epoch < 2:
            turn.step()

    outcome = train(store, step, model=model)
    assert outcome.errors[1] is None and isinstance(outcome.raised, CommunicationError)
    for error in (outcome.errors[0], outcome.errors[2]):
        assert "rank 1 ended first, after fewer calls than the others make" in str(error), outcome.words()
    outcome.assert_nobody_timed_out()


# ---- wrapping


@pytest.fixture
def group(tmp_path):
    """Torch's own process group, of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddp_around_a_wrapped_model(store):
    words = "DistributedDataParallel around the wrapped model is refused", "Remove it"
    train(store, fault(wrapped_by_ddp)).assert_began_on(1, RefusedError, *words)


@pytest.mark.usefixtures("group")
def test_ddp_within_a_model_to_be_wrapped(store):
    outcome = train(store, twist_model=nn.parallel.DistributedDataParallel)
    outcome.assert_all_say("DistributedDataParallel", "whose backward sums them")


BUILDS = {
    "another model on one rank": (
        lambda rank, model: nn.Sequential(nn.Linear(2, 3)) if rank == 1 else model,
        ("the models differ", "build the same model on every rank")),
    "one that cannot be exact on one rank": (
        lambda rank, model: nn.Sequential(TopKPooling(FEATURES)) if rank == 1 else model,
        ("TopKPooling (at '0') cannot be exact on a sharded graph", "shardpass.gather")),
    "one that cannot be exact on all ranks": (
        lambda rank, model: nn.Sequential(TopKPooling(FEATURES)),
        ("TopKPooling (at '0') cannot be exact on a sharded graph", "shardpass.gather")),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
def test_models_that_cannot_be_wrapped(store, name):
    build, words = BUILDS[name]
    turns = iter(range(RANKS))
    train(store, twist_model=lambda model: build(next(turns), model)).assert_all_say(*words)
