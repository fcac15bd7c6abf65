"""sync_during_backward: every misuse and every exception is told on all ranks, and the next block works."""

from __future__ import annotations

import threading

import pytest
import torch
from overlap_model import (
    Model,
    assert_alike_with_sync_gradients,
    given_up_by_one,
    left_by_all,
    loss_of,
)
from torch import nn

import shardpass as sp
from shardpass.errors import DivergenceError, PeerFailure, RefusedError, ShardpassError
from shardpass.testing.run import run


def two_backwards(model, comm):
    with sp.sync_during_backward(model, comm, 1):
        for _ in range(2):
            loss_of(model, comm).backward()


def clipped_within(model, comm):
    with sp.sync_during_backward(model, comm, 1):
        loss_of(model, comm).backward()
        if comm.rank == comm.size - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def dropped_within(model, comm):
    with sp.sync_during_backward(model, comm, 1):
        loss_of(model, comm).backward()
        model.zero_grad()


def stepped_within(model, comm):
    with sp.sync_during_backward(model, comm, 1):
        loss_of(model, comm).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def summed_within(model, comm):
    with sp.sync_during_backward(model, comm, 1):
        loss_of(model, comm).backward()
        sp.sync_gradients(model, comm)


def summed_after(model, comm):
    with sp.sync_during_backward(model, comm, 1):
        loss_of(model, comm).backward()
    sp.sync_gradients(model, comm)


def two_blocks(model, comm):
    for _ in range(2):
        with sp.sync_during_backward(model, comm, 1):
            loss_of(model, comm).backward()


def sparse(model, comm):
    model.table = nn.Embedding(4, 2, sparse=True)
    with sp.sync_during_backward(model, comm, 1):
        (loss_of(model, comm) + model.table(torch.tensor([1])).sum()).backward()


def nested(model, comm):
    with sp.sync_during_backward(model, comm), sp.sync_during_backward(Model(comm), comm):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (
            two_backwards,
            "on rank 0 was changed within sync_during_backward after backward had made it: run one backward",
        ),
        (clipped_within, "was changed within sync_during_backward .* clip or scale gradients after it"),
        (dropped_within, "on rank 0 was changed within sync_during_backward"),
        (stepped_within, "on rank 0 belongs to parameter values that have changed since backward"),
        (summed_within, "on rank 0 was already summed over ranks: .* sync_gradients or sync_during_backward once"),
        (summed_after, "on rank 0 was already summed over ranks: .* sync_gradients or sync_during_backward once"),
        (two_blocks, "on rank 0 was already summed over ranks: call optimizer"),
        (sparse, "gradient of 'table.weight' on rank 0 is sparse"),
        (nested, "within a sync_during_backward block of the same communicator is refused"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_misuse_is_told_on_every_rank_and_the_next_block_works(misuse, text, ranks):
    def body(comm):
        with pytest.raises((ShardpassError, RefusedError), match=text):
            misuse(Model(comm), comm)
        assert_alike_with_sync_gradients(comm, 150)
        return True

    before = threading.active_count()
    assert all(run(body, ranks))
    assert threading.active_count() == before


def test_ddp_is_refused(monkeypatch):
    class Fake(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    def body(comm):
        with (
            pytest.raises(RefusedError, match="around the model is refused: it averages"),
            sp.sync_during_backward(Fake(nn.Linear(1, 1)), comm),
        ):
            pass

    run(body, 1)


@pytest.mark.parametrize("what", [left_by_all, given_up_by_one])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_communicator_goes_on_after_an_exception(what, ranks):
    before = threading.active_count()
    run(what, ranks)
    assert threading.active_count() == before


def test_an_exception_on_one_rank_ends_the_others():
    texts = {}

    def body(comm):
        model = Model(comm)
        try:
            with sp.sync_during_backward(model, comm, 1):
                loss = loss_of(model, comm)
                if comm.rank == 1:
                    raise KeyError("boo")
                loss.backward()
        except PeerFailure as error:
            texts[comm.rank] = str(error)
            raise

    before = threading.active_count()
    with pytest.raises(KeyError, match="boo"):
        run(body, 3)
    assert texts.keys() == {0, 2} and all("rank 1 failed first: KeyError: 'boo'" in text for text in texts.values())
    assert threading.active_count() == before


def swallowed_by_one_rank(comm, model):
    try:
        with sp.sync_during_backward(model, comm, 1):
            model(torch.ones(2, 3)).sum().backward()
            if comm.rank == 1:
                raise KeyError("boo")
    except KeyError:
        comm.barrier("next")


def entered_by_one_rank(comm, model):
    loss = model(torch.ones(2, 3)).sum()
    if comm.rank == 1:
        loss.backward()
        sp.sync_gradients(model, comm)
    else:
        with sp.sync_during_backward(model, comm):
            loss.backward()


@pytest.mark.parametrize("path", [swallowed_by_one_rank, entered_by_one_rank])
def test_ranks_on_different_paths_are_told(path):
    def body(comm):
        with pytest.raises(DivergenceError, match="sync_during_backward"):
            path(comm, nn.Linear(3, 3))
        return True

    assert all(run(body, 2))
