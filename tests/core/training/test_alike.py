"""What must be the same on all ranks, and what must not: parameters, and row numbers in masks."""

import pytest
import torch
from torch import nn

import shardpass as sp
from shardpass.errors import DivergenceError
from shardpass.testing import run

RANKS = 3


def stepped(change, comm):
    """One step of a model that `change` was called with after its parameters were made alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 3))
    sp.sync_parameters(model, comm)
    torch.manual_seed(comm.rank)  # as `wrap` does
    change(model, comm)
    loss = sp.cross_entropy(model(torch.ones(5, 4)), torch.zeros(5, dtype=torch.long), None, comm)
    loss.backward()
    sp.sync_gradients(model, comm)


def reset(model, comm):
    for layer in model:
        layer.reset_parameters()


def reset_alike(model, comm):
    with sp.seed(3, comm):
        reset(model, comm)


def reset_and_sent(model, comm):
    reset(model, comm)
    sp.sync_parameters(model, comm)


def rounded(model, comm):
    """As on a processor that adds in another order."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-6 * comm.rank)


def one_bias(model, comm):
    if comm.rank == 2:
        nn.init.ones_(model[2].bias)


@pytest.mark.parametrize(("change", "where"), [(reset, "0.weight.*rank 0 and rank 1"), (one_bias, "2.bias.*rank 2")])
def test_parameters_that_were_drawn_rank_by_rank_are_refused(change, where):
    with pytest.raises(DivergenceError, match=f"parameter '{where}.*shardpass.seed"):
        run(lambda comm: stepped(change, comm), RANKS)


@pytest.mark.parametrize("change", [reset_alike, reset_and_sent, rounded])
def test_parameters_that_are_alike_are_not(change):
    run(lambda comm: stepped(change, comm), RANKS)


def measures(rows, comm):
    logits, y = torch.randn(40, 2), torch.zeros(40, dtype=torch.long)
    y[::2] = 1
    return {
        "cross_entropy": lambda: sp.cross_entropy(logits, y, rows, comm),
        "mean": lambda: sp.mean(logits, rows, comm),
        "sum": lambda: sp.sum(logits, rows, comm),
        "accuracy": lambda: sp.accuracy(logits, y, rows, comm),
        "mae": lambda: sp.mae(logits, torch.zeros(40, 2), rows, comm),
        "f1": lambda: sp.f1(logits, y, rows, comm),
        "roc_auc": lambda: sp.roc_auc(logits[:, 0], y, rows, comm),
    }


@pytest.mark.parametrize("name", measures(None, None))
def test_ids_of_the_whole_graph_are_no_row_numbers(name):
    """As the `train_idx` of a split, where those of every node are small enough to be rows of each rank."""
    with pytest.raises(ValueError, match=f"{name}: mask holds the same row numbers on every rank"):
        run(lambda comm: measures(torch.arange(10), comm)[name](), RANKS)
    for rows_of in (
        lambda rank: torch.arange(rank, 10 + rank),
        lambda rank: torch.arange(40),
        lambda rank: torch.arange(2),
    ):
        run(lambda comm, rows_of=rows_of: measures(rows_of(comm.rank), comm)[name](), RANKS)
