"""The table of operations agrees with a trial by values on many numbers of rows."""

import pytest
import torch
import torch.nn.functional as F

from shardpass.core.following import FollowFunctions, FollowRows
from shardpass.core.following.table import RULES, is_pointwise
from shardpass.core.ranks import RowSet, torch_private
from shardpass.errors import RefusedError

OPERATIONS = {
    "relu": torch.relu,
    "softmax of channels": lambda h: h.softmax(1),
    "softmax of rows": lambda h: h.softmax(0),
    "roll": lambda h: h.roll(28, 0),
    "roll of channels": lambda h: h.roll(3, 1),
    "triu": lambda h: h.triu(-20),
    "tril of the transposed": lambda h: h.t().tril(20).t(),
    "renorm by columns": lambda h: h.renorm(2, 1, 6.0),
    "renorm by rows": lambda h: h.renorm(2, 0, 1.0),
    "a dilated convolution": lambda h: F.conv1d(h.t()[None], torch.ones(8, 1, 3), None, 1, 90, 90, 8)[0].t(),
    "a convolution of channels": lambda h: F.conv1d(h[:, None], torch.ones(1, 1, 3), padding=1)[:, 0],
    "pooling over rows": lambda h: F.avg_pool1d(h.t()[None], 199, 1, 99)[0].t(),
    "pooling over channels": lambda h: F.avg_pool1d(h[:, None], 3, 1, 1)[:, 0],
    "cumsum": lambda h: h.cumsum(0),
    "cummax": lambda h: h.cummax(0).values,
    "logcumsumexp of channels": lambda h: h.logcumsumexp(1),
    "sort": lambda h: h.sort(0).values,
    "flip": lambda h: h.flip(0),
    "fft": lambda h: torch.fft.fft(h, dim=0).real,
    "fft of channels": lambda h: torch.fft.fft(h, dim=1).real,
    "layer_norm": lambda h: F.layer_norm(h, (8,)),
    "group_norm": lambda h: F.group_norm(h, 2),
    "instance_norm": lambda h: F.instance_norm(h.view(-1, 2, 4)).flatten(1),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "product with the transposed": lambda h: h @ (h.t() @ h),
    "cdist": lambda h: torch.cdist(h, torch.ones(3, 8)).repeat(1, 3)[:, :8],
    "cdist of rows": lambda h: h * torch.cdist(h, h).sum(1, keepdim=True),
    "linalg": lambda h: torch.linalg.inv(h.view(-1, 2, 2) + 9 * torch.eye(2)).reshape(-1, 8),
    "glu": lambda h: F.glu(h).repeat(1, 2),
    "elu": F.elu,
    "trapezoid": lambda h: h * torch.trapezoid(h, dim=1)[:, None],
    "diff": lambda h: F.pad(h.diff(dim=0), (0, 0, 0, 1)),
    "logit": lambda h: torch.logit(h.sigmoid()),
    "pixel_shuffle": lambda h: F.pixel_shuffle(h.view(-1, 8, 1, 1), 2).flatten(1),
    "lstm": lambda h: torch.nn.LSTM(4, 4, batch_first=True)(h.view(-1, 2, 4))[0].flatten(1),
    "addmm": lambda h: torch.addmm(torch.ones(8), h, torch.ones(8, 8)),
    "unfold": lambda h: h.unfold(1, 4, 4).sum(2).repeat(1, 4),
    "unfold of rows": lambda h: h * F.pad(h.unfold(0, 2, 1).sum(2), (0, 0, 0, 1)),
}


def verdict(operation, rows):
    of = RowSet("nodes", len(rows), ("nodes", ""))
    follower = FollowRows()
    follower.mark(rows, of)
    with follower, FollowFunctions(follower):
        out = operation(rows)
    follower.marks.check_result(out)
    found = follower.marks.rows.get(out)
    return found is not None and found.dim == 0


def stays(operation):
    """Whether some rows on their own get what they get among all, for many numbers of rows."""
    for count in (*range(2, 60), 301):
        torch.manual_seed(count)
        rows = 4 * torch.randn(count, 8, dtype=torch.float32)
        some = torch.randperm(count)[: max(1, count // 2)]
        state = torch.get_rng_state()
        whole = operation(rows)
        torch.set_rng_state(state)
        try:
            part = operation(rows[some])
        except (RuntimeError, IndexError, ValueError):
            return False
        if part.shape != whole[some].shape or not torch.allclose(whole[some], part, atol=1e-4, equal_nan=True):
            return False
    return True


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_table_agrees_with_a_trial_by_values(name):
    try:
        found = verdict(OPERATIONS[name], torch.randn(40, 8))
    except RefusedError:
        found = False
    assert found == stays(OPERATIONS[name])


SUMS = {
    "h.sum(0)": True,
    "h.t() @ h": True,
    "h.sum(0) / 3 - h.square().sum(0)": True,
    "torch.zeros(5).index_add(0, y, h[:, 0])": True,
    "torch.zeros(5).scatter_add(0, y, h[:, 0])": True,
    "F.mse_loss(h, h * 2, reduction='sum')": True,
    "(h > 0).sum(0).float() * 2": True,
    "h.mean(0)": False,
    "h.sum(0) + 1": False,
    "h.sum(0) * h.sum(0)": False,
    "h.sum(0).relu()": False,
    "h.sum(0).to(torch.int64)": False,
    "h.sum(0) * torch.rand(8)": False,
    "torch.ones(5).index_add(0, y, h[:, 0])": False,
    "torch.zeros(5).index_add(0, y, torch.linspace(0, 1, 100)[: h.size(0)])": False,
    "torch.zeros(5).scatter_add(0, y, torch.linspace(0, 1, 100)[: h.size(0)])": False,
    "torch.addmm(torch.ones(8, 8), h.t(), h)": False,
    "torch.ops.aten.copy(h.sum(0), torch.ones(8))": False,
}


@pytest.mark.parametrize("program", SUMS)
def test_what_ranks_may_add_up(program):
    of = RowSet("nodes", 40, ("nodes", ""))
    follower = FollowRows()
    follower.draws = None
    follower.marks.known = [of]
    given = {"h": torch.randn(40, 8), "y": torch.randint(5, (40,))}
    follower.marks.recognise(given)
    try:
        with follower, FollowFunctions(follower):
            found = follower.is_sum(eval(program, globals() | given))
    except RefusedError:
        found = False
    assert found == SUMS[program]


@pytest.mark.long  # it looks up every operation that torch has
def test_most_operations_have_a_verdict(capsys):
    counts = {"pointwise": 0, "a rule": 0, "a decomposition": 0, "refused by name": 0}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            try:
                func = getattr(packet, overload)
                has_tag = is_pointwise(func)
                known = torch_private.decomposition_of(func) is not None
            except RuntimeError:  # of TorchScript alone
                continue
            other = "a decomposition" if known else "refused by name"
            counts["pointwise" if has_tag else "a rule" if name in RULES else other] += 1
    with capsys.disabled():
        print(counts)
    assert counts["pointwise"] > 500
    assert counts["a rule"] > 200
