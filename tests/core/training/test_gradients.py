"""sync_parameters and sync_gradients: sums over ranks, agreement, and every misuse in words."""

import copy
import threading

import pytest
import torch
from torch import nn

from shardpass.core.training import gradients, refuse_inside_ddp, sync_gradients, sync_parameters
from shardpass.errors import RefusedError, ShardpassError
from shardpass.testing import run

SEEDED = threading.Lock()


def build(seed=0, dtype=torch.float64):
    with SEEDED:  # the ranks are threads, which have one generator
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    model.unused = nn.Parameter(torch.zeros(3))
    return model


def backward(model, comm, scale=1.0):
    rows = torch.ones(2, 3, dtype=model[0].weight.dtype) * (comm.rank + 1)
    (model[2](model[0](rows)).sum() * scale).backward()


class Mixed(nn.Module):
    """Every dtype that a bucket must carry, and parameters that are one object."""

    def __init__(self, rank):
        super().__init__()
        self.a = nn.Parameter(torch.full((2, 3), float(rank)))
        self.b = nn.Parameter(torch.full((3,), float(rank), dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.full((), complex(rank, 1)))
        self.t = nn.Parameter(torch.full((4, 2), float(rank)).T)
        self.tied = self.a
        self.rows = nn.Parameter(torch.full((rank + 1, 2), float(rank)))
        self.rows.shardpass_local = True
        self.register_buffer("flag", torch.tensor([rank == 0]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("hidden", torch.tensor([float(rank)]), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 3))


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.ranks
def test_parameters_and_buffers_become_those_of_rank_0(comm, bucket_bytes, ranks):
    model = Mixed(comm.rank)
    kept = model.a
    sync_parameters(model, comm, bucket_bytes)
    assert model.a is kept is model.tied and not model.a.any() and not model.b.any() and not model.t.any()
    assert model.c.item() == 1j and model.flag.item() and model.count.item() == 0 and not model.hidden.any()
    assert model.rows.shape == (comm.rank + 1, 2) and bool((model.rows == comm.rank).all())


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_summed_also_where_a_rank_has_none(bucket_bytes, ranks):
    def body(comm):
        model = build()
        backward(model, comm)
        if comm.rank != ranks - 1:
            model[2].zero_grad(set_to_none=True)  # no gradient there on this rank
        own = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        sync_gradients(model, comm, bucket_bytes)
        return own, [p.grad for p in model.parameters()]

    results = run(body, ranks)
    for index in range(len(results[0][0])):
        parts = [own[index] for own, _ in results if own[index] is not None]
        for _, summed in results:
            if not parts:
                assert summed[index] is None
            else:
                torch.testing.assert_close(summed[index], torch.stack(parts).sum(0), rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_every_dtype_and_layout_is_summed_and_local_rows_are_not(comm):
    model = Mixed(comm.rank)
    sync_parameters(model, comm)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + comm.rank)
    kept = model.a.grad
    sync_gradients(model, comm)
    assert model.a.grad is kept
    for name, parameter in model.named_parameters():
        expected = 1 + comm.rank if name == "rows" else 3
        assert bool((parameter.grad == expected).all()), name


def test_accumulating_and_both_kinds_of_zero_grad_are_legal():
    def body(comm):
        model = build()
        sync_parameters(model, comm)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            optimizer.zero_grad(set_to_none=bool(step % 2))
            for _ in range(2):
                backward(model, comm)
            sync_gradients(model, comm)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return model[0].weight.detach()

    first, second = run(body, 2)
    assert torch.equal(first, second)


@pytest.mark.ranks(2)
def test_zero_grad_between_forward_and_backward_is_legal(comm):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for set_to_none in (False, True, False):
        loss = model[0](torch.ones(2, 3).double()).sum()
        optimizer.zero_grad(set_to_none)
        loss.backward()
        sync_gradients(model, comm)
        optimizer.step()


def second_sync(model, comm, optimizer):
    backward(model, comm)
    sync_gradients(model, comm)
    sync_gradients(model, comm)


def sparse(model, comm, optimizer):
    model.table = nn.Embedding(4, 2, sparse=True)
    model.table(torch.tensor([1])).sum().backward()
    sync_gradients(model, comm)


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (
            second_sync,
            "gradient of parameter '0.weight' on rank 0 was already summed over ranks: call optimizer.zero_grad()",
        ),
        (sparse, "gradient of parameter 'table.weight' on rank 0 is sparse: build the layer with sparse=False"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.ranks
def test_misuse_is_told_on_every_rank(comm, misuse, text, ranks):
    model = build()
    with pytest.raises(ShardpassError, match=text):
        misuse(model, comm, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: nn.Linear(3, 5), r"weight: float32 \[4, 3\].*weight: float32 \[5, 3\]"),
        (lambda: nn.Linear(3, 4).double(), r"weight: float32 \[4, 3\].*weight: float64 \[4, 3\]"),
        (lambda: nn.Linear(3, 4, bias=False), r"bias: float32 \[4\].*no more parameters"),
    ],
)
def test_models_that_differ_are_named(other, text):
    def body(comm):
        model = other() if comm.rank == 1 else nn.Linear(3, 4)
        with pytest.raises(ValueError, match="the models differ") as caught:
            sync_parameters(model, comm)
        return str(caught.value)

    messages = run(body, 2)
    import re

    assert re.search(text, messages[0]) and "on rank 0" in messages[1] and "on rank 1" in messages[1]


@pytest.mark.ranks(2)
def test_lazy_parameters_are_refused(comm):
    with pytest.raises(ValueError, match="'weight' is not initialised yet: run the lazy module once"):
        sync_parameters(nn.LazyLinear(3), comm)


def test_ddp_is_refused(monkeypatch):
    class Fake(gradients.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    def body(comm):
        with pytest.raises(RefusedError, match="DistributedDataParallel around the model is refused: it averages"):
            sync_gradients(Fake(nn.Linear(1, 1)), comm)
        with pytest.raises(RefusedError, match="around submodule '0' is refused"):
            sync_gradients(nn.Sequential(Fake(nn.Linear(1, 1))), comm)
        refuse_inside_ddp(comm)
        return True

    def inside(comm):
        with pytest.raises(RefusedError, match="DistributedDataParallel around the wrapped model is refused"):
            refuse_inside_ddp(comm)

    assert run(body, 2) == [True, True]
    monkeypatch.setattr(gradients.DistributedDataParallel, "_active_ddp_module", object())
    run(inside, 2)
    run(refuse_inside_ddp, 1)  # which shares its graph with nobody


def test_threads_that_hold_one_model_are_told():
    """Its gradients would be those of all ranks, added up in one place by each of them."""
    model, frozen = nn.Linear(2, 1), nn.Linear(2, 2).requires_grad_(False)

    def shared(comm):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RefusedError, match="ranks 0 and 1 hold the same model, or parameters of it"):
            sync_gradients(model, comm)
        own = nn.Sequential(frozen, copy.deepcopy(model))  # what is not trained may be shared
        own(torch.ones(1, 2)).sum().backward()
        sync_gradients(own, comm)
        return True

    assert run(shared, 2) == [True, True]
