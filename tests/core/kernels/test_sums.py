"""The fused kernels against the definition of right."""

import pytest
import torch

from shardpass.core import kernels
from shardpass.core.kernels import cpu, reference
from shardpass.core.sharding import Block, Shard, Transposes, build_shards

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TAILS = [(1,), (3,), (16,), (100,), (2, 3), (4, 1)]
NUM_DST, BLOCK_ROWS = 2100, 37  # more destinations than the kernel's run of 1024


def random_shard(num_edges=500, num_dst=NUM_DST, seed=0):
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(5, 5 + BLOCK_ROWS, (num_edges,), generator=generator)
    dst = torch.randint(0, num_dst, (num_edges,), generator=generator)
    dst[: num_edges // 5] = 3  # a hub
    blocks = [Block(1, 0, 5), Block(0, 5, 5 + BLOCK_ROWS)]
    return build_shards(src, dst, blocks, num_dst).shards


def numbers(shape, dtype, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(shard, weight, transposed=False):
    """The shard as a matrix ``[num_dst, block rows]``, float64."""
    matrix = torch.zeros(shard.num_dst, shard.block.num_rows, dtype=torch.float64)
    values = torch.ones(shard.num_edges, dtype=torch.float64) if weight is None else weight.double()
    matrix.index_put_((shard.dst_rows(), shard.src_rows.long()), values, accumulate=True)
    return matrix.t() if transposed else matrix


def bound(dtype):
    return {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}[dtype]


@pytest.mark.parametrize("tail", TAILS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_sum(dtype, tail):
    shard = random_shard()[1]
    is_weighted = (DTYPES.index(dtype) + TAILS.index(tail)) % 2
    weight = numbers((shard.num_edges,), dtype, 2) if is_weighted else None
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for transposed in (False, True):
        count, into = (NUM_DST, BLOCK_ROWS) if transposed else (BLOCK_ROWS, NUM_DST)
        name, turned = ("gather_sum_transposed", [Transposes()]) if transposed else ("gather_sum", [])
        rows, start = numbers((count, *tail), dtype), numbers((into, *tail), wide, 3)
        matrix = dense(shard, weight, transposed)
        right = start.double() + (matrix @ rows.double().flatten(1)).view(into, *tail)
        assert cpu.handles(rows)
        for module in (kernels, cpu, reference):
            out = start.clone()
            getattr(module, name)(out, shard, *turned, rows, weight)
            torch.testing.assert_close(out.double(), right, rtol=bound(dtype), atol=bound(dtype))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_wide_rows_with_few_edges_are_added_straight(dtype, fresh, monkeypatch):
    """The loop for the blocks of many ranks, in one thread and in two."""
    shard, rows = random_shard(40_000, 5000)[1], numbers((BLOCK_ROWS, 130), dtype)
    start, threads = numbers((5000, 130), dtype, 3), torch.get_num_threads()
    right = start.clone()
    reference.gather_sum(right, shard, rows, None, fresh)
    monkeypatch.setattr(torch.nn.functional, "embedding_bag", None)
    for count in (1, 2):
        torch.set_num_threads(count)
        out = start.clone()
        try:
            kernels.gather_sum(out, shard, rows, None, fresh)
        finally:
            torch.set_num_threads(threads)
        torch.testing.assert_close(out, right)


@pytest.mark.parametrize("module", [kernels, cpu, reference], ids=lambda m: m.__name__.rpartition(".")[2])
@pytest.mark.parametrize("layout", ["transposed", "strided", "slice"])
def test_rows_need_not_be_contiguous(module, layout):
    shard = random_shard(200, 50)[1]
    base = numbers((BLOCK_ROWS, 6), torch.float32)
    if layout == "transposed":
        rows = base.t().contiguous().t()
    elif layout == "strided":
        rows = numbers((BLOCK_ROWS * 2, 6), torch.float32)[::2]
    else:
        rows = numbers((BLOCK_ROWS, 9), torch.float32)[:, 2:8]
    weight = numbers((shard.num_edges * 2,), torch.float32, 2)[::2]
    out = torch.zeros(50, 6)
    module.gather_sum(out, shard, rows, weight)
    right = dense(shard, weight) @ rows.double()
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bool, torch.int64], ids=str)
def test_weights_of_another_dtype(weight_dtype):
    shard = random_shard(200, 50)[1]
    weight = (numbers((shard.num_edges,), torch.float64, 2) * 2).to(weight_dtype)
    rows, grad = numbers((BLOCK_ROWS, 4), torch.float64), numbers((50, 4), torch.float64)
    out, back = torch.zeros(50, 4, dtype=torch.float64), torch.zeros(BLOCK_ROWS, 4, dtype=torch.float64)
    kernels.gather_sum(out, shard, rows, weight)
    kernels.gather_sum_transposed(back, shard, Transposes(), grad, weight)
    torch.testing.assert_close(out, dense(shard, weight) @ rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(back, dense(shard, weight, True) @ grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8], ids=str)
def test_rows_that_the_fused_kernel_leaves_to_the_reference(dtype):
    shard = random_shard(200, 50)[1]
    rows = torch.randint(0, 2, (BLOCK_ROWS, 3)).to(dtype)
    assert not cpu.handles(rows)
    out = torch.zeros(50, 3, dtype=torch.int64)
    kernels.gather_sum(out, shard, rows, None)
    assert torch.equal(out.double(), dense(shard, None) @ rows.double())


def test_one_number_per_node_and_no_channels():
    shard = random_shard(200, 50)[1]
    flat, out = numbers((BLOCK_ROWS,), torch.float64), torch.zeros(50, dtype=torch.float64)
    kernels.gather_sum(out, shard, flat, None)
    torch.testing.assert_close(out, dense(shard, None) @ flat)
    none = torch.zeros(50, 0)
    kernels.gather_sum(none, shard, torch.zeros(BLOCK_ROWS, 0), None)
    assert none.shape == (50, 0)


@pytest.mark.parametrize("num_dst", [0, 4])
def test_empty_shards_change_nothing(num_dst):
    none = torch.empty(0, dtype=torch.int64)
    for shard in build_shards(none, none, [Block(0, 0, 0), Block(1, 0, 3)], num_dst).shards:
        out, back = torch.ones(num_dst, 2), torch.ones(shard.block.num_rows, 2)
        kernels.gather_sum(out, shard, torch.ones(shard.block.num_rows, 2), torch.ones(0))
        kernels.gather_sum_transposed(back, shard, Transposes(), torch.ones(num_dst, 2), None)
        assert bool((out == 1).all()) and bool((back == 1).all())
        assert kernels.edge_dot(shard, torch.ones(shard.block.num_rows, 2), torch.ones(num_dst, 2), 5).shape == (0,)


@pytest.mark.parametrize("max_edges", [1, 7, 10_000])
@pytest.mark.parametrize("tail", [(3,), (2, 3), ()], ids=str)
def test_edge_dot_is_the_gradient_of_the_weight(tail, max_edges):
    shard = random_shard(300, 50)[1]
    rows, grad = numbers((BLOCK_ROWS, *tail), torch.float64), numbers((50, *tail), torch.float64, 4)
    found = kernels.edge_dot(shard, rows, grad, max_edges)
    right = (rows[shard.src_rows.long()] * grad[shard.dst_rows()]).reshape(shard.num_edges, -1).sum(1)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_nan_of_a_row_without_edges_does_not_spread():
    shard = build_shards(torch.tensor([0, 2]), torch.tensor([0, 1]), [Block(0, 0, 3)], 3).shards[0]
    rows = torch.tensor([[1.0], [float("nan")], [2.0]])
    out = torch.zeros(3, 1)
    kernels.gather_sum(out, shard, rows, None)
    assert out.view(-1).tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("loops", ["numba", "torch"])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
def test_a_weight_for_each_head(dtype, bound, loops, fresh, monkeypatch):
    if loops == "torch":
        monkeypatch.setattr(kernels.heads, "numba_loops_for", lambda rows: None)
    else:
        pytest.importorskip("numba")
    shard = random_shard(700, 50)[1]
    weight = numbers((shard.num_edges, 3), dtype, 2)
    rows, grad = numbers((BLOCK_ROWS, 3, 4), dtype), numbers((50, 3, 4), dtype, 4)
    out, back = numbers((50, 3, 4), dtype, 5), numbers((BLOCK_ROWS, 3, 4), dtype, 6)
    before = (torch.zeros_like(out), torch.zeros_like(back)) if fresh else (out.clone(), back.clone())
    kernels.gather_sum(out, shard, rows, weight, fresh)
    kernels.gather_sum_transposed(back, shard, Transposes(), grad, weight, fresh)
    for head in range(3):
        there = dense(shard, weight[:, head]) @ rows[:, head].double() + before[0][:, head].double()
        again = dense(shard, weight[:, head], True) @ grad[:, head].double() + before[1][:, head].double()
        torch.testing.assert_close(out[:, head].double(), there, rtol=bound, atol=bound)
        torch.testing.assert_close(back[:, head].double(), again, rtol=bound, atol=bound)
    found = kernels.edge_dot(shard, rows, grad, 100, 3)
    right = (rows[shard.src_rows.long()] * grad[shard.dst_rows()]).sum(-1)
    torch.testing.assert_close(found, right, rtol=bound, atol=bound)


# ---- Triton's kernels, on a GPU or interpreted: what test_triton_matrix.py has not


def small_shard(device, index_dtype=torch.int32):
    """One block: rows of no edges, a hub on both sides, self-loops, edges twice; more than a tile in a row."""
    generator = torch.Generator().manual_seed(2)
    src, dst = torch.randint(0, 6, (90,), generator=generator), torch.randint(0, 5, (90,), generator=generator)
    src[:40], dst[30:80] = 3, 2
    src[80:], dst[80:] = dst[80:].clone(), dst[80:].clone()
    shard = build_shards(src.to(device), dst.to(device), [Block(0, 0, 8)], 7).shards[0]
    return Shard(shard.block, shard.indptr.to(index_dtype), shard.src_rows.to(index_dtype), shard.rows)


@pytest.mark.parametrize(
    "dtype, tail, heads, index",
    [
        (torch.float64, (2, 3), 2, torch.int64),
        (torch.float16, (), None, torch.int32),
    ],
    ids=str,
)
def test_sums_of_triton(triton_device, dtype, tail, heads, index):
    shard = small_shard(triton_device, index)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    shape = (shard.num_edges,) if heads == 1 else (shard.num_edges, heads)
    weight = None if heads is None else numbers(shape, dtype, 2).to(triton_device)
    for name, count, into, turned in (("gather_sum", 8, 7, []), ("gather_sum_transposed", 7, 8, [Transposes()])):
        rows = numbers((count, *tail), dtype).to(triton_device)
        for fresh in (False, True):
            start = numbers((into, *tail), wide, 3).to(triton_device)
            out, right = torch.full_like(start, float("nan")) if fresh else start.clone(), start.double()
            right = torch.zeros_like(right) if fresh else right
            getattr(reference, name)(right, shard, *turned, rows.double(), None if weight is None else weight.double())
            getattr(kernels, name)(out, shard, *turned, rows, weight, fresh)
            torch.testing.assert_close(out.double(), right, rtol=bound(wide), atol=bound(wide))


def test_edge_dots_of_triton_of_one_number_per_node(triton_device):
    shard = small_shard(triton_device)
    rows, grad = (numbers((count,), torch.float64, count).to(triton_device) for count in (8, 7))
    found = kernels.edge_dot(shard, rows, grad, 7, 1)
    torch.testing.assert_close(found, rows[shard.src_rows.long()] * grad[shard.dst_rows()], rtol=0, atol=1e-12)


def test_layouts_and_corners_of_triton(triton_device):
    shard = small_shard(triton_device)
    rows = numbers((4, 16), torch.float64).to(triton_device).t()[::2]  # neither order of strides
    weight = numbers((shard.num_edges * 2,), torch.float64, 2).to(triton_device)[::2].gt(0)
    out = torch.zeros(7, 4, dtype=torch.float64, device=triton_device)
    right = out.clone()
    reference.gather_sum(right, shard, rows, weight)
    kernels.gather_sum(out, shard, rows, weight)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="view"):
        kernels.gather_sum(torch.zeros(4, 7, dtype=torch.float64, device=triton_device).t(), shard, rows, None)
    kernels.gather_sum(out[:, :0].contiguous(), shard, rows[:, :0], None)
    assert kernels.edge_dot(shard, rows[:, :0], out[:, :0], 5).eq(0).all()
    isolated = rows.clone()
    isolated[7] = float("nan")  # no edge begins there
    kernels.gather_sum(out, shard, isolated, None)
    assert not out.isnan().any()
    counts = torch.ones(8, 2, dtype=torch.int64, device=triton_device)  # integers go to the reference
    found = torch.zeros(7, 2, dtype=torch.int64, device=triton_device)
    kernels.gather_sum(found, shard, counts, None)
    assert torch.equal(found[:, 0], shard.degrees().long())
    empty = Shard(Block(1, 8, 8), torch.zeros_like(shard.indptr), shard.src_rows[:0], slice(0, 0))
    kernels.gather_sum(out, empty, rows[:0], None, fresh=True)
    assert not out.any()
