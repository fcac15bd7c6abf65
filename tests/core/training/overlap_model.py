"""A model whose gradients are summed during backward, and what must hold of them: also on processes and over MPI."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardpass as sp
from shardpass.core.graphs.embedding import OwnRows
from shardpass.core.ranks.autograd_order import all_reduce_sum
from shardpass.core.training.gradients import note_forward
from shardpass.core.training.norm import DistributedBatchNorm
from shardpass.errors import DivergenceError


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


def assert_the_same_bits(comm):
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


def on_a_transport(comm):
    """For a run on processes or over MPI."""
    for bucket_bytes in (1, 150, 1 << 20):
        assert_alike_with_sync_gradients(comm, bucket_bytes)
    assert_the_same_bits(comm)
    left_by_all(comm)
    given_up_by_one(comm)
    return True
