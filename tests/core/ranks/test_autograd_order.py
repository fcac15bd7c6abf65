"""The order token: backward visits the same collective calls on every rank."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardpass.core.ranks import all_reduce_sum, begin_call, chained, drop_chain, end_chain, start_chain
from shardpass.testing import run


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_reduce_sum_is_its_own_adjoint(ranks):
    def body(comm):
        own = torch.randn(5, generator=torch.Generator().manual_seed(comm.rank)).double().requires_grad_()
        weight = torch.randn(5, generator=torch.Generator().manual_seed(9 + comm.rank)).double()
        total = all_reduce_sum(own, comm)
        (total * weight).sum().backward()
        return own.detach(), weight, total.detach(), own.grad

    results = run(body, ranks)
    inputs, weights = (torch.stack([r[i] for r in results]).sum(0) for i in (0, 1))
    for _, _, total, grad in results:
        torch.testing.assert_close(total, inputs, rtol=0, atol=1e-14)
        torch.testing.assert_close(grad, weights, rtol=0, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_that_reach_different_calls(ranks, recompute):
    """Rank r's loss reaches only its own branch of three; all ranks still communicate three times in backward."""

    def forward(comm, x):
        branches = [all_reduce_sum(x * (k + 1), comm, f"branch {k}") for k in range(3)]
        branches[0].detach()
        return branches

    def body(comm):
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)

        def call(x):
            return checkpoint(forward, comm, x, use_reentrant=False) if recompute else forward(comm, x)

        branches = chained(comm, call, x)
        assert comm.forward is None
        (branches[comm.rank % 3] ** 2).sum().backward()
        return x.grad

    for grad in run(body, ranks):  # d/dx of sum over branches k of (sum over ranks of (k + 1) x)^2
        expected = 2.0 * ranks * sum((k + 1) ** 2 for k in range(ranks))
        torch.testing.assert_close(grad, torch.full_like(grad, expected))


@pytest.mark.ranks(2)
def test_a_rank_whose_forward_returns_a_constant_still_answers(comm):
    x = torch.ones(2, requires_grad=True)

    def forward(x):
        y = all_reduce_sum(x, comm)
        return y if comm.rank == 0 else torch.zeros(2)

    output = chained(comm, forward, x)
    output.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_nested_structures_are_tied_and_may_be_changed_in_place(comm):
    x = torch.ones(2, requires_grad=True)

    def forward(x):
        y = all_reduce_sum(x, comm)
        return {"a": (x * 2, [y]), "b": torch.tensor([1, 2]), "c": "text", "d": (x * 3).detach(), "e": None}

    output = chained(comm, forward, x)
    assert output["c"] == "text" and output["e"] is None and output["b"].dtype == torch.int64
    assert not output["d"].requires_grad
    output["a"][0].add_(1)
    output["a"][0][:1] *= 2
    torch.relu_(output["a"][0])
    assert output["a"][0].tolist() == [6.0, 3.0]
    output["a"][0].sum().backward()
    assert x.grad.tolist() == [4.0, 2.0]


@pytest.mark.ranks(1)
def test_the_alias_still_finds_changes_of_saved_tensors(comm):
    x = torch.ones(2, requires_grad=True)

    def forward(x):
        return all_reduce_sum(x, comm).exp()  # exp saves its result

    output = chained(comm, forward, x)
    output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.ranks(2)
def test_without_gradients_there_are_no_tokens(comm, mode):
    x = torch.ones(2, requires_grad=True)
    with mode():
        output = chained(comm, lambda: all_reduce_sum(x, comm))
        assert not begin_call(comm, "probe")[1].requires_grad
    assert not output.requires_grad and comm.forward is None
    assert output.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_a_part_without_gradients_does_not_break_the_chain(comm):
    x = torch.ones(2, requires_grad=True)

    def forward(x):
        first = all_reduce_sum(x, comm)
        with torch.no_grad():
            second = all_reduce_sum(x, comm)
        third = all_reduce_sum(x * 3, comm)
        return first + second, third

    outputs = chained(comm, forward, x)
    outputs[comm.rank].sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]


@pytest.mark.ranks(1)
def test_nested_chains_belong_to_the_outermost(comm):
    assert start_chain(comm)
    assert not start_chain(comm)
    x = torch.ones(1, requires_grad=True)
    y = chained(comm, all_reduce_sum, x, comm)
    assert comm.forward is not None and comm.forward.token is not None
    z = end_chain(comm, y)
    assert comm.forward is None and z is not y
    assert comm.calls == 1


@pytest.mark.ranks(1)
def test_an_exception_ends_the_chain(comm):
    def forward():
        all_reduce_sum(torch.ones(1), comm)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        chained(comm, forward)
    assert comm.forward is None
    start_chain(comm)
    drop_chain(comm)
    assert comm.forward is None


@pytest.mark.ranks(1)
def test_outside_a_chain_tokens_are_not_carried_over(comm):
    first, second = begin_call(comm, "a"), begin_call(comm, "b")
    assert (first[0], second[0]) == (1, 2)
    assert first[1] is not second[1] and first[1].is_leaf
    all_reduce_sum(torch.ones(1), comm)
    assert comm.forward is None
