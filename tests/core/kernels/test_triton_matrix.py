"""Every kernel of Triton in every dtype on every awkward shape, forward and backward, against plain torch in float64.

The interpreter runs them, or a GPU where there is one. Numbers of heads and of channels vary together, not each with
each. By default each kernel and dtype meets one of the shapes, in turn; `long` has them all.
"""

from itertools import product
from typing import NamedTuple

import pytest
import torch

from shardpass.core import kernels
from shardpass.core.kernels import ClosedScores, Outer, RowRun, ScoreGradients, SoftmaxState, fused
from shardpass.core.ranks import dropout_factors
from shardpass.core.sharding import Block, Chunk, Shard, Transposes, build_shards
from shardpass.core.tracing import REDUCERS, AdditiveScore, Base, DotScore, MixedScore
from shardpass.errors import RefusedError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
FEW = 16  # terms of a sum in float32 that may each be off by a last bit, beyond their number's square root


class Size(NamedTuple):
    edges: int
    num_dst: int
    rows: int  # of the block
    heads: int
    width: int  # channels of a head


SIZES = [
    Size(0, 0, 0, 2, 4),
    Size(0, 5, 4, 8, 1),
    Size(1, 1, 1, 1, 1),
    Size(7, 1, 3, 8, 2),
    Size(12, 3, 4, 2, 0),
    Size(70, 4, 3, 5, 3),  # more edges in a row than a tile holds
    Size(9, 3, 4, 6, 16),
    Size(9, 3, 4, 7, 17),
    Size(40, 3, 1, 3, 64),
    Size(9, 3, 4, 2, 100),
    Size(9, 3, 4, 4, 128),
    Size(9, 3, 4, 1, 129),
    Size(9, 3, 4, 2, 256),
    Size(9, 3, 4, 1, 257),
]
HUB = Size(120_000, 2, 2, 1, 3)  # 100,000 edges of one row, on both sides


class Case:
    """A shard, and random tensors of its rows and edges."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32  # of sums, of half precision as well
        self.generator = torch.Generator().manual_seed(0)
        ends = [torch.randint(0, max(1, n), (size.edges,), generator=self.generator) for n in (size.rows, size.num_dst)]
        for end in ends:
            end[: size.edges * 2 // 3] = 0  # a hub on both sides
        self.shard = build_shards(*(e.to(device) for e in ends), [Block(0, 0, size.rows)], size.num_dst).shards[0]
        self.src, self.dst = self.shard.src_rows.long(), self.shard.dst_rows()
        self.transposes = Transposes()

    def numbers(self, *shape: int, gaps: bool = False) -> torch.Tensor:
        """Random numbers of the dtype, with `gaps` between them in memory or without."""
        scale = 0.1 if self.size == HUB else 1.0  # the sums of a hub stay finite in float16
        found = (scale * torch.randn(shape, generator=self.generator)).to(self.device, self.dtype)
        return torch.stack([found, found], -1)[..., 0] if gaps else found

    def row_tensor(self, num_rows: int, channels: int | None = None, gaps: bool = False) -> torch.Tensor:
        """`numbers` for each row, head and channel."""
        return self.numbers(num_rows, self.size.heads, self.size.width if channels is None else channels, gaps=gaps)

    def runs(self) -> tuple[RowRun, RowRun]:
        """All edges by destination, and by source."""
        shard, size = self.shard, self.size
        indptr, columns, positions = self.transposes.of(shard, with_order=True)
        whole = Chunk(0, size.edges, 0, size.num_dst), Chunk(0, size.edges, 0, size.rows)
        forward = RowRun(shard.indptr, whole[0], shard.src_rows, slice(0, size.edges))
        return forward, RowRun(indptr, whole[1], columns, positions)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().clone().requires_grad_()


def added(to: torch.Tensor, index: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    return torch.zeros(to.shape, dtype=torch.float64, device=to.device).index_add_(0, index, terms)


def close(found: torch.Tensor, right: torch.Tensor, terms: int, large: float = 1.0) -> None:
    """As near as a sum of so many terms, as `large` as given, is that is rounded once to a dtype.

    Terms are added in float32, those of float64 in float64.
    """
    dtype = found.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # the interpreter cuts off what bfloat16 does not hold, a GPU rounds
    once = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2) if dtype.itemsize == 2 else 0
    large = max(large, float(right.detach().abs().max())) if right.numel() else large
    single = torch.finfo(wide).eps * (FEW + terms**0.5)
    assert found.shape == right.shape
    torch.testing.assert_close(found.double(), right.detach(), rtol=once + single, atol=single * large)


def sums(case: Case, weights: str, gaps: bool) -> None:
    """Forward, transposed and dot products, into the accumulator's dtype and into that of the rows."""
    size, shard = case.size, case.shard
    tail = (size.heads, size.width) if weights == "heads" else (size.width,)
    x, grad = case.numbers(size.rows, *tail, gaps=gaps), case.numbers(size.num_dst, *tail, gaps=gaps)
    shape = {"none": None, "one": (size.edges,), "heads": (size.edges, size.heads)}[weights]
    weight = None if shape is None else case.numbers(*shape, gaps=gaps)
    factor = 1 if weight is None else weight.double().unsqueeze(-1)
    there, back = x.double()[case.src] * factor, grad.double()[case.dst] * factor
    for dtype, fresh in ((case.wide, True), (case.dtype, False)):
        for like, index, terms, given in ((grad, case.dst, there, x), (x, case.src, back, grad)):
            old = torch.full(like.shape, float("nan") if fresh else 0.5, device=case.device, dtype=dtype)
            right = added(like, index, terms) + (0 if fresh else 0.5)
            if like is grad:
                kernels.gather_sum(old, shard, given, weight, fresh)
            else:
                kernels.gather_sum_transposed(old, shard, case.transposes, given, weight, fresh)
            close(old, right, size.edges)
    if weight is not None and size.edges:
        heads = 1 if weight.dim() == 1 else size.heads
        right = (x.double()[case.src] * grad.double()[case.dst]).sum(-1)
        close(kernels.edge_dot(shard, x, grad, 1 << 20, heads).view_as(right), right, size.width)


def extrema(case: Case, op: str, gaps: bool) -> None:
    """Max or min with ties, and the gradient, which ties share."""
    size, reducer = case.size, REDUCERS[op]
    rows = case.numbers(size.rows, size.width, gaps=gaps).round()
    found, right = (reducer.init(size.num_dst, rows.shape[1:], rows) for _ in range(2))
    kernels.gather_extremum(op, found, case.shard, rows)
    reducer.accumulate(right, rows[case.src], case.dst)
    assert all(map(torch.equal, found, right))
    value, share = reducer.value(found, Base()), case.numbers(size.num_dst, size.width, gaps=gaps)
    share /= max(1, size.edges) ** 0.5  # many ties of float16 stay finite
    into = torch.full(rows.shape, 0.5, device=case.device, dtype=case.dtype)
    kernels.gather_extremum_transposed(into, case.shard, case.transposes, rows, value, share)
    won = (rows[case.src] == value[case.dst]) * share.double()[case.dst]
    close(into, added(rows, case.src, won) + 0.5, size.edges)


def attended(case: Case, scores: torch.Tensor, values: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Softmax-weighted sums in float64."""
    size = case.size
    top = torch.full((size.num_dst, size.heads), float("-inf"), dtype=torch.float64, device=case.device)
    top = top.scatter_reduce(0, case.dst.view(-1, 1).expand_as(scores), scores.detach(), "amax")
    weights = (scores - top[case.dst]).exp()
    total = added(top, case.dst, weights)
    weights = weights / total[case.dst] * (1 if factors is None else factors.double())
    shape = torch.empty((size.num_dst, *values.shape[1:]), device=case.device)
    return added(shape, case.dst, weights.unsqueeze(-1) * values[case.src])


def outer_of(case: Case, state: SoftmaxState, grad: torch.Tensor) -> tuple[torch.Tensor, Outer]:
    """The output, and what backward is given, from what forward kept."""
    assert state.out.dtype == case.wide
    out = state.out / state.total.masked_fill(state.total == 0, 1).unsqueeze(-1)
    return out, Outer(grad, (grad.to(case.wide) * out).sum(-1), state.top + state.total.log())


def closed_attention(case: Case, name: str, gaps: bool) -> None:
    """Scores in closed form: GAT, GATv2 with shared weights (one tensor scored and summed) and not, dot products."""
    size, (by_dst, by_src) = case.size, case.runs()
    channels = 1 if name == "GAT" else size.width
    scale = max(1, channels) ** -0.5
    form = {"GAT": AdditiveScore("a", "b", 0.2), "dot": DotScore("a", "b", scale)}.get(
        name, MixedScore("a", "b", 0.2, 0)
    )
    values = case.row_tensor(size.rows, gaps=gaps)
    of_source = values if name == "GATv2 shared" else case.row_tensor(size.rows, channels)
    of_dst, grad = case.row_tensor(size.num_dst, channels, gaps), case.row_tensor(size.num_dst)
    mix = case.numbers(size.heads, channels) * scale if name.startswith("GATv2") else None
    factors = dropout_factors(3, torch.arange(size.edges), size.heads, 0.4, case.dtype).to(case.device)
    factors = factors if size.heads % 2 else None

    def of(run: RowRun) -> ClosedScores:
        kept = None if factors is None else factors[run.known_positions()]
        return ClosedScores(form, of_source, of_dst, mix, kept)

    state = SoftmaxState.fresh(size.num_dst, size.heads, size.width, values)
    fused.accumulate(state, by_dst, of(by_dst), values)
    out, outer = outer_of(case, state, grad)
    to_values = torch.zeros_like(values, memory_format=torch.contiguous_format)
    given = of_source, of_dst, mix
    into = [None if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format) for t in given]
    into[0] = to_values if of_source is values else into[0]
    if fused.adjoint(by_src, of(by_src), values, outer, to_values, ScoreGradients(*into)):
        fused.adjoint_of_dst(by_dst, of(by_dst), values, outer, into[1])

    leaves = leaf(values), leaf(of_source), leaf(of_dst), *([] if mix is None else [leaf(mix)])
    left, right = leaves[1][case.src], leaves[2][case.dst]
    slanted = torch.nn.functional.leaky_relu(left + right, 0.2)
    scores = slanted if name == "GAT" else left * right * scale if name == "dot" else slanted * leaves[3]
    exact = attended(case, scores.sum(-1), leaves[0], factors)
    close(out, exact, size.edges + channels)
    gradients = list(torch.autograd.grad(exact, leaves, grad.double()))
    if of_source is values:
        gradients[0] = gradients[1] = gradients[0] + gradients[1]
    for mine, theirs in zip([to_values, *into], gradients):
        close(mine, theirs, size.edges + channels, large=2 * (1 + size.width) ** 0.5)  # as the dot products are


def given_attention(case: Case, name: str, gaps: bool) -> None:
    """Scores that the message function computed."""
    size, (by_dst, by_src) = case.size, (run for run in case.runs())
    values, grad = case.row_tensor(size.rows, gaps=gaps), case.row_tensor(size.num_dst, gaps=gaps)
    scores = case.numbers(size.edges, size.heads, gaps=gaps)
    factors = dropout_factors(3, torch.arange(size.edges), size.heads, 0.4, case.dtype).to(case.device)
    order = by_src.known_positions()
    state = SoftmaxState.fresh(size.num_dst, size.heads, size.width, values)
    kernels.accumulate(state, by_dst.by_destination(), scores.clone(), values, factors)
    out, outer = outer_of(case, state, grad)
    weights = (scores.double() - outer.log_sum.double()[case.dst]).exp().to(case.dtype)
    to_values = torch.zeros_like(values, memory_format=torch.contiguous_format)
    relative = kernels.adjoint(by_src.by_source(), weights[order], values, factors[order], outer, to_values)

    exact = attended(case, scores.double(), values.double(), factors)
    close(out, exact, size.edges)
    arrived, kept = grad.double()[case.dst], factors.double()
    used = (weights.double() * kept).unsqueeze(-1)
    close(to_values, added(values, case.src, used * arrived), size.edges)
    dots = (arrived * values.double()[case.src]).sum(-1) * kept - outer.delta.double()[case.dst]
    close(relative, dots[order], size.width)


KERNELS = {
    "sum": (sums, "none"),
    "weighted sum": (sums, "one"),
    "weighted sum per head": (sums, "heads"),
    "max": (extrema, "max"),
    "min": (extrema, "min"),
    "GAT": (closed_attention, "GAT"),
    "GATv2": (closed_attention, "GATv2"),
    "GATv2 shared": (closed_attention, "GATv2 shared"),
    "dot": (closed_attention, "dot"),
    "scores given": (given_attention, ""),
}
PAIRS = list(product(KERNELS, DTYPES))


def check(name: str, size: Size, dtype: torch.dtype, device: torch.device, gaps: bool = False) -> None:
    work, kind = KERNELS[name]
    work(Case(size, dtype, device), kind, gaps)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda n: "-".join(map(str, PAIRS[n])))
def test_in_turn(triton_device, number):
    name, dtype = PAIRS[number]
    sizes = SIZES[number % len(SIZES) :]
    filled = next(size for size in sizes if size.edges * size.width)
    for size in dict.fromkeys((sizes[0], filled)):  # no kernel may run for one that is empty
        check(name, size, dtype, triton_device, gaps=number % 4 == 0)


@pytest.mark.long
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("name, dtype", PAIRS, ids=str)
def test_all(triton_device, name, dtype, gaps):
    for size in SIZES:
        check(name, size, dtype, triton_device, gaps)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, dtype", list(zip(KERNELS, DTYPES * len(KERNELS))), ids=str)
def test_a_hub(triton_device, name, dtype):
    """Each kernel in one of the dtypes: the interpreter takes a minute."""
    check(name, HUB, dtype, triton_device)


def test_wide_weights_of_narrow_rows_are_not_rounded(triton_device):
    """As under autocast: rows in bfloat16, weights in float32."""
    case = Case(Size(40, 3, 4, 2, 5), torch.bfloat16, triton_device)
    rows, weight = case.row_tensor(4), torch.rand(40, 2, generator=case.generator).to(triton_device)
    out = torch.empty(3, 2, 5, device=triton_device)
    kernels.gather_sum(out, case.shard, rows, weight, fresh=True)
    close(out, added(out, case.dst, rows.double()[case.src] * weight.double().unsqueeze(-1)), 40)


def test_offsets_beyond_32_bits(triton_device):
    """The last rows of tables of more than 2**31 numbers, whose other pages are never touched."""
    count, width = 2**24 + 2, 128
    table = torch.empty(count, width, dtype=torch.bfloat16, device=triton_device)
    last, shard = count - 1, build_shards(torch.tensor([0]), torch.tensor([0]), [Block(0, 0, 1)], 1).shards[0]
    shard = Shard(
        Block(0, 0, count), shard.indptr.to(table.device), torch.tensor([last], device=table.device), shard.rows
    )
    table[last], one = torch.arange(width), torch.ones(1, width, dtype=table.dtype, device=table.device)
    row, out = table[last].double(), torch.empty_like(one)
    kernels.gather_sum(out, shard, table, None, fresh=True)
    assert torch.equal(out[0].double(), row)
    assert kernels.edge_dot(shard, table, one, 1).item() == row.sum().bfloat16()
    best = REDUCERS["max"].init(1, (width,), one)
    kernels.gather_extremum("max", best, shard, table)
    assert torch.equal(best[0][0].double(), row)

    table, ones = table.view(count, 1, width), one.view(1, 1, width)
    indptr = torch.zeros(count + 1, dtype=torch.int32, device=table.device)
    indptr[-1], empty = 1, torch.zeros(count, 1, dtype=torch.bfloat16, device=table.device)
    here = RowRun(indptr, Chunk(0, 1, last, count), torch.zeros(1, dtype=torch.int32, device=table.device), None)
    of = ClosedScores(DotScore("a", "b", 1e-4), ones, table, None, None)
    sums = torch.empty_like(table)
    sums[last] = 0
    fused.accumulate(SoftmaxState(empty - torch.inf, empty, sums), here, of, ones)  # destinations far away
    assert torch.equal(sums[last], ones[0])
    sums[last] = 0
    into = ScoreGradients(sums, torch.zeros_like(ones), None)
    known = Outer(ones, empty[:1], empty[:1] + 1e-4 * row.sum())
    fused.adjoint(here, ClosedScores(of.form, table, ones, None, None), table, known, sums, into)  # sources far away
    assert torch.allclose(sums[last].double(), 1 + 1e-4 * row.sum(), rtol=2**-7)


@pytest.mark.parametrize("rows, heads, width", [(1, 2**16, 1), (1, 1, 2**19)])
def test_what_cannot_be_launched_is_refused(triton_dispatch, rows, heads, width):
    values = torch.ones(1, 1, 1, device=triton_dispatch).expand(rows, heads, width)
    run = RowRun(torch.tensor([0, 1]), Chunk(0, 1, 0, 1), torch.zeros(1, dtype=torch.int64), None)
    state = SoftmaxState.fresh(rows, heads, width, values)
    with pytest.raises(RefusedError, match="SHARDPASS_TRITON=0"):
        fused.accumulate(state, run, ClosedScores(DotScore("a", "b", 1.0), values, values, None, None), values)
