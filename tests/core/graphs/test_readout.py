"""Reductions, moments and rows of all ranks against the same on the rows in one place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from shardpass.core.graphs import all_rows, reduce_rows
from shardpass.core.ranks import chained
from shardpass.core.training import row_moments, shifted, total_rows
from shardpass.errors import DivergenceError
from shardpass.testing import run

ON_THE_WHOLE = {
    "sum": lambda rows, base: rows.sum(0),
    "max": lambda rows, base: scattered(rows, "amax"),
    "min": lambda rows, base: scattered(rows, "amin"),
    "prod": lambda rows, base: rows.prod(0),
}


def scattered(rows, reduce):
    """As PyG computes it: torch decides about ties."""
    index = torch.zeros(rows.shape, dtype=torch.long)
    return rows.new_zeros(1, rows.size(1)).scatter_reduce(0, index, rows, reduce, include_self=False)[0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(list(ON_THE_WHOLE)), st.integers(0, 999))
def test_any_split_gives_value_and_gradient_of_the_whole(split, op, seed):
    if sum(split) == 0:
        split[0] = 1
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-2, 3, (sum(split), 3), generator=generator).double()  # ties and zeros
    upstream = torch.randn(len(split), 3, generator=generator).double()
    whole = rows.clone().requires_grad_()
    value = ON_THE_WHOLE[op](whole, 0.0)
    value.backward(upstream.sum(0))

    def work(comm):
        own = rows.split(split)[comm.rank].clone().requires_grad_()
        out = reduce_rows(own, op, comm, base=0.0)
        out.backward(upstream[comm.rank])
        return out.detach(), own.grad

    results = run(work, len(split))
    assert all(torch.equal(out, value) for out, _ in results)
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), whole.grad, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_only_some_ranks_want_gradients(comm):
    own = torch.ones(2, 3, requires_grad=comm.rank == 1)
    out = reduce_rows(own, "sum", comm)
    assert out.requires_grad, "on every rank, so that all take part in backward"
    out.sum().backward()
    assert own.grad is None if comm.rank == 0 else torch.equal(own.grad, torch.full((2, 3), 2.0))


@pytest.mark.ranks(2)
def test_integers_are_added(comm):
    assert reduce_rows(torch.full((3,), 2**40), "sum", comm).item() == 6 * 2**40


@pytest.mark.ranks(2)
def test_rows_of_different_kinds_are_told(comm):
    with pytest.raises(DivergenceError):
        reduce_rows(torch.ones(2, 3 + comm.rank), "sum", comm)


@pytest.mark.parametrize("split", [[5], [2, 3], [0, 4, 1]], ids=str)
def test_moments_and_rows_are_differentiable(split):
    torch.manual_seed(0)
    rows, weights = torch.randn(5, 3).double() + 100, torch.randn(5, 3).double()
    whole = rows.clone().requires_grad_()
    mean, variance = whole.mean(0), whole.var(0, correction=0)
    out = (whole - mean) * variance.rsqrt() + (whole @ whole.t()).sum(1, keepdim=True)
    (out * weights).sum().backward()

    def work(comm):
        own = rows.split(split)[comm.rank].clone().requires_grad_()
        moments, mean, variance = row_moments(own, comm)
        assert moments.count == sum(total_rows(own, comm)) == 5
        out = shifted(own, mean, variance.rsqrt()) + (own @ all_rows(own, comm).t()).sum(1, keepdim=True)
        (out * weights.split(split)[comm.rank]).sum().backward()
        return out.detach(), own.grad

    results = run(work, len(split))
    torch.testing.assert_close(torch.cat([r[0] for r in results]), out.detach(), rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), whole.grad, rtol=1e-12, atol=1e-10)


def test_recomputation():
    def function(own, comm):
        _, mean, variance = row_moments(own, comm)
        return shifted(own, mean, variance.rsqrt()) * reduce_rows(own, "max", comm) + all_rows(own, comm).sum(0)

    def work(comm):
        torch.manual_seed(comm.rank)
        own = torch.randn(3, 2).double().requires_grad_()
        (plain,) = torch.autograd.grad(chained(comm, function, own, comm).square().sum(), own)
        kept = chained(comm, checkpoint, function, own, comm, use_reentrant=False)
        (again,) = torch.autograd.grad(kept.square().sum(), own)
        assert torch.equal(plain, again)

    run(work, 2)


@pytest.mark.ranks(2)
def test_no_communication_in_backward_without_gradients(comm):
    with torch.no_grad():
        assert not reduce_rows(torch.ones(2, 1, requires_grad=True), "sum", comm).requires_grad
    assert not reduce_rows(torch.ones(2, 1), "max", comm).requires_grad
