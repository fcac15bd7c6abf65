"""Activations computed again in backward: the same bits as torch keeps, or a refusal in words."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardpass.backends import Communicator
from shardpass.core.memory import recomputed_activations
from shardpass.core.training import DistributedBatchNorm
from shardpass.testing import LiveBytes, run

ROWS, WIDTH = 300, 32


class Block(nn.Module):
    """A matrix product, then what `body` makes of it with a norm; a few times, then a loss."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor], comm: Communicator, times: int = 3) -> None:
        super().__init__()
        self.body, self.times = body, times
        self.lin, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.norm: nn.Module = DistributedBatchNorm(WIDTH, comm)
        self.layer_norm, self.prelu = nn.LayerNorm(WIDTH), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.body(self, self.lin(x), x)
        return x


def in_place(net: Any, h: Tensor, x: Tensor) -> Tensor:
    y = F.dropout(net.norm(h).mul_(2), 0.4, inplace=True)
    z = F.relu(y, inplace=True) + x
    z += 1
    return z.mul_(0.5)


def changed_after_use(net: Any, h: Tensor, x: Tensor) -> Tensor:
    y = net.norm(h)
    z = F.relu(y)
    y.add_(1)  # neither the norm nor the activation has saved y
    return net.lin(z) + y


def stacked(net: Any, h: Tensor, x: Tensor) -> Tensor:
    return torch.stack([F.relu(net.norm(h)), torch.tanh(h)], dim=-1).sum(-1)


def by_heads(net: Any, h: Tensor, x: Tensor) -> Tensor:
    y = F.elu(net.norm(h)).view(-1, 4, WIDTH // 4)
    return F.leaky_relu(y * net.scale.view(1, 4, -1)).flatten(1)


BODIES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "relu": lambda net, h, x: F.relu(net.norm(h)),
    "dropout": lambda net, h, x: F.dropout(net.norm(h).relu(), 0.3),
    "dropout of everything": lambda net, h, x: F.dropout(F.dropout(net.norm(h), 1.0) + F.gelu(h), 0.0),
    "elu first": lambda net, h, x: net.norm(F.elu(h)),
    "residual": lambda net, h, x: x + F.dropout(F.silu(net.norm(h)), 0.2),
    "used twice": lambda net, h, x: (lambda y: y + F.relu(y) + torch.sigmoid(y) * y)(net.norm(h)),
    "used twice, changed first": lambda net, h, x: (lambda y: F.relu(y) + y)(net.norm(h)),
    "layer norm": lambda net, h, x: net.prelu(net.layer_norm(h)) * net.scale,
    "no norm": lambda net, h, x: F.dropout(F.relu(h), 0.5),
    "concatenated": lambda net, h, x: torch.cat([F.relu(net.norm(h)), x], dim=-1)[:, ::2],
    "in place": in_place,
    "changed after use": changed_after_use,
    "stacked": stacked,
    "by heads": by_heads,
    "checkpointed": lambda net, h, x: F.relu(
        checkpoint(lambda t: F.dropout(torch.tanh(net.layer_norm(t)), 0.3), net.norm(h), use_reentrant=False)
    ),
}


def gradients(net: nn.Module, x: Tensor, comm: Communicator, active: bool, backwards: int = 1) -> tuple[Any, int]:
    """Output, gradients and buffers; bytes alive between forward and backward."""
    net = copy.deepcopy(net)
    torch.manual_seed(comm.rank)
    with LiveBytes() as live:
        x = x.clone().requires_grad_()
        with recomputed_activations(comm, x, active):
            out = net(x)
        held = live.count()
        for _ in range(backwards):
            (out * torch.arange(out.numel()).view_as(out)).sum().backward(retain_graph=True)
    found = [x.grad, *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]
    return [out.detach(), *found], held


def compared(
    name: str, comm: Communicator, dtype: torch.dtype = torch.float32, backwards: int = 1, **options: Any
) -> Any:
    torch.manual_seed(0)
    net = Block(BODIES[name], comm, **options).to(dtype)
    x = torch.randn(ROWS, WIDTH, dtype=dtype)
    return gradients(net, x, comm, False, backwards), gradients(net, x, comm, True, backwards)


@pytest.mark.parametrize("name", BODIES)
def test_the_same_bits(name: str) -> None:
    dtype = (torch.float32, torch.float64)[[*BODIES].index(name) % 2]
    (kept, bytes_kept), (again, bytes_again) = run(lambda comm: compared(name, comm, dtype, backwards=2), 1)[0]
    assert len(kept) == len(again) and all(torch.equal(a, b) for a, b in zip(kept, again))
    assert bytes_again <= bytes_kept + 1024  # copies of weights
    if name in ("relu", "dropout", "residual", "layer norm", "stacked", "no norm"):
        assert bytes_again < 0.9 * bytes_kept


@pytest.mark.parametrize("name", ["relu", "elu first", "used twice", "by heads", "stacked"])
def test_the_same_bits_with_moments_of_all_ranks(name: str) -> None:
    for (kept, bytes_kept), (again, bytes_again) in run(lambda comm: compared(name, comm), 2):
        assert all(torch.equal(a, b) for a, b in zip(kept, again)) and bytes_again < bytes_kept


def test_long_chains_of_sums() -> None:
    (kept, bytes_kept), (again, bytes_again) = run(lambda comm: compared("residual", comm, times=30), 1)[0]
    assert all(torch.equal(a, b) for a, b in zip(kept, again)) and bytes_again < bytes_kept


def test_autocast_is_as_in_forward() -> None:
    def work(comm: Communicator) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            net = Block(BODIES["layer norm"], comm)
            x = torch.randn(ROWS, WIDTH)
            with recomputed_activations(comm, x, False):
                kept = net(x)
            with recomputed_activations(comm, x):
                again = net(x)
        found = [torch.autograd.grad(out.float().square().sum(), list(net.lin.parameters())) for out in (kept, again)]
        return [torch.equal(a, b) for a, b in zip(*found)]

    assert all(run(work, 1)[0])


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.ranks(1)
def test_an_activation_may_be_used_by_a_loss_or_changed(comm, is_changed):
    net, x = Block(BODIES["relu"], comm, times=1), torch.randn(ROWS, WIDTH)
    found = []
    for active in (False, True):
        with recomputed_activations(comm, x, active):
            a = net(x)
            out = net.lin(a)
        loss = out.square().sum() + (0 if is_changed else a.square().sum())
        if is_changed and active:
            a.detach().zero_()
        found.append(torch.autograd.grad(loss, list(net.lin.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.ranks(1)
def test_a_kept_tensor_that_was_changed_is_an_error(comm):
    net, x = Block(BODIES["relu"], comm), torch.randn(ROWS, WIDTH)
    with recomputed_activations(comm, x):
        h = net.lin(x)
        out = net.lin(F.relu(net.norm(h)))
    h.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.ranks(1)
def test_it_stands_back(comm):
    """Without gradients, and where hooks of the caller's own decide."""
    x = torch.randn(3, WIDTH)
    with torch.no_grad(), recomputed_activations(comm, x):
        assert comm.notes is None
    with torch.autograd.graph.save_on_cpu(), recomputed_activations(comm, x):
        assert comm.notes is None
    with pytest.raises(ZeroDivisionError), recomputed_activations(comm, x):
        assert comm.notes is not None
        raise ZeroDivisionError
    assert comm.notes is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.ranks
def test_norm_makes_nothing_large_besides_its_result(comm, ranks):
    rows, full = torch.randn(20000, 64, requires_grad=True), 20000 * 64 * 4
    norm, grad = DistributedBatchNorm(64, comm), torch.randn(20000, 64)
    with LiveBytes() as forward:
        out = norm(rows)
    with LiveBytes() as backward:
        out.backward(grad)
    assert forward.peak < (2 if comm.size > 1 else 1) * full + 3e6  # chunks are views of the input
    assert backward.peak < (3 if comm.size > 1 else 1) * full + 3e6
