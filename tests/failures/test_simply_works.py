"""What looks like trouble but must simply work, with the gradients of one process (float64, 1e-10)."""

import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import shardpass as sp

from .training import (
    CLASSES,
    FEATURES,
    NODES,
    RANKS,
    Turn,
    assert_same,
    fault,
    random_graph,
    run_ranks,
    sharded_gradients,
    train,
    whole_gradients,
)

CONVS = {
    "GCN": lambda i, o: GCNConv(i, o),
    "GAT": lambda i, o: GATConv(i, o),
    "max": lambda i, o: SAGEConv(i, o, aggr="max"),
}
kinds = pytest.mark.parametrize("kind", CONVS)
# every layer and every mode: tests/frontends has every pair
pairs = pytest.mark.parametrize("kind, mode", [("GCN", "sar"), ("GAT", "keep"), ("GAT", "sar"), ("max", "halo")])


class TwoHeads(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.stem = CONVS[kind](FEATURES, 8)
        self.left, self.right = CONVS[kind](8, CLASSES), CONVS[kind](8, CLASSES)

    def forward(self, x, edge_index):
        h = self.stem(x, edge_index).relu()
        return self.left(h, edge_index), self.right(h, edge_index)


class Two(nn.Module):
    """Two layers; `how` they are run: plainly, or checkpointed."""

    def __init__(self, kind, how="plain"):
        super().__init__()
        self.convs = nn.ModuleList([CONVS[kind](FEATURES, 8), CONVS[kind](8, CLASSES)])
        self.how = how

    def forward(self, x, graph):
        edge_index = getattr(graph, "edge_index", graph)
        for i, conv in enumerate(self.convs):
            if self.how == "plain":
                x = conv(x, edge_index)
            else:
                x = checkpoint(conv, x, edge_index, use_reentrant=self.how == "reentrant")
            x = x if i else x.relu()
        return x


def seeded(build, *args):
    torch.manual_seed(3)
    return build(*args).double()


def owned_by_rank(store, wanted):
    """A bool per node: whether the rank `wanted` owns it."""
    ids = run_ranks(lambda comm: sp.load(store, comm).node_ids).results[wanted]
    owned = torch.zeros(NODES, dtype=torch.bool)
    owned[ids] = True
    return owned


@pairs
def test_a_loss_that_reaches_one_branch_only(exact_store, kind, mode):
    model = seeded(TwoHeads, kind)

    def objective(model, turn):
        left, right = model(turn.x, turn.graph)
        loss = left.square().sum()
        if turn.comm.rank != 1:
            loss = loss + right.square().sum()
        loss.backward()

    others = ~owned_by_rank(exact_store, 1)

    def whole(model, data):
        left, right = model(data.x, data.edge_index)
        return left.square().sum() + right[others].square().sum()

    assert_same(sharded_gradients(exact_store, model, objective, mode=mode), whole_gradients(model, whole))


@kinds
def test_a_branch_that_only_one_rank_uses(exact_store, kind):
    model = seeded(TwoHeads, kind)

    def objective(model, turn):
        left, right = model(turn.x, turn.graph)
        (left if turn.comm.rank != 1 else right).square().sum().backward()

    mine = owned_by_rank(exact_store, 1)

    def whole(model, data):
        left, right = model(data.x, data.edge_index)
        return left[~mine].square().sum() + right[mine].square().sum()

    assert_same(sharded_gradients(exact_store, model, objective), whole_gradients(model, whole))


@kinds
@pytest.mark.parametrize("zero", ["of no rows", "times all rows"])
def test_a_loss_of_nothing(exact_store, kind, zero):
    model = seeded(Two, kind)

    def objective(model, turn):
        logits = model(turn.x, turn.graph)
        if turn.comm.rank != 1:
            logits.square().sum().backward()
        elif zero == "of no rows":
            (0.0 * logits[:0].sum()).backward()
        else:
            (0.0 * logits.sum()).backward()

    others = ~owned_by_rank(exact_store, 1)
    expected = whole_gradients(model, lambda model, data: model(data.x, data.edge_index)[others].square().sum())
    assert_same(sharded_gradients(exact_store, model, objective), expected)


@pairs
def test_an_empty_mask_on_a_rank(exact_store, kind, mode):
    model, others = seeded(Two, kind), ~owned_by_rank(exact_store, 1)

    def objective(model, turn):
        mask = turn.graph.train_mask & (turn.comm.rank != 1)
        sp.cross_entropy(model(turn.x, turn.graph), turn.graph.y, mask, turn.comm).backward()

    def whole(model, data):
        mask = data.train_mask & others
        return nn.functional.cross_entropy(model(data.x, data.edge_index)[mask], data.y[mask])

    assert_same(sharded_gradients(exact_store, model, objective, mode=mode), whole_gradients(model, whole))


def cross_entropy_of(model, data):
    logits = model(data.x, data.edge_index)
    return nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])


@pairs
def test_a_second_backward_through_a_kept_graph(exact_store, kind, mode):
    def objective(model, turn):
        loss = turn.loss(model(turn.x, turn.graph))
        loss.backward(retain_graph=True)
        loss.backward()

    model = seeded(Two, kind)
    expected = whole_gradients(model, lambda model, data: 2 * cross_entropy_of(model, data))
    assert_same(sharded_gradients(exact_store, model, objective, mode=mode), expected)


@pairs
def test_two_forwards_before_one_backward(exact_store, kind, mode):
    def objective(model, turn):
        first = turn.loss(model(turn.x, turn.graph))
        second = turn.loss(model(2 * turn.x, turn.graph))
        (first + 3 * second).backward()

    def whole(model, data):
        first = cross_entropy_of(model, data)
        data.x = 2 * data.x
        return first + 3 * cross_entropy_of(model, data)

    model = seeded(Two, kind)
    assert_same(sharded_gradients(exact_store, model, objective, mode=mode), whole_gradients(model, whole))


@kinds
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(exact_store, kind, context):
    model = seeded(Two, kind)
    data = random_graph(torch.float64)
    with torch.no_grad():
        expected = model(data.x, data.edge_index)

    def objective(model, turn):
        with context():
            rows = sp.gather(turn.graph, model(turn.x, turn.graph))
        if rows is not None:
            assert float((rows - expected).abs().max()) < 1e-10
        turn.loss(model(turn.x, turn.graph)).backward()
        with context():
            model(turn.x, turn.graph)

    assert_same(sharded_gradients(exact_store, model, objective), whole_gradients(model, cross_entropy_of))


@pairs
def test_non_reentrant_checkpointing(exact_store, kind, mode):
    def objective(model, turn):
        turn.loss(model(turn.x, turn.graph)).backward()

    model = seeded(Two, kind, "non-reentrant")
    expected = whole_gradients(seeded(Two, kind), cross_entropy_of)
    assert_same(sharded_gradients(exact_store, model, objective, mode=mode), expected)


@pytest.mark.parametrize("seconds", [2.5, pytest.param(58, marks=pytest.mark.long)])  # a wait may take 60
def test_a_slow_rank_is_waited_for(store, seconds):
    assert train(store, fault(lambda turn: time.sleep(seconds))).results == train(store).results


@pytest.mark.parametrize("model", ["GCN", "GAT"])
@pytest.mark.parametrize("where", ["one rank", "all ranks"])
def test_nan_features_propagate(store, model, where):
    def step(turn: Turn):
        if turn.comm.rank == 1 or where == "all ranks":
            turn.x = torch.full_like(turn.x, float("nan"))
        turn.step()

    outcome = train(store, step, model=model)
    assert len(outcome.results) == RANKS, outcome.words()
    assert all(loss != loss for losses in outcome.results for loss in losses)
