"""A wrapped model called from outside: checked once in each training mode, one forward pass, tied to its process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from shardpass.backends.local import LocalCommunicator
from shardpass.core.ranks import Ranks
from shardpass.core.wrapping import OutermostCall, Unchecked, outermost


@pytest.fixture
def comm():
    return Ranks(LocalCommunicator())


def test_a_model_is_checked_once_in_training_and_once_in_evaluation(comm, monkeypatch):
    seen = []
    monkeypatch.setattr(outermost, "check_model", lambda frontend, pristine, model, *rest: seen.append(model.training))
    model = nn.Linear(2, 2)
    unchecked = Unchecked(nn.Linear(2, 2))
    for training in (True, True, False, True, False):
        model.train(training)
        if unchecked.is_new(training):
            unchecked.check(None, model, comm, (), {})
    assert seen == [True, False] and unchecked.pristine is None, "the copy goes after the second check"


def test_a_call_is_one_forward_pass(comm):
    passes = []

    class Outer(nn.Module):
        def forward(self, x):
            passes.append(comm.forward)
            return x * 2

    model = Outer()
    call = OutermostCall(model, comm, Unchecked(None), None)
    x = torch.ones(3, requires_grad=True)
    out = call.run(model.forward, (x,), {}, graph_is_hidden=False)
    out.sum().backward()
    assert passes[0] is not None and comm.forward is None and torch.equal(x.grad, torch.full((3,), 2.0))


def test_it_is_not_pickled_and_says_what_to_do(comm):
    with pytest.raises(TypeError, match=r"save model.state_dict\(\)"):
        pickle.dumps(OutermostCall(nn.Linear(2, 2), comm, Unchecked(None), None))


def test_a_copy_calls_the_copied_model(comm):
    model = nn.Linear(2, 2)
    both = copy.deepcopy({"model": model, "call": OutermostCall(model, comm, Unchecked(None), None)})
    assert both["call"].model is both["model"] is not model
