"""DistributedBatchNorm against torch.nn.BatchNorm1d on the concatenated rows."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardpass.core.ranks import chained
from shardpass.core.training import DistributedBatchNorm, global_moments, replace_batch_norms
from shardpass.core.training import moments as moments_module
from shardpass.core.training.moments import _merge
from shardpass.errors import ShardpassError
from shardpass.testing import run

SPLITS = {1: [11], 2: [4, 7], 3: [0, 5, 6], 4: [3, 0, 1, 7]}
OPTIONS = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"momentum": 0.3, "eps": 1e-2},
]


def whole(steps, options, dtype=torch.float64):
    """Outputs, input gradients, weight gradients and final state of the unmodified norm on all rows."""
    reference = nn.BatchNorm1d(3, **options).to(dtype)
    if reference.affine:
        nn.init.normal_(reference.weight), nn.init.normal_(reference.bias)
    initial = copy.deepcopy(reference.state_dict())
    outputs, grads = [], []
    for rows, upstream in steps:
        leaf = rows.clone().requires_grad_()
        output = reference(leaf)
        output.backward(upstream)
        outputs.append(output.detach()), grads.append(leaf.grad)
    return reference, initial, outputs, grads


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk", [1 << 20, 48])
def test_parity_over_several_steps(ranks, options, chunk, monkeypatch):
    monkeypatch.setattr(moments_module, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    split = SPLITS[ranks]
    total = sum(split)
    steps = [(torch.randn(total, 3).double() * 2 + 5, torch.randn(total, 3).double()) for _ in range(3)]
    reference, initial, outputs, grads = whole(steps, options)

    def body(comm):
        own = DistributedBatchNorm(3, comm, **options).double()
        own.load_state_dict(initial)
        results = []
        for rows, upstream in steps:
            leaf = rows.split(split)[comm.rank].clone().requires_grad_()
            output = own(leaf)
            output.backward(upstream.split(split)[comm.rank])
            results.append((output.detach(), leaf.grad))
        weights = [parameter.grad for parameter in own.parameters()]
        own.eval()
        return results, weights, own.state_dict(), own(steps[0][0]).detach() if own.track_running_stats else None

    results = run(body, ranks)
    for step in range(3):
        torch.testing.assert_close(torch.cat([r[0][step][0] for r in results]), outputs[step], rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.cat([r[0][step][1] for r in results]), grads[step], rtol=0, atol=1e-10)
    for number, parameter in enumerate(reference.parameters()):
        summed = torch.stack([r[1][number] for r in results]).sum(0)
        torch.testing.assert_close(summed, parameter.grad, rtol=0, atol=1e-10)
    for _, _, state, evaluated in results:
        assert state.keys() == reference.state_dict().keys()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
            assert torch.equal(state[name], results[0][2][name])  # the same bits everywhere
        if evaluated is not None:
            torch.testing.assert_close(evaluated, reference.eval()(steps[0][0]), rtol=0, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.floats(-1e6, 1e6),
    st.integers(0, 2**31 - 1),
)
def test_moments_of_any_split_are_those_of_the_whole(sizes, offset, seed):
    rows = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(seed)).double() + offset
    sets = []
    for part in rows.split(sizes):
        mean = part.mean(0) if len(part) else torch.zeros(2).double()
        sets.append((torch.full((2,), float(len(part))).double(), mean, (part - mean).square().sum(0)))
    count, mean, squares = _merge(*(torch.stack(values) for values in zip(*sets)))
    assert count.tolist() == [len(rows)] * 2
    if len(rows):
        torch.testing.assert_close(mean, rows.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(squares, (rows - rows.mean(0)).square().sum(0), rtol=1e-6, atol=1e-7)


def test_a_mean_far_above_the_deviation_and_a_constant_column():
    torch.manual_seed(1)
    rows = torch.cat([torch.randn(9000, 1) + 1e5, torch.full((9000, 1), 0.1)], 1)
    rows[:, :1] += torch.linspace(0, 50, 9000)[:, None]  # sorted: every rank, every chunk, has another mean

    def body(comm):
        own = rows.tensor_split(comm.size)[comm.rank]
        moments = global_moments(own, comm, "moments")
        layer = DistributedBatchNorm(2, comm)
        return moments, layer(own).detach()

    results = run(body, 3)
    exact = rows.double()
    variance = exact.var(0, correction=0)
    for moments, _ in results:
        assert moments.count == 9000
        torch.testing.assert_close(moments.mean, exact.mean(0), rtol=1e-9, atol=0)
        torch.testing.assert_close(moments.variance, variance, rtol=1e-6, atol=1e-12)
    expected = (exact - exact.mean(0)) / (variance + 1e-5).sqrt()
    torch.testing.assert_close(torch.cat([r[1] for r in results]).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("module_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_rows_are_computed_as_torch_does(module_dtype):
    torch.manual_seed(2)
    rows, upstream = torch.randn(40, 3).bfloat16(), torch.randn(40, 3).bfloat16()
    reference = nn.BatchNorm1d(3).to(module_dtype)
    leaf = rows.clone().requires_grad_()
    output = reference(leaf)
    output.backward(upstream)

    def body(comm):
        layer = DistributedBatchNorm(3, comm).to(module_dtype)
        own = rows.tensor_split(comm.size)[comm.rank].clone().requires_grad_()
        result = layer(own)
        result.backward(upstream.tensor_split(comm.size)[comm.rank])
        assert result.dtype == own.grad.dtype == torch.bfloat16
        assert layer.weight.grad.dtype == layer.running_mean.dtype == module_dtype
        return result.detach(), own.grad, layer.running_mean.clone()

    results = run(body, 2)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), output.detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), leaf.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[0][2], reference.running_mean, rtol=2e-2, atol=2e-3)


def test_evaluation_does_not_communicate():
    def body(comm):
        layer = DistributedBatchNorm(3, comm).eval()
        if comm.rank == 0:  # the other rank never answers
            return layer(torch.randn(0, 3)).shape, layer(torch.randn(5, 3)).shape, comm.calls
        return None

    assert run(body, 2)[0] == ((0, 3), (5, 3), 0)


@pytest.mark.parametrize("reached", [[True, False], [False, True]])
def test_a_branch_that_one_loss_does_not_reach(reached):
    """Rank 1's loss skips the second norm's branch; gradients equal those of the sum of the losses in one process."""
    torch.manual_seed(3)
    rows = torch.randn(10, 3).double()
    linear = nn.Linear(3, 3).double()

    def forward(linear, first, second, x):
        hidden = first(linear(x))
        return hidden, second(torch.tanh(hidden))

    def loss(hidden, out, used):
        return (hidden**3).sum() + ((out**3).sum() if used else 0)

    first, second, reference = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double(), copy.deepcopy(linear)
    hidden, out = forward(reference, first, second, rows)
    sum(loss(h, o, used) for h, o, used in zip(hidden.split(5), out.split(5), reached)).backward()

    def body(comm):
        model = copy.deepcopy(linear)
        norms = [DistributedBatchNorm(3, comm).double() for _ in range(2)]
        hidden, out = chained(comm, forward, model, *norms, rows.split(5)[comm.rank])
        loss(hidden, out, reached[comm.rank]).backward()
        return [p.grad for p in [*model.parameters(), *norms[0].parameters()]]

    results = run(body, 2)
    expected = [p.grad for p in [*reference.parameters(), *first.parameters()]]
    for own0, own1, whole_grad in zip(*results, expected):
        torch.testing.assert_close(own0 + own1, whole_grad, rtol=0, atol=1e-10)


def test_checkpointing_recomputes_and_stays_exact():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(4)
    rows = torch.randn(10, 3).double()

    def body(comm, recompute):
        torch_rows = rows.split([7, 3])[comm.rank].clone().requires_grad_()
        first, second = DistributedBatchNorm(3, comm).double(), DistributedBatchNorm(3, comm).double()

        def block(x):
            return second(torch.tanh(first(x)))

        def forward(x):
            return checkpoint(block, x, use_reentrant=False) if recompute else block(x)

        output = chained(comm, forward, torch_rows)
        ((output**3).sum() if comm.rank else output[:1].sum()).backward()
        return torch_rows.grad

    plain = run(lambda comm: body(comm, False), 2)
    again = run(lambda comm: body(comm, True), 2)
    for left, right in zip(plain, again):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_one_row_in_all_raises_as_torch_and_no_rows_do_not(comm):
    layer = DistributedBatchNorm(3, comm)
    assert layer(torch.randn(0, 3)).shape == (0, 3)
    assert torch.equal(layer.running_mean, torch.zeros(3))
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel.*1 row on all ranks together"):
        layer(torch.randn(comm.rank, 3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3), self.first)
        self.image = nn.BatchNorm2d(3)
        self.none = None

    def forward(self, x):
        return self.blocks(self.first(x))


@pytest.mark.ranks(1)
def test_replace_batch_norms_keeps_everything_else(comm):
    net = Net()
    net.first.eval()
    seen = []
    net.first.register_forward_hook(lambda *_: seen.append(1))
    weight, names = net.first.weight, list(net.state_dict())
    assert replace_batch_norms(net, comm) is net
    assert type(net.first) is type(net.blocks[1]) is DistributedBatchNorm
    assert net.first is net.blocks[2] and net.first.weight is weight and net.first.comm is comm
    assert not net.first.training and net.blocks[1].training
    assert net.image.dims == (4,) and list(net.state_dict()) == names
    net(torch.randn(4, 3))
    assert len(seen) == 2
    root = replace_batch_norms(nn.BatchNorm1d(3), comm)
    assert type(root) is DistributedBatchNorm


@pytest.mark.ranks(1)
def test_copies_keep_the_communicator_and_pickles_drop_it(comm):
    layer = DistributedBatchNorm(3, comm)
    copied = copy.deepcopy(nn.Sequential(layer))[0]
    assert copied.comm is comm and copied.weight is not layer.weight
    loaded = pickle.loads(pickle.dumps(layer))
    loaded.eval()(torch.randn(2, 3))
    with pytest.raises(ShardpassError, match=r"no communicator.*wrap the model again"):
        loaded.train()(torch.randn(2, 3))
