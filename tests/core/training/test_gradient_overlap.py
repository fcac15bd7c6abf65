"""sync_during_backward: the sums of sync_gradients, whatever order gradients are made in."""

from __future__ import annotations

import threading

import pytest
import torch
from overlap_model import (
    assert_alike_with_sync_gradients,
    assert_the_same_bits,
    on_a_transport,
)
from torch import nn

import shardpass as sp
from shardpass.backends.recording import RecordingCommunicator
from shardpass.core.ranks import Ranks
from shardpass.testing.run import run


@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_those_of_sync_gradients(ranks, bucket_bytes):
    results = run(assert_alike_with_sync_gradients, ranks, args=(bucket_bytes,))
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


def test_earlier_backward_passes_run_before_the_block():
    run(assert_alike_with_sync_gradients, 2, args=(150, 2))


def test_a_transport_without_threads_sums_at_the_end(monkeypatch):
    monkeypatch.setattr("shardpass.backends.threads.ThreadCommunicator.serves_threads", False)
    run(assert_alike_with_sync_gradients, 3, args=(150,))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_bits(ranks):
    run(assert_the_same_bits, ranks)


@pytest.mark.processes
def test_over_processes():
    assert run(on_a_transport, 2, "processes") == [True] * 2


def test_sums_run_in_order_while_backward_runs():
    """The last layer's bucket is summed before backward has gone on to the first layer."""

    def body(comm):
        recorded = Ranks(RecordingCommunicator(comm))
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        summed = threading.Event()
        x = model[:2](torch.ones(2, 3))
        x.register_hook(lambda grad: wait_for_first_sum())

        def wait_for_first_sum():
            assert summed.wait(20), "no bucket was summed during backward"

        inner = comm.background()
        reduce = inner.all_reduce

        def noting(*args):
            result = reduce(*args)
            summed.set()
            return result

        inner.all_reduce = noting
        with sp.sync_during_backward(model, recorded, 1):
            model[2](x).sum().backward()
        return [message.label for message in recorded.inner.messages if message.kind == "all_reduce"]

    expected = [f"sync_during_backward bucket {number} of 6" for number in range(1, 7)]
    assert run(body, 2) == [expected, expected]


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_made_in_another_order_on_every_rank_do_not_cross(ranks):
    def body(comm):
        model = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(4))
        order = [(k + comm.rank) % 4 for k in range(4)]
        with sp.sync_during_backward(model, comm, 1):
            for k in order:
                ((k + 1) * model[k]).sum().backward()
        return [parameter.grad.tolist() for parameter in model]

    assert run(body, ranks) == [[[float((k + 1) * ranks)] * 3 for k in range(4)]] * ranks


def test_one_duplicate_and_no_thread_is_left():
    def body(comm):
        recorded = Ranks(RecordingCommunicator(comm))
        model = nn.Linear(3, 3)
        for _ in range(3):
            model.zero_grad()
            with sp.sync_during_backward(model, recorded):
                model(torch.ones(2, 3)).sum().backward()
        assert not model.weight._post_accumulate_grad_hooks or len(model.weight._post_accumulate_grad_hooks) == 1
        return [message.kind for message in recorded.inner.messages].count("duplicate")

    before = threading.active_count()
    assert run(body, 2) == [0, 0]  # made by the communicator itself
    assert threading.active_count() == before


def test_frozen_parameters_do_not_travel_unless_some_rank_trains_them():
    def body(comm):
        recorded = Ranks(RecordingCommunicator(comm))
        model = nn.ModuleList([nn.Linear(50, 50).requires_grad_(False), nn.Linear(2, 1).requires_grad_(comm.rank == 1)])
        x = torch.ones(1, 2, requires_grad=True)
        with sp.sync_during_backward(model, recorded):
            (model[1](x).sum() * 3).backward()
        sent = sum(message.num_bytes for message in recorded.inner.messages if message.kind == "all_reduce")
        return sent, model[1].weight.grad.tolist(), model[0].weight.grad

    assert run(body, 2) == [(12, [[3.0, 3.0]], None)] * 2


def test_a_frozen_parameter_that_has_a_gradient_is_summed_as_by_sync_gradients():
    def body(comm):
        model = nn.ParameterList([nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))])
        model[0].grad = torch.full((2,), 1.0 + comm.rank)
        with sp.sync_during_backward(model, comm):
            model[1].sum().backward()
        return model[0].grad.tolist()

    assert run(body, 2) == [[3.0, 3.0]] * 2
