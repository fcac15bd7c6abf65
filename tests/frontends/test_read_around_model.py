"""What a script reads of results outside of torch, and the sums and hooks that are warned of or refused there."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run

from .around_model import Task
from .how_much import one_each
from .on_ranks import on_ranks


def _accuracy(t, out):
    return float((out.argmax(1) == t.y)[t.m].double().mean())


READ = {
    "an accuracy of own rows": (_accuracy, "`mean` puts rows together"),
    "a number of own rows": (lambda t, out: (out.argmax(1) == t.y).sum().item(), "`sum` puts rows together"),
    "an accuracy in a text": (lambda t, out: f"{(out.argmax(1) == t.y).double().mean():.3f}", "`mean` puts rows"),
    "a branch": (lambda t, out: bool(out.max() > 0), "`max` puts rows together"),
    "rows in numpy": (lambda t, out: out.numpy(), "`numpy` takes nodes out of torch"),
    "how many rows": (lambda t, out: len(out), "`len` is a plain number"),
    "rows in lists": (lambda t, out: out.tolist(), "`tolist` takes nodes out of torch"),
}


@pytest.mark.parametrize(("name", "ranks"), one_each(READ, (3, 1)))
def test_what_leaves_torch_as_a_number_of_own_rows_is_warned_of_once(name, ranks):
    function, words = READ[name]

    def work(comm):
        task = Task(comm)
        with torch.no_grad():
            out = task.model(task.x, task.graph)
        for _ in range(2):
            function(task, out)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(work, ranks)
    found = [str(one.message) for one in told if "this rank" in str(one.message).lower()]
    assert len(found) == (ranks > 1) and all(words in one for one in found)


@on_ranks(3)
def test_metrics_and_losses_of_all_ranks_are_read_without_a_warning(comm):
    task = Task(comm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = task.loss(task.z)
        loss.backward()
        read = loss.item(), f"{loss:.3f}", sp.accuracy(task.z, task.y, task.m, comm), repr(task.z[:2])
        rows = sp.gather(task.graph, task.z)
        own = comm.all_reduce((task.z.detach() > 0).sum(0))
    assert read and type(own) is torch.Tensor and (rows is None or type(rows) is torch.Tensor)


@on_ranks(1)
def test_a_hook_of_gradients_on_the_wrapped_model_is_warned_of(comm):
    task = Task(comm)
    task.model.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.warns(UserWarning, match="Register it on a module within"):
        task.loss(task.model(task.x, task.graph)).backward()


@on_ranks(3, 4)
def test_a_sum_over_own_rows_that_is_divided_by_their_number_is_refused(comm):
    task = Task(comm)
    losses = F.cross_entropy(task.z, task.y, reduction="none") * task.m
    for count in (int(task.m.sum()), task.m.sum(), task.m.numel(), losses.size(0), len(losses)):
        with pytest.raises(RefusedError, match=r"is divided by their number|made of how many rows"):
            (losses.sum() / count).backward()


@on_ranks(1, 3)
def test_a_loss_reduced_by_hand_has_no_gradients(comm):
    task = Task(comm)
    total = comm.all_reduce(task.z.square().sum(), "sum")
    assert total.item() > 0
    with pytest.raises(RefusedError, match=r"comm\.all_reduce, which gives no gradients"):
        (task.loss(task.z) + total).backward()


@on_ranks(3)
def test_a_penalty_of_parameters_is_not_summed_over_ranks(comm):
    task = Task(comm)
    penalty = sum(p.square().sum() for p in task.model.parameters())
    with pytest.raises(RefusedError, match="made of parameters, which every rank has alike"):
        sp.all_reduce_sum(penalty, comm)
    (task.loss(task.z) + penalty).backward()


@on_ranks(3)
def test_own_counts_written_into_parameters_are_refused_for_what_they_are(comm):
    task = Task(comm)
    state = {name: value.clone() for name, value in task.model.state_dict().items()}
    name = next(name for name, value in state.items() if value.dim() == 1)
    state[name] = (task.y == 1).double().sum().expand(state[name].shape)
    with pytest.raises(RuntimeError, match="`sum` puts rows together"):
        task.model.load_state_dict(state)


def test_the_gradient_of_a_tensor_of_its_own_is_told_to_be_a_share():
    def work(comm):
        task, scale = Task(comm), torch.tensor(1.0).double().requires_grad_()
        hooks, register = [], scale.register_post_accumulate_grad_hook
        scale.register_post_accumulate_grad_hook = lambda hook: hooks.append(hook) or register(hook)
        for _ in range(2):
            scale.grad = None
            task.loss(task.model(task.x, task.graph) * scale).backward()
        assert len(hooks) == (comm.size > 1)  # however often it meets rows
        return float(comm.all_reduce(scale.grad))

    (whole,) = run(work, 1)
    with pytest.warns(UserWarning, match="Its gradient is this rank's share"):
        assert run(work, 3) == pytest.approx([whole] * 3, rel=1e-12)


class Reduces(torch.nn.Module):
    def __init__(self, comm):
        super().__init__()
        self.comm, self.last = comm, torch.nn.Linear(6, 8).double()

    def forward(self, x):
        total = self.comm.all_reduce(x.square().sum()) + self.comm.all_reduce(x.amax(0), "max").sum()
        return self.last(x if total < 0 else x / total)


def test_a_model_may_reduce_sums_and_maxima_over_ranks_itself():
    def work(comm):
        task = Task(comm)
        with sp.seed(0, comm):  # ranks are threads that draw from one generator
            model = Reduces(comm)
        model = sp.pyg.wrap(model, comm)
        return float(task.loss(model(task.x)))

    (whole,) = run(work, 1)
    assert run(work, 3) == pytest.approx([whole] * 3, rel=1e-12)


def test_gradients_by_fast_weights_of_a_functional_call_are_those_of_all_rows():
    def work(comm):
        task = Task(comm)
        fast = {name: p.detach().clone().requires_grad_() for name, p in task.model.named_parameters()}
        out = torch.func.functional_call(task.model, fast, (task.x, task.graph))
        grads = torch.autograd.grad(task.loss(out), list(fast.values()), allow_unused=True)
        with torch.no_grad():
            for parameter, grad in zip(task.model.parameters(), grads):
                parameter.sub_(0.0 if grad is None else 0.3 * grad)
        return float(task.loss(task.model(task.x, task.graph)))

    (whole,) = run(work, 1)
    assert run(work, 3) == pytest.approx([whole] * 3, rel=1e-12)
