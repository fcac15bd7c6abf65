"""Halo fetch and push: adjoint, differentiable, agreed by all ranks."""

import re

import pytest
import torch
from four_ranks import SOURCES, numbering, plan_of

from shardpass.core.exchange import build_halo_plan, halo_fetch, scatter_to_owners
from shardpass.core.ranks import Options
from shardpass.core.sharding import Ownership
from shardpass.errors import DivergenceError
from shardpass.testing import run


def numbers(comm, rows, tail=(3,), seed=0):
    generator = torch.Generator().manual_seed(10 * seed + comm.rank)
    return torch.randn(rows, *tail, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"block_rows": 1, "prefetch": 0}, {"mode": "halo"}], ids=str)
@pytest.mark.ranks(4)
def test_each_is_the_adjoint_of_the_other(comm, options):
    """<fetch(x), y> = <x, push(y)>, and the gradient of one is the other."""
    plan = plan_of(comm, **options)
    x = numbers(comm, plan.num_own_src).requires_grad_()
    y = numbers(comm, plan.num_src, seed=1).requires_grad_()
    fetched, pushed = halo_fetch(x, plan, "fetch"), scatter_to_owners(y, plan, "push")
    left, right = (fetched * y).sum(), (x * pushed).sum()
    products = comm.all_reduce(torch.stack([left, right]).detach())
    (dx,) = torch.autograd.grad(left, x, retain_graph=True)
    (dy,) = torch.autograd.grad(right, y)
    assert torch.equal(dx, pushed) and torch.equal(dy, fetched)
    torch.testing.assert_close(products[0], products[1], rtol=1e-13, atol=1e-13)


def test_against_brute_force():
    def work(comm):
        plan = plan_of(comm)
        own, rows = numbers(comm, plan.num_own_src, seed=3), numbers(comm, plan.num_src)
        return own, halo_fetch(own, plan, "f"), rows, scatter_to_owners(rows, plan, "p")

    results = run(work, 4)
    whole = torch.cat([r[0] for r in results])
    summed = torch.zeros(SOURCES.num_total, 3, dtype=torch.float64)
    for rank, (_, fetched, rows, _) in enumerate(results):
        assert torch.equal(fetched, whole[numbering(rank)])
        summed.index_add_(0, torch.tensor(numbering(rank), dtype=torch.int64), rows)
    torch.testing.assert_close(torch.cat([r[3] for r in results]), summed, rtol=0, atol=1e-14)


@pytest.mark.parametrize("tail", [(), (0,), (2, 2)], ids=str)
@pytest.mark.ranks(4)
def test_shapes(comm, tail):
    plan = plan_of(comm)
    x = numbers(comm, plan.num_own_src, tail).requires_grad_()
    out = halo_fetch(x, plan, "f")
    assert out.shape == (plan.num_src, *tail)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert scatter_to_owners(out.detach(), plan, "p").shape == x.shape


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.ranks(4)
def test_dtypes_without_gradients(comm, dtype):
    plan = plan_of(comm)
    ids = torch.arange(plan.num_own_src) + SOURCES.offsets[comm.rank]
    right = (torch.tensor(numbering(comm.rank)) % 5).to(dtype)
    assert torch.equal(halo_fetch((ids % 5).to(dtype), plan, "f"), right)


@pytest.mark.ranks(4)
def test_rows_that_are_not_contiguous(comm):
    plan = plan_of(comm)
    x = numbers(comm, plan.num_own_src * 2, (6,))[::2, 1:4].requires_grad_()
    out = halo_fetch(x, plan, "f")
    assert torch.equal(out, halo_fetch(x.detach().contiguous(), plan, "g"))
    (out.t() * numbers(comm, 3, (plan.num_src,), seed=2)).sum().backward()
    return x.grad


@pytest.mark.ranks(4)
def test_the_result_is_a_copy_and_the_input_unchanged(comm):
    plan = plan_of(comm)
    x, y = numbers(comm, plan.num_own_src), numbers(comm, plan.num_src)
    before, rows = x.clone(), y.clone()
    halo_fetch(x, plan, "f").zero_()
    scatter_to_owners(y, plan, "p").zero_()
    assert torch.equal(x, before) and torch.equal(y, rows)


@pytest.mark.parametrize("function", [halo_fetch, scatter_to_owners])
def test_only_some_ranks_require_grad(function):
    """Ranks whose rows are constants still carry the others' gradients."""

    def work(comm):
        plan = plan_of(comm)
        rows = plan.num_own_src if function is halo_fetch else plan.num_src
        x = numbers(comm, rows).requires_grad_(comm.rank != 3)
        out = function(x, plan, "some")
        assert out.requires_grad
        (out * numbers(comm, out.size(0), seed=4)).sum().backward()
        return x.grad, numbers(comm, out.size(0), seed=4)

    results = run(work, 4)
    assert results[3][0] is None
    for rank in (0, 1, 2):
        whole = torch.zeros(SOURCES.num_total, 3, dtype=torch.float64)
        if function is halo_fetch:
            for other, (_, weights) in enumerate(results):
                whole.index_add_(0, torch.tensor(numbering(other), dtype=torch.int64), weights)
            expected = whole[SOURCES.offsets[rank] : SOURCES.offsets[rank + 1]]
        else:
            expected = torch.cat([weights for _, weights in results])[numbering(rank)]
        torch.testing.assert_close(results[rank][0], expected, rtol=0, atol=1e-13)


def test_a_loss_that_ignores_the_result_on_one_rank():
    """Zeros travel where a rank's loss multiplies by zero; nobody hangs."""

    def work(comm):
        plan = plan_of(comm)
        x = numbers(comm, plan.num_own_src).requires_grad_()
        out = halo_fetch(x, plan, "f")
        (out.sum() * (comm.rank == 0)).backward()
        return x.grad

    results = run(work, 4)
    counts = torch.zeros(SOURCES.num_total, dtype=torch.float64)
    counts[numbering(0)] = 1
    assert torch.equal(torch.cat(results), counts.view(-1, 1).expand(-1, 3))


@pytest.mark.ranks(4)
def test_no_grad(comm):
    plan = plan_of(comm)
    with torch.no_grad():
        out = halo_fetch(numbers(comm, plan.num_own_src).requires_grad_(), plan, "f")
    assert not out.requires_grad
    assert not halo_fetch(numbers(comm, plan.num_own_src), plan, "f").requires_grad
    with torch.inference_mode():
        again = halo_fetch(numbers(comm, plan.num_own_src), plan, "f")
    assert torch.equal(again, out)


@pytest.mark.ranks(1)
def test_one_rank_needs_no_call(comm):
    plan = build_halo_plan(comm, Ownership.from_counts([5]), torch.arange(0), 2, Options())[0]
    x = numbers(comm, 5)
    calls = comm.calls
    assert halo_fetch(x, plan, "f") is x and scatter_to_owners(x, plan, "p") is x and comm.calls == calls


CHANGES = {
    "width": lambda x: torch.cat([x, x], 1),
    "dtype": lambda x: x.float(),
    "dimensions": lambda x: x.unsqueeze(1),
}


@pytest.mark.parametrize("function", [halo_fetch, scatter_to_owners])
@pytest.mark.parametrize("what", CHANGES)
def test_ranks_that_differ_are_told_on_every_rank(function, what):
    def work(comm):
        plan = plan_of(comm)
        x = numbers(comm, plan.num_own_src if function is halo_fetch else plan.num_src)
        try:
            function(CHANGES[what](x) if comm.rank == 2 else x, plan, "features of layer 2")
        except DivergenceError as error:
            return str(error)

    for text in run(work, 4):
        assert text is not None and "features of layer 2: ranks disagree about this call" in text
        mine, theirs = re.search(r"Rank 0: (.*?)\. Rank 2: (.*?)\. Every", text).groups()
        assert "float64" in mine and "[3]" in mine and mine != theirs and "same widths and dtypes" in text


def test_grad_mode_that_differs_is_told():
    def work(comm):
        plan = plan_of(comm)
        with torch.set_grad_enabled(comm.rank != 1):
            try:
                halo_fetch(numbers(comm, plan.num_own_src), plan, "f")
            except DivergenceError as error:
                return str(error)

    assert all(re.search("Rank 0: .*grad.* Rank 1: .*grad", text) for text in run(work, 4))
