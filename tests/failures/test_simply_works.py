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
# every layer and every mode: tests/frontends has every pair
PAIRS = (("GCN", "sar"), ("GAT", "keep"), ("max", "halo"), ("GAT", "sar"))


class TwoHeads(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.stem = CONVS[kind](FEATURES, 8)
        self.left, self.right = CONVS[kind](8, CLASSES), CONVS[kind](8, CLASSES)

    def forward(self, x, edge_index):
        h = self.stem(x, edge_index).relu()
        return self.left(h, edge_index), self.right(h, edge_index)


class Two(nn.Module):
    """Two layers, which may be checkpointed on ranks."""

    def __init__(self, kind):
        super().__init__()
        self.convs = nn.ModuleList([CONVS[kind](FEATURES, 8), CONVS[kind](8, CLASSES)])
        self.saves = False

    def forward(self, x, graph):
        edge_index = getattr(graph, "edge_index", graph)
        for i, conv in enumerate(self.convs):
            x = checkpoint(conv, x, edge_index, use_reentrant=False) if self.saves else conv(x, edge_index)
            x = x if i else x.relu()
        return x


def seeded(build, kind):
    torch.manual_seed(3)
    return build(kind).double()


@pytest.fixture(scope="module")
def mine(exact_store):
    """A bool per node: whether rank 1 owns it."""
    owned = torch.zeros(NODES, dtype=torch.bool)
    owned[run_ranks(lambda comm: sp.load(exact_store, comm).node_ids).results[1]] = True
    return owned


def squares(rows):
    return rows.square().sum()


def one_branch(turn):
    left, right = turn.forward()
    return squares(left) + (squares(right) if turn.comm.rank != 1 else 0)


def whole_one_branch(model, data, mine):
    left, right = model(data.x, data.edge_index)
    return squares(left) + squares(right[~mine])


def a_branch_each(turn):
    left, right = turn.forward()
    return squares(left if turn.comm.rank != 1 else right)


def whole_a_branch_each(model, data, mine):
    left, right = model(data.x, data.edge_index)
    return squares(left[~mine]) + squares(right[mine])


def without_rank_1(turn, nothing):
    logits = turn.forward()
    return squares(logits) if turn.comm.rank != 1 else 0.0 * nothing(logits).sum()


def whole_without_rank_1(model, data, mine):
    return squares(model(data.x, data.edge_index)[~mine])


def an_empty_mask(turn):
    mask = turn.graph.train_mask & (turn.comm.rank != 1)
    return sp.cross_entropy(turn.forward(), turn.graph.y, mask, turn.comm)


def whole_empty_mask(model, data, mine):
    data.train_mask = data.train_mask & ~mine
    return cross_entropy_of(model, data)


def a_second_backward(turn):
    loss = turn.loss(turn.forward())
    loss.backward(retain_graph=True)
    return loss


def two_forwards(turn):
    first = turn.loss(turn.forward())
    return first + 3 * turn.loss(turn.model(2 * turn.x, turn.graph))


def whole_two_forwards(model, data, mine):
    first = cross_entropy_of(model, data)
    data.x = 2 * data.x
    return first + 3 * cross_entropy_of(model, data)


def checkpointed(turn):
    turn.model.saves = True
    return turn.loss(turn.forward())


def cross_entropy_of(model, data, mine=None):
    logits = model(data.x, data.edge_index)
    return nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])


OBJECTIVES = {  # a model, its loss on a rank, and on the whole graph
    "a loss that reaches one branch only": (TwoHeads, one_branch, whole_one_branch),
    "a branch that only one rank uses": (TwoHeads, a_branch_each, whole_a_branch_each),
    "a loss of no rows": (Two, lambda turn: without_rank_1(turn, lambda rows: rows[:0]), whole_without_rank_1),
    "a loss times zero": (Two, lambda turn: without_rank_1(turn, lambda rows: rows), whole_without_rank_1),
    "an empty mask on a rank": (Two, an_empty_mask, whole_empty_mask),
    "a second backward": (Two, a_second_backward, lambda model, data, mine: 2 * cross_entropy_of(model, data)),
    "two forwards before one backward": (Two, two_forwards, whole_two_forwards),
    "non-reentrant checkpointing": (Two, checkpointed, cross_entropy_of),
}


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_one_process(exact_store, mine, name, turn):
    build, loss, whole = OBJECTIVES[name]
    kind, mode = PAIRS[([*OBJECTIVES].index(name) + turn) % len(PAIRS)]
    model = seeded(build, kind)
    found = sharded_gradients(exact_store, model, lambda _, turn: loss(turn).backward(), mode=mode)
    assert_same(found, whole_gradients(model, lambda model, data: whole(model, data, mine)))


@pytest.mark.parametrize(
    ("kind", "context"), [("GCN", torch.no_grad), ("GAT", torch.inference_mode), ("max", torch.no_grad)]
)
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


@pytest.mark.parametrize("seconds", [1, pytest.param(58, marks=pytest.mark.long)])  # a wait may take 60
def test_a_slow_rank_is_waited_for(store, seconds):
    assert train(store, fault(lambda turn: time.sleep(seconds))).results == train(store).results


@pytest.mark.parametrize(("model", "where"), [("GCN", "one rank"), ("GAT", "all ranks")])
def test_nan_features_propagate(store, model, where):
    def step(turn: Turn):
        if turn.comm.rank == 1 or where == "all ranks":
            turn.x = torch.full_like(turn.x, float("nan"))
        turn.step()

    outcome = train(store, step, model=model)
    assert len(outcome.results) == RANKS, outcome.words()
    assert all(loss != loss for losses in outcome.results for loss in losses)
