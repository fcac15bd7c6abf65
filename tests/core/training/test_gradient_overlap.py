"""sync_during_backward: the sums of sync_gradients, whatever order gradients are made in, and every misuse in words."""

from __future__ import annotations

import copy
import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardpass as sp
from shardpass.backends.recording import RecordingCommunicator
from shardpass.core.graphs.embedding import OwnRows
from shardpass.core.ranks import Ranks
from shardpass.core.ranks.autograd_order import all_reduce_sum
from shardpass.core.training.gradients import note_forward
from shardpass.core.training.norm import DistributedBatchNorm
from shardpass.errors import DivergenceError, PeerFailure, RefusedError, ShardpassError
from shardpass.testing.run import run


class Model(nn.Module):
    """Communicates in backward; parameters are used twice, tied, frozen, bfloat16, not used at all, or on one rank."""

    def __init__(self, comm, widths=(5, 7, 4)):
        super().__init__()
        self.comm = comm
        self.never = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norm = DistributedBatchNorm(widths[1], comm)
        self.twice = nn.Linear(widths[-1], widths[-1])
        self.tied = self.twice
        self.narrow = nn.Linear(widths[-1], 2).bfloat16()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.sometimes = nn.Parameter(torch.ones(2))
        self.rows = OwnRows(torch.ones(comm.rank + 1))

    def forward(self, x, branch):
        note_forward(self)
        x = self.norm(self.layers[0](x)).relu()
        x = x - all_reduce_sum(x.mean(0), self.comm) / 10
        x = self.tied(self.twice(self.layers[1](x)))
        loss = self.narrow(x.bfloat16()).float().square().sum() + x.sum() + (self.rows**2).sum()
        return loss + (self.sometimes**2).sum() if branch else loss


def loss_of(model, comm, step=0):
    generator = torch.Generator().manual_seed(10 * step + comm.rank)
    return model(torch.randn(6, 5, generator=generator), comm.rank == comm.size - 1)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def assert_alike_with_sync_gradients(comm, bucket_bytes, accumulate=0):
    """Gradients of three steps, by both ways; where nothing is rounded differently they are the same bits."""
    one = Model(comm)
    other = copy.deepcopy(one)
    for step in range(3):
        for model in (one, other):
            model.zero_grad(set_to_none=step % 2 == 0)
            for earlier in range(accumulate):
                loss_of(model, comm, 100 + earlier).backward()
        loss_of(one, comm, step).backward()
        sp.sync_gradients(one, comm, bucket_bytes)
        with sp.sync_during_backward(other, comm, bucket_bytes):
            loss_of(other, comm, step).backward()
        expected, found = gradients(one), gradients(other)
        assert_same_gradients(found, expected)
        assert found["never"] is None and found["frozen.weight"] is None and found["rows"].numel() == comm.rank + 1
        for model in (one, other):
            torch.optim.SGD(model.parameters(), lr=0.01).step()
    return {name: value for name, value in gradients(other).items() if value is not None and name != "rows"}


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


def the_same_bits(comm):
    """Ring sums depend on where a number stands in its bucket."""
    results = []
    original = nn.Sequential(*(nn.Linear(33, 33) for _ in range(4)))
    for during in (False, True):
        model = copy.deepcopy(original)
        loss = model(torch.randn(9, 33, generator=torch.Generator().manual_seed(comm.rank))).square().sum()
        if during:
            with sp.sync_during_backward(model, comm, 5000):
                loss.backward()
        else:
            loss.backward()
            sp.sync_gradients(model, comm, 5000)
        results.append(gradients(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_bits(ranks):
    run(the_same_bits, ranks)


def on_a_transport(comm):
    """For a run on processes or over MPI."""
    for bucket_bytes in (1, 150, 1 << 20):
        assert_alike_with_sync_gradients(comm, bucket_bytes)
    the_same_bits(comm)
    left_by_all(comm)
    given_up_by_one(comm)
    return True


@pytest.mark.processes
def test_over_processes():
    assert run(on_a_transport, 3, "processes") == [True] * 3


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


def left_by_all(comm):
    """An exception on every rank, after a number of sums that differs between ranks; then it goes on."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(5))
    with pytest.raises(KeyError, match="boo"), sp.sync_during_backward(model, comm, 1):
        for parameter in list(model)[::-1][: 1 + comm.rank]:
            parameter.sum().backward()
        raise KeyError("boo")
    assert [parameter.grad is None for parameter in model] == [k < 4 - comm.rank for k in range(5)]
    assert model[4].grad.tolist() == [1.0, 1.0]  # as backward left it
    assert_alike_with_sync_gradients(comm, 150)


def given_up_by_one(comm):
    """One rank gets an error when all have agreed already: the others' sums end with its words."""
    twin = comm.background()
    if comm.rank == comm.size - 1:
        twin.all_reduce = lambda *args: 1 / 0
    model = nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).sum()
    kinds = (DivergenceError, ZeroDivisionError)
    with pytest.raises(kinds) as caught, sp.sync_during_backward(model, comm, 1):
        loss.backward()
    assert (caught.type is ZeroDivisionError) == (comm.rank == comm.size - 1)
    words = f"rank {comm.size - 1} has given up .* left sync_during_backward by ZeroDivisionError: division by zero"
    assert caught.type is ZeroDivisionError or caught.match(words)
    assert comm.background() is not twin
    assert_alike_with_sync_gradients(comm, 150)


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
