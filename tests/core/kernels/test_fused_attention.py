"""The loops that do an attention in closed form at once, against the steps in plain torch."""

import copy
from typing import NamedTuple

import pytest
import torch

from shardpass.core.kernels import ClosedScores, Outer, RowRun, ScoreGradients, SoftmaxState, cpu_loops, fused
from shardpass.core.kernels import attention as steps
from shardpass.core.kernels import scores as score_steps
from shardpass.core.ranks import dropout_factors
from shardpass.core.sharding import Block, Transposes, build_shards, cut
from shardpass.core.tracing import AdditiveScore, DotScore, MixedScore


@pytest.fixture(autouse=True)
def loops(request):
    """Those of numba, unless a test asks for Triton's kernels."""
    if "triton_dispatch" not in request.fixturenames:
        pytest.importorskip("numba")


FORMS = {
    "additive": AdditiveScore("a", "b", 0.2),
    "steep": AdditiveScore("a", "b", 1.5),
    "relu": AdditiveScore("a", "b", 0.0),
    "dot": DotScore("a", "b", 0.3),
    "mixed": MixedScore("a", "b", 0.2, 0),
}


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Size(NamedTuple):  # of a shard
    num_edges: int = 600
    num_dst: int = 40
    block_rows: int = 23
    device: str | torch.device = "cpu"


LARGE = Size()


def a_shard(size):
    """Rows of no edges, of a few, and hubs of more than the loops take at once, on both sides."""
    (num_edges, num_dst, block_rows, device), generator = size, torch.Generator().manual_seed(4)
    src = torch.randint(0, max(1, block_rows - 2), (num_edges,), generator=generator)
    dst = torch.randint(0, max(1, num_dst - 2), (num_edges,), generator=generator)
    dst[: num_edges // 4], src[num_edges // 4 : num_edges // 2] = min(7, num_dst - 1), min(5, block_rows - 1)
    return build_shards(src.to(device), dst.to(device), [Block(0, 0, block_rows)], num_dst).shards[0]


def runs(shard, most, transposed):
    indptr, columns, positions = shard.indptr, shard.src_rows, None
    if transposed:
        indptr, columns, positions = Transposes().of(shard, with_order=True)
    for chunk in cut(indptr, shard.num_edges, most):
        span = slice(chunk.start, chunk.stop)
        yield RowRun(indptr, chunk, columns[span], span if positions is None else positions[span])


class Case:
    def __init__(self, form, heads, width, dtype, drops, size=LARGE):
        self.form, self.shard, self.heads, self.width = form, a_shard(size), heads, width
        channels = 1 if isinstance(form, AdditiveScore) else width
        self.of_source = numbers(size.block_rows, heads, channels, seed=1, dtype=dtype)
        self.of_dst = numbers(size.num_dst, heads, channels, seed=2, dtype=dtype)
        if min(size.num_dst - 3, size.block_rows - 4) > 0:
            self.of_dst[3] = -self.of_source[4]  # sums of exactly 0
        self.mix = numbers(heads, width, seed=3, dtype=dtype) if isinstance(form, MixedScore) else None
        self.values = numbers(size.block_rows, heads, width, seed=4, dtype=dtype)
        self.grad = numbers(size.num_dst, heads, width, seed=5, dtype=dtype)
        self.factors = dropout_factors(3, torch.arange(self.shard.num_edges), heads, 0.4, dtype) if drops else None
        for name, tensor in vars(self).copy().items():
            if isinstance(tensor, torch.Tensor):
                setattr(self, name, tensor.to(size.device))

    def double(self):
        """The same numbers, exactly, in float64."""
        found = copy.copy(self)
        for name, tensor in vars(self).items():
            if isinstance(tensor, torch.Tensor):
                setattr(found, name, tensor.double())
        return found

    def kept(self, run):
        return None if self.factors is None else self.factors[run.positions]

    def scored(self, run):
        return ClosedScores(self.form, self.of_source, self.of_dst, self.mix, self.kept(run))

    def forward(self, is_fused, most):
        state = SoftmaxState.fresh(self.shard.num_dst, self.heads, self.width, self.values)
        for run in runs(self.shard, most, False):
            if is_fused:
                fused.accumulate(state, run, self.scored(run), self.values)
            else:
                edges = run.by_destination()
                found = score_steps.edge_scores(edges, self.scored(run))
                steps.accumulate(state, edges, found, self.values, self.kept(run))
        return state

    def backward(self, is_fused, most, log_sum, delta):
        """Gradients of values, source, destination and mix."""
        grad_values, outer = torch.zeros_like(self.values), Outer(self.grad, delta, log_sum)
        given = self.of_source, self.of_dst, self.mix
        into, twice = ScoreGradients(*(None if t is None else torch.zeros_like(t) for t in given)), False
        for run in runs(self.shard, most, True):
            of = self.scored(run)
            if is_fused:
                twice |= fused.adjoint(run, of, self.values, outer, grad_values, into)
                continue
            edges = run.by_source()
            weights = steps.softmax_weights(edges, score_steps.edge_scores(edges, of), log_sum)
            relative = steps.adjoint(edges, weights, self.values, of.kept, outer, grad_values)
            score_steps.edge_scores_adjoint(edges, of, weights, relative, into)
        for run in runs(self.shard, most, False) if twice else ():
            fused.adjoint_of_dst(run, self.scored(run), self.values, outer, into.of_dst)
        return [t for t in (grad_values, *into) if t is not None]


def check(case, most, bound, monkeypatch, threads=1):
    exact, dtype = case.double(), case.values.dtype
    with monkeypatch.context() as patch:
        patch.setattr(steps, "numba_loops_for", lambda rows: None)
        patch.setattr(fused, "numba_loops_for", lambda rows: None)
        patch.setattr(steps, "triton_for", lambda *given: None)
        right = exact.forward(False, 1000)
        log_sum = (right.top + right.total.log()).to(dtype)
        delta = (exact.grad * right.out / right.total.clamp(min=1e-30).unsqueeze(-1)).sum(-1).to(dtype)
        right_gradients = exact.backward(False, 1000, log_sum.double(), delta.double())
    monkeypatch.setattr(cpu_loops, "_num_threads", lambda num_edges: threads)
    found = case.forward(True, most), case.backward(True, most, log_sum, delta)
    for mine, theirs in zip((*found[0], *found[1]), (*right, *right_gradients)):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("heads, width", [(1, 3), (3, 5), (4, 32)])
@pytest.mark.parametrize("name", FORMS)
def test_at_once_equals_in_steps(name, heads, width, monkeypatch):
    drops = (heads + [*FORMS].index(name)) % 2 == 0
    check(Case(FORMS[name], heads, width, torch.float64, drops), 10_000, 1e-11, monkeypatch)


@pytest.mark.parametrize("most", [1, 50])
@pytest.mark.parametrize("name", ["additive", "mixed"])
def test_edges_in_chunks(name, most, monkeypatch):
    check(Case(FORMS[name], 2, 4, torch.float64, True), most, 1e-11, monkeypatch)


@pytest.mark.parametrize("name", FORMS)
def test_single_precision(name, monkeypatch):
    check(Case(FORMS[name], 4, 32, torch.float32, False), 10_000, 2e-4, monkeypatch)


@pytest.mark.parametrize("name", FORMS)
def test_threads_have_sums_of_their_own(name, monkeypatch):
    case = Case(FORMS[name], 2, 4, torch.float64, False)
    for run in runs(case.shard, 10_000, True):
        assert len(cpu_loops.cut_rows(run, 1)) == 1
    check(case, 10_000, 1e-11, monkeypatch, threads=3)


def test_other_dtypes_go_in_steps():
    single, double = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)
    assert fused.handles(FORMS["dot"], single, single, None) and fused.handles(FORMS["dot"], double)
    assert not fused.handles(FORMS["dot"], single, double) and not fused.handles(FORMS["dot"], single.bfloat16())
    assert not fused.handles(FORMS["dot"], torch.ones(2, 2, device="meta"))


def test_half_precision_is_summed_in_single_precision():
    case = Case(FORMS["mixed"], 2, 4, torch.bfloat16, True, Size(200, 5, 9))
    for mine, right in zip(case.forward(True, 50), case.double().forward(False, 1000)):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), right, rtol=0.03, atol=0.03)  # scores are rounded


def test_exponential_of_the_loops():
    from shardpass.core.kernels.numba_exp import exp32

    for x in [*torch.linspace(-86.9, 88, 1000).tolist(), 0.0]:
        x = torch.tensor(x, dtype=torch.float32)
        found = torch.tensor(float(exp32(x.numpy()[()])), dtype=torch.float64)
        torch.testing.assert_close(found, x.double().exp(), rtol=1.5 * 2**-23, atol=0)
    assert float(exp32(torch.tensor(float("-inf")).numpy()[()])) == 0
    assert torch.tensor(float("nan")).numpy()[()] != exp32(torch.tensor(float("nan")).numpy()[()])


def infinite_scores(dtype, size):
    case = Case(FORMS["additive"], 2, 4, dtype, False, size)
    case.of_dst[1], case.of_source[2], case.of_dst[4] = float("-inf"), float("-inf"), float("nan")
    state = case.forward(True, 10_000)
    has_edges = case.shard.degrees() > 0
    assert has_edges[[1, 4]].all()
    assert (state.top[1] == float("-inf")).all() and (state.total[1] == 0).all() and (state.out[1] == 0).all()
    assert state.total[4].isnan().all() and state.out[4].isnan().all()
    others = torch.tensor([row for row in range(size.num_dst - 2) if row not in (1, 4)])
    hidden = Case(FORMS["additive"], 2, 4, dtype, False, size)
    hidden.of_source[2] = -1e30
    right = hidden.forward(True, 10_000)
    torch.testing.assert_close(state.out[others], right.out[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_infinite_and_undefined_scores(dtype):
    infinite_scores(dtype, LARGE)


# ---- Triton's kernels, on a GPU or interpreted: few edges, since the interpreter takes a millisecond for each row


@pytest.mark.parametrize(
    "heads, width, drops, most, names",
    [
        (2, 5, True, 100, "additive dot mixed"),
        (1, 3, False, 10_000, "steep relu"),
    ],
)
def test_triton_equals_in_steps(triton_device, heads, width, drops, most, names, monkeypatch):
    """In chunks, and with slopes that test_triton_matrix.py has not."""
    for name in names.split():
        case = Case(FORMS[name], heads, width, torch.float64, drops, Size(160, 12, 9, triton_device))
        check(case, most, 1e-11, monkeypatch)


@pytest.mark.parametrize("name", ["additive", "mixed"])
def test_programs_of_triton_may_run_in_any_order(any_order, name):
    """Each number has one program that writes it, so every order of programs gives the same bits."""
    case, found = Case(FORMS[name], 2, 3, torch.float32, True, Size(160, 12, 9, any_order.device)), []
    for turn in range(2):
        with any_order.turned(turn):
            state = case.forward(True, 100)
            found.append([*state, *case.backward(True, 100, state.top + state.total.log(), state.total)])
    assert all(map(torch.equal, *found))


def test_infinite_and_undefined_scores_on_triton(triton_device):
    infinite_scores(torch.float64, Size(160, 12, 9, triton_device))


def test_dtypes_of_triton(triton_dispatch):
    single = torch.ones(2, 2, device=triton_dispatch)
    assert (
        fused.handles(FORMS["dot"], single, single, None)
        and fused.handles(FORMS["dot"], single.bfloat16())
        and fused.handles(FORMS["dot"], single.double())
    )
    assert not fused.handles(FORMS["dot"], single, single.double()) and not fused.handles(FORMS["dot"], single.long())
