"""Gradients of gradients, models wrapped wrongly: every rank ends, saying what happened and on which rank."""

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCNConv, TopKPooling

from shardpass.errors import CommunicationError, RefusedError, ShardpassError

from .training import CLASSES, FEATURES, RANKS, Skips, train

models = pytest.mark.parametrize("model", ["GCN", "GAT"])


# ---- gradients


def test_one_rank_takes_other_steps(store):
    def step(turn):
        turn.step()
        if turn.culprit:
            for parameter in turn.model.parameters():
                parameter.data.mul_(1.5)

    outcome = train(store, step)
    outcome.assert_all_say("is not the same on rank 0 and rank 1", "Or a rank takes other steps than the others")


def frozen(turn, on_culprit, elsewhere, epoch):
    """A step before which, in an epoch, some parameters of a GCN are frozen: those whose names begin so."""
    if turn.epoch == epoch:
        for name, parameter in turn.model.named_parameters():
            parameter.requires_grad_(not name.startswith(on_culprit if turn.comm.rank == 1 else elsewhere))
    turn.step()


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "on_culprit, elsewhere, name",
    [("convs.1.bias", "-", "convs.1.bias"), ("-", "convs.0", "convs.0"), ("convs", "-", "convs.0")],
)
def test_parameters_frozen_on_one_rank(store, on_culprit, elsewhere, name, epoch):
    outcome = train(store, lambda turn: frozen(turn, on_culprit, elsewhere, epoch), epochs=4)
    outcome.assert_all_say(f"the models differ: {name}", "without a gradient")


def test_parameters_of_one_shape_frozen_each_on_another_rank(store):
    """Their gradients would be added up."""
    model = Skips()
    model.convs = nn.ModuleList([GCNConv(FEATURES, 8), GCNConv(8, 8), GCNConv(8, CLASSES)])
    outcome = train(store, lambda turn: frozen(turn, "convs.1.bias", "convs.0.bias", 0), epochs=1, model=model)
    outcome.assert_all_say("the models differ: convs.0.bias", "without a gradient")


@models
@pytest.mark.parametrize("where", ["one rank", "all ranks"])
def test_double_backward(store, model, where):
    def step(turn):
        if not (turn.culprit if where == "one rank" else turn.epoch == 1):
            return turn.step()
        turn.loss(turn.forward()).backward(create_graph=True)

    outcome = train(store, step, model=model)
    outcome.assert_all_say("double backward through a sharded call is not supported", "create_graph=True")
    if where == "one rank":
        outcome.assert_began_on(1, RefusedError)


def test_reentrant_checkpointing(store):
    class Checkpointed(Skips):
        def forward(self, x, edge_index):
            x = self.convs[0](x, edge_index)
            for conv in list(self.convs)[1:]:
                x = checkpoint(conv, x, edge_index, use_reentrant=True)
            return x

    train(store, model=Checkpointed()).assert_all_say("use_reentrant=False")


# ---- wrapping


@pytest.mark.parametrize("where", ["one rank", "all ranks"])
def test_a_module_that_cannot_be_exact(store, where):
    class Pooled(nn.Sequential):
        pass

    def build(model):
        return Pooled(TopKPooling(FEATURES)) if where == "all ranks" or next(turn) == 1 else model

    turn = iter(range(RANKS))
    outcome = train(store, twist_model=build)
    outcome.assert_all_say("TopKPooling (at '0') cannot be exact on a sharded graph", "shardpass.gather")


def test_ddp_around_a_wrapped_model(store, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:

        def step(turn):
            if turn.culprit:
                turn.model = nn.parallel.DistributedDataParallel(turn.model)
            turn.step()

        outcome = train(store, step)
    finally:
        dist.destroy_process_group()
    outcome.assert_began_on(1, RefusedError, "DistributedDataParallel around the wrapped model is refused", "Remove it")


def test_ddp_within_a_model_to_be_wrapped(store, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        outcome = train(store, twist_model=nn.parallel.DistributedDataParallel)
    finally:
        dist.destroy_process_group()
    outcome.assert_all_say("DistributedDataParallel", "whose backward sums them")


def test_the_first_cause_is_shown_even_if_the_others_fail_as_well(store):
    def step(turn):
        if turn.culprit:
            raise KeyError("the cause")
        try:
            turn.step()
        except CommunicationError as error:
            raise ShardpassError(f"what follows: {error}") from error

    train(store, step).assert_began_on(1, KeyError, "the cause")
