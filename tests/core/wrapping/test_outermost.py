"""A wrapped model called from outside: which calls are followed, one forward pass, tied to its process."""

import copy
import pickle

import pytest
import torch
from torch import nn

from shardpass.backends import LocalCommunicator
from shardpass.core.ranks import Ranks
from shardpass.core.ranks.torch_private import dispatch_modes
from shardpass.core.training import GradientSums
from shardpass.core.wrapping import FollowedCalls, OutermostCall
from shardpass.errors import RefusedError


class Call(OutermostCall):
    def is_known(self, module):
        return False


def call_of(model, comm):
    return Call(model, comm, FollowedCalls(True), None, GradientSums(comm, model))


@pytest.fixture
def comm():
    return Ranks(LocalCommunicator())


def test_the_calls_whose_number_is_a_power_of_two_are_followed_in_each_mode(comm):
    model, followed = nn.Linear(2, 2), FollowedCalls(True)
    seen = [followed.next(model.train(), comm, "forward") is not None for _ in range(9)]
    assert seen == [number in (1, 2, 4, 8) for number in range(1, 10)]
    assert followed.next(model.eval(), comm, "forward") is not None
    assert FollowedCalls(False).next(model, comm, "forward") is None


def test_a_call_is_one_forward_pass(comm):
    passes = []

    class Outer(nn.Module):
        def forward(self, x):
            passes.append((comm.forward, comm.is_followed))
            return x * 2

    model = Outer()
    call = call_of(model, comm)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        call.run(model.forward, (x,), {}).sum().backward()
    assert [is_followed for _, is_followed in passes] == [True, True, False]
    assert passes[0][0] is not None and comm.forward is None and torch.equal(x.grad, torch.full((3,), 6.0))


class Library(nn.Linear):
    """A layer that is known to be exact, in which something happens."""

    error: BaseException

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_torch_calls_no_hooks_for_leaves_a_known_layer_as_it_is(comm, error):
    class Knows(OutermostCall):
        def is_known(self, module):
            return isinstance(module, Library)

    model = nn.Sequential(Library(2, 2))
    model[0].error = error
    call = Knows(model, comm, FollowedCalls(True), None, GradientSums(comm, model))
    with pytest.raises(type(error)):
        call.run(model.forward, (torch.ones(1, 2),), {})
    assert not dispatch_modes()


def test_a_lack_of_memory_is_not_told_as_a_refusal(comm):
    lack = torch.OutOfMemoryError("out of memory")

    class Explains(nn.Module):
        def forward(self, x):
            try:
                raise lack
            except RuntimeError:
                raise RefusedError("computes with the number of rows")  # noqa: B904

    model = Explains()
    with pytest.raises(torch.OutOfMemoryError):
        call_of(model, comm).run(model.forward, (torch.ones(1, 2),), {})


def test_it_is_not_pickled_and_says_what_to_do(comm):
    with pytest.raises(TypeError, match=r"save model.state_dict\(\)"):
        pickle.dumps(call_of(nn.Linear(2, 2), comm))


def test_a_copy_calls_the_copied_model(comm):
    model = nn.Linear(2, 2)
    both = copy.deepcopy({"model": model, "call": call_of(model, comm)})
    assert both["call"].model is both["model"] is not model
