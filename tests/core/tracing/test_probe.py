"""What one trace shows: reductions, stages, simple forms; followed through views and writes."""

import gc
import threading
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from looking import add_up, function_of, largest, look, softmax
from torch import nn

from shardpass.core.tracing.probe_trace import EVERYTHING
from shardpass.errors import RefusedError

# Structure


SIMPLE = {
    "copy": (lambda i: i.src["x"], "copy", "x", ""),
    "copy, reshaped there": (lambda i: i.src["x"].view(-1, 4).contiguous(), "copy", "x", ""),
    "scaled": (lambda i: i.src["x"] * i.edge["w"].view(-1, 1), "scale", "x", "w"),
    "scaled, other way": (lambda i: i.edge["w"].unsqueeze(-1) * i.src["x"], "scale", "x", "w"),
    "scaled, one channel": (lambda i: i.src["z"] * i.edge["w"].view(-1, 1), "scale", "z", "w"),
    "destination": (lambda i: i.dst["x"], "general", "", ""),
    "doubled": (lambda i: i.src["x"] * 2, "general", "", ""),
    "scaled twice": (lambda i: i.src["x"] * i.edge["w"].view(-1, 1) * i.edge["w"].view(-1, 1), "general", "", ""),
    "scaled head by head": (lambda i: i.src["h"] * i.edge["v"], "scale", "h", "v"),
    "scaled channel by channel": (lambda i: i.src["h"] * i.edge["v"].transpose(1, 2), "general", "", ""),
    "product of sources": (lambda i: i.src["x"] * i.src["z"], "general", "", ""),
    "edge vector": (lambda i: i.src["x"][:, :3] * i.edge["e"], "general", "", ""),
    "edge scalar alone": (lambda i: i.edge["w"].view(-1, 1), "general", "", ""),
    "cut": (lambda i: i.src["x"][:, :2], "general", "", ""),
    "other dtype": (lambda i: i.src["x"].float(), "general", "", ""),
    "column of heads": (lambda i: i.src["x"].view(-1, 2, 2), "general", "", ""),
    "ones": (lambda i: torch.ones_like(i.src["x"]), "ones", "", ""),
}


@pytest.mark.parametrize("what", SIMPLE)
def test_forms(graph, what):
    message, form, source, weight = SIMPLE[what]
    (reduction,) = look(graph, message).reductions
    assert (reduction.op, reduction.form, reduction.source, reduction.weight) == ("sum", form, source, weight)
    assert (reduction.stage, reduction.depth, reduction.parents, reduction.leader) == (0, 0, frozenset(), None)


class Two(NamedTuple):
    """A message of two tensors."""

    first: Any
    second: Any

    def __call__(self, i):
        return self.first(i), self.second(i)


def each(values, index, num_dst):
    return add_up(values[0], index, num_dst).sum() + add_up(values[1], index, num_dst)


NARROW = {
    "scaled": (lambda i: i.src["x"] * i.edge["w"].view(-1, 1), ["scale"]),
    "scaled by bits": (lambda i: i.src["x"].exp() * i.edge["w"].view(-1, 1), ["general"]),
    "twice": (
        Two(lambda i: i.src["x"] * i.edge["w"].view(-1, 1), lambda i: i.edge["w"].view(-1, 1) * i.src["x"]),
        ["scale"] * 2,
    ),
    "two dtypes": (Two(lambda i: i.src["x"] * i.edge["w"].view(-1, 1), lambda i: i.src["x"]), ["general", "copy"]),
    "other rows": (Two(lambda i: i.src["x"] * i.edge["w"].view(-1, 1), lambda i: i.src["z"]), ["scale", "copy"]),
    "and another": (Two(lambda i: i.src["x"] * i.edge["w"].view(-1, 1), lambda i: i.src["z"].exp()), ["general"] * 2),
}


@pytest.mark.parametrize("what", NARROW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forms_of_narrow_rows(graph, what, dtype):
    """Rows are widened only where kernels alone read them: a message function sees the dtypes that it was given."""
    message, forms = NARROW[what]
    reduce = each if isinstance(message, Two) else add_up
    assert [r.form for r in look(graph, message, reduce, dtype=dtype).reductions] == forms


def test_nothing_is_left_of_a_probe(graph):
    def tensors():
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    def message(i):
        return torch.sigmoid(torch.tanh(i.src["x"]).exp())  # each keeps its own result for backward

    look(graph, message)
    before = tensors()
    look(graph, message)
    assert tensors() == before


def test_what_a_message_keeps_of_a_probe_has_its_gradient(graph):
    weight, kept = torch.randn(4, dtype=torch.float64, requires_grad=True), []

    def message(i):
        if not kept:
            kept.append(torch.tanh(weight))
        return i.src["x"] * kept[0].sum()

    look(graph, message)
    (grad,) = torch.autograd.grad(kept[0].sum(), weight)
    torch.testing.assert_close(grad, 1 - torch.tanh(weight) ** 2)


def changed(change):
    def message(i):
        y = i.src["x"].clone()
        change(y, i)
        return y

    return message


CHANGES = {
    "mul_": lambda y, i: y.mul_(2),
    "+=": lambda y, i: y.__iadd__(1),
    "item": lambda y, i: y.__setitem__((slice(None), 0), 0.0),
    "relu": lambda y, i: F.relu(y, inplace=True),
    "module": lambda y, i: nn.ELU(inplace=True)(y),
    "dropout": lambda y, i: F.dropout(y, 0.5, inplace=True),
    "view": lambda y, i: y[:, 1:].add_(1),
    "transposed": lambda y, i: y.t().mul_(3),
    "copy_": lambda y, i: y.copy_(i.dst["x"]),
    "data": lambda y, i: y.data.mul_(2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_copy_that_was_changed_is_no_copy(graph, what):
    (reduction,) = look(graph, changed(CHANGES[what])).reductions
    assert reduction.form == "general" and reduction.sources == {"x"}


def test_mean_has_one_stage(graph):
    def mean(m, i, n):
        return add_up(m, i, n) / add_up(torch.ones_like(m[:, :1]), i, n).clamp(min=1)

    found = look(graph, lambda i: i.src["x"], mean)
    assert [r.form for r in found.reductions] == ["copy", "ones"] and found.num_stages == 1
    assert found.num_message == 0 and not found.reductions[1].differentiable


def test_softmax_takes_two_stages(graph):
    def message(i):
        logit = (i.src["z"] + i.dst["x"][:, :1]).tanh()
        return softmax(logit, i.index, i.num_dst) * i.src["x"]

    found = look(graph, message)
    top, total, out = found.reductions
    assert [r.op for r in found.reductions] == ["max", "sum", "sum"] and found.num_message == 2
    assert (top.stage, total.stage, out.stage) == (0, 0, 1) and found.num_stages == 2
    assert total.leader == 0 and out.leader is None
    assert (top.sources, total.sources, out.sources) == ({"z"}, {"z"}, {"x", "z"})
    assert out.parents == {0, 1} and out.depth == 2 and not top.differentiable


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, m: torch.sub(x, m, alpha=0.5).exp(),
        lambda x, m: (x - m).mul(2).exp(),
        lambda x, m: (x - m).exp() * 2,
        lambda x, m: (m - x).exp(),
        lambda x, m: ((x * 2) - m).exp(),
        lambda x, m: (x - m).exp_().add_(1),
    ],
)
def test_sums_that_only_look_like_a_softmax_have_no_leader(graph, spoil):
    def message(i):
        top = largest(i.src["z"].detach(), i.index, i.num_dst).index_select(0, i.index)
        return spoil(i.src["z"], top)

    assert [r.leader for r in look(graph, message).reductions] == [None, None]


@pytest.mark.parametrize("base, leads", [(0.0, False), (float("-inf"), True)])
def test_a_maximum_that_counts_its_base_leads_only_from_minus_infinity(graph, base, leads):
    def message(i):
        start, index = i.src["z"].new_full((i.num_dst, 1), base), i.index.view(-1, 1)
        top = start.scatter_reduce(0, index, i.src["z"].detach(), "amax", include_self=True)
        return (i.src["z"] - top.index_select(0, i.index)).exp()

    assert look(graph, message).reductions[1].leader == (0 if leads else None)


def test_several_aggregators_take_one_stage(graph):
    def several(m, i, n):
        mean = add_up(m, i, n) / add_up(torch.ones_like(m[:, :1]), i, n).clamp(min=1)
        square = add_up(m * m, i, n)
        return torch.cat([mean, square - mean * mean, largest(m, i, n)], -1)

    found = look(graph, lambda i: F.relu(i.src["x"] - i.dst["x"]), several)
    assert [r.op for r in found.reductions] == ["sum", "sum", "sum", "max"] and found.num_stages == 1


def test_nested_reductions(graph):
    def message(i):
        x = i.src["x"]
        for _ in range(3):
            x = x - add_up(x, i.index, i.num_dst).index_select(0, i.index)
        return x

    found = look(graph, message)
    assert [r.stage for r in found.reductions] == [0, 1, 2, 3] == [r.depth for r in found.reductions]
    assert [sorted(r.parents) for r in found.reductions] == [[], [0], [0, 1], [0, 1, 2]]


def test_an_edge_result(graph):
    found = look(graph, lambda i: softmax(i.src["z"], i.index, i.num_dst).squeeze(-1), None)
    assert found.edge_output and found.edge_tail == () and found.edge_sources == {"z"} and found.edge_differentiable
    assert found.num_stages == 2 and found.edge_depth == 2


# Dependence


def stored(i):
    out = i.dst["x"] * 0
    out[:, :1] = i.src["z"]
    return out


def stored_in_view(i):
    out = torch.zeros_like(i.dst["x"])
    out.view(-1)[:: out.size(1)].copy_(i.src["z"].view(-1))
    return out


DEPENDENCE = {
    "view": (lambda i: i.src["z"].view(-1).unsqueeze(1), {"z"}),
    "stack": (lambda i: torch.stack([i.src["z"], i.dst["x"][:, :1]], 1).sum(1), {"z"}),
    "cat": (lambda i: torch.cat((i.dst["x"], i.src["z"]), -1), {"z"}),
    "split": (lambda i: i.src["x"].split(2, dim=1)[1], {"x"}),
    "written into": (stored, {"z"}),
    "written into a view": (stored_in_view, {"z"}),
    "neither": (lambda i: i.dst["x"] + i.edge["w"].view(-1, 1), set()),
    "shape only": (lambda i: i.dst["x"] + torch.zeros_like(i.src["x"]), set()),
    "both": (lambda i: i.src["x"] * i.src["z"], {"x", "z"}),
    "no gradient": (lambda i: (i.src["z"] > 0).to(i.dst["x"].dtype) * i.dst["x"], {"z"}),
    "detached": (lambda i: i.src["z"].detach() * i.dst["x"], {"z"}),
    "einsum": (lambda i: torch.einsum("ec,ed->ecd", i.src["x"], i.src["z"]), {"x", "z"}),
}


@pytest.mark.parametrize("what", DEPENDENCE)
def test_what_a_pass_has_to_fetch(graph, what):
    message, sources = DEPENDENCE[what]
    (reduction,) = look(graph, message).reductions
    assert reduction.sources == sources


def test_a_custom_function_may_depend_on_everything_but_never_on_less(graph):
    (reduction,) = look(graph, lambda i: function_of(i.src["z"])).reductions
    assert reduction.sources >= {"z"} and EVERYTHING == "*"


# Not silent


def test_state_outside_is_refused(graph):
    count = torch.zeros(4, dtype=torch.float64)

    def message(i):
        count.add_(i.src["x"].detach().sum(0))
        return i.src["x"]

    with pytest.raises(RefusedError, match="`add_` inside a message changes a tensor made outside it"):
        look(graph, message)
    assert bool(count.isfinite().all())


@pytest.mark.parametrize("read", [bool, float, int, lambda t: t.item(), lambda t: t.tolist(), lambda t: t.numpy()])
def test_values_are_not_read_into_python(graph, read):
    def message(i):
        read(i.src["x"].detach().max())
        return i.src["x"]

    with pytest.raises(RefusedError, match="inside a message takes values of a few edges or nodes out of torch"):
        look(graph, message)


def test_values_of_parameters_may_be(graph):
    epsilon = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    assert look(graph, lambda i: i.src["x"] * float(epsilon)).reductions[0].form == "general"


def test_random_numbers_are_noticed_and_given_back(graph):
    state = torch.random.get_rng_state()
    assert look(graph, lambda i: torch.randn_like(i.src["x"]) * i.src["x"]).random
    dropped = look(graph, lambda i: F.dropout(i.src["x"], 0.5))
    assert dropped.drops and not dropped.random
    plain = look(graph, lambda i: F.dropout(i.src["x"] * 2, 0.5, training=False))
    assert not plain.random and not plain.drops
    assert torch.equal(torch.random.get_rng_state(), state)


def test_random_numbers_of_another_thread_are_not_the_message_function_s(graph):
    """Ranks that are threads share torch's generator: one may be in a dropout while another looks at a layer."""

    def elsewhere(i):
        other = threading.Thread(target=lambda: torch.rand(100))
        other.start()
        other.join()
        return i.src["x"]

    state = torch.random.get_rng_state()
    assert not look(graph, elsewhere).random
    assert not torch.equal(torch.random.get_rng_state(), state), "what the other has drawn stays drawn"
    assert look(graph, lambda i: elsewhere(i) * torch.rand_like(i.src["x"])).random


def test_inference_mode(graph):
    with torch.inference_mode():
        found = look(graph, changed(lambda y, i: F.relu(y, inplace=True)))
    assert found.reductions[0].form == "general" and found.reductions[0].sources == {"h", "x", "z"}
