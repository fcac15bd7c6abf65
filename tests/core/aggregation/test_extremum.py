"""Max and min of copied source rows by kernels: against the reducers, and against the body run on every edge."""

from __future__ import annotations

import pytest
import torch

import shardpass as sp
from shardpass.core import kernels
from shardpass.core.aggregation import sharded_call as core_aggregate
from shardpass.core.kernels import cpu_loops as loops_of
from shardpass.core.kernels import extremum as extremum_kernels
from shardpass.core.sharding.shard import Block, build_shards
from shardpass.core.sharding.transposes import Transposes
from shardpass.core.tracing import probing as probe
from shardpass.core.tracing.program import Program
from shardpass.core.tracing.recognise import GENERAL
from shardpass.core.tracing.reducers import REDUCERS, Base
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

NUM_DST, BLOCK_ROWS = 30, 11
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["numba", "torch"])
def loops(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(extremum_kernels, "numba_loops_for", lambda rows: None)
    else:
        pytest.importorskip("numba")
    return request.param


def shards(num_edges, device="cpu"):
    generator = torch.Generator().manual_seed(4)
    src = torch.randint(0, 2 * BLOCK_ROWS, (num_edges,), generator=generator)
    dst = torch.randint(0, NUM_DST - 2, (num_edges,), generator=generator)
    dst[: num_edges // 4] = 7
    blocks = [Block(0, 0, BLOCK_ROWS), Block(1, BLOCK_ROWS, 2 * BLOCK_ROWS), Block(2, 2 * BLOCK_ROWS, 2 * BLOCK_ROWS)]
    src, dst = src.to(device), dst.to(device)
    return src, dst, build_shards(src, dst, blocks, NUM_DST).shards


def few_values(*shape, seed=0, dtype=torch.float64):
    """Numbers with many ties, some of them infinite or not numbers."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-2, 3, shape, generator=generator).to(dtype)
    if dtype.is_floating_point:
        rows[3], rows[5], rows[1, ..., 0] = -INF, INF, NAN
    return rows


OPS = {torch.float32: "max", torch.float64: "min", torch.bfloat16: "max", torch.int64: "min"}
"""By dtype, for one number of edges; for the next it is the other."""


def op_of(dtype, turn):
    return OPS[dtype] if turn % 2 else {"max": "min", "min": "max"}[OPS[dtype]]


@pytest.mark.parametrize("dtype", OPS, ids=str)
@pytest.mark.parametrize("tail", [(4,), (2, 20)], ids=str)
@pytest.mark.parametrize("num_edges", [0, 20, 300])
def test_kernels_equal_the_reducer(loops, num_edges, tail, dtype):
    op = op_of(dtype, len(tail) + num_edges // 20)
    equal_the_reducer(num_edges, tail, op, dtype, "cpu")


@pytest.mark.parametrize("op", ["max", "min"])
def test_triton_equals_the_reducer(triton_device, op):
    """Numbers that are none among them; test_triton_matrix.py has the other shapes and dtypes."""
    equal_the_reducer(90, (2, 3), op, torch.float64, triton_device)


def equal_the_reducer(num_edges, tail, op, dtype, device):
    src, dst, parts = shards(num_edges, device)
    rows, reducer = few_values(2 * BLOCK_ROWS, *tail, dtype=dtype).to(device), REDUCERS[op]
    right, found = (reducer.init(NUM_DST, tail, rows) for _ in range(2))
    reducer.accumulate(right, rows[src], dst)
    for shard in parts:
        kernels.gather_extremum(op, found, shard, rows[shard.block.start : shard.block.stop])
    for mine, theirs in zip(found, right):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    if not dtype.is_floating_point:
        return
    value, grad = reducer.value(right, Base()), torch.randn(NUM_DST, *tail).to(device, dtype)
    share = reducer.share(right, value, grad, Base()).to(dtype)
    expected = torch.zeros_like(rows)
    expected.index_add_(0, src, reducer.vjp(rows[src], dst, right, value, grad, Base()).to(dtype))
    into = torch.zeros_like(rows)
    for shard in parts:
        window = slice(shard.block.start, shard.block.stop)
        kernels.gather_extremum_transposed(into[window], shard, Transposes(), rows[window], value, share)
    bound = 0.1 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(into, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", OPS, ids=str)
@pytest.mark.parametrize("tail", [(4,), (2, 20), (0,), ()], ids=str)
@pytest.mark.parametrize("num_edges", [0, 1, 300])
def test_messages_made_edge_by_edge_equal_the_reducer(loops, num_edges, tail, dtype):
    """In two pieces, into a state that holds something, of rows that do not follow each other in memory."""
    op = op_of(dtype, len(tail) + num_edges)
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(0, NUM_DST - 2, (num_edges,), generator=generator).sort().values
    messages = few_values(max(num_edges, 6), *tail[:1], 2 * max(tail[1:], default=1), dtype=dtype)[:num_edges]
    messages = messages[..., ::2].reshape(num_edges, *tail) if tail else messages[:, 0]
    reducer, half = REDUCERS[op], num_edges // 3
    right, found = (reducer.init(NUM_DST, tail, messages) for _ in range(2))
    for piece in (slice(0, half), slice(half, None)):
        reducer.accumulate(right, messages[piece], index[piece])
        kernels.take_extremum(op, found, messages[piece], index[piece])
    for mine, theirs in zip(found, right):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    if not dtype.is_floating_point:
        return
    value, grad = reducer.value(right, Base()), torch.randn(NUM_DST, *tail, generator=generator).to(dtype)
    share = reducer.share(right, value, grad, Base())
    expected = reducer.vjp(messages, index, right, value, grad, Base())
    torch.testing.assert_close(kernels.shares_of_edges(messages, index, value, share), expected, rtol=0, atol=0)


def test_threads_share_the_rows(monkeypatch):
    pytest.importorskip("numba")
    *_, parts = shards(500)
    rows, found = few_values(2 * BLOCK_ROWS, 5)[:BLOCK_ROWS], []
    for count in (1, 4):
        monkeypatch.setattr(loops_of, "_num_threads", lambda num_edges, count=count: count)
        state, into = REDUCERS["max"].init(NUM_DST, (5,), rows), torch.zeros_like(rows)
        kernels.gather_extremum("max", state, parts[0], rows)
        kernels.gather_extremum_transposed(into, parts[0], Transposes(), rows, state[0], state[1].double())
        found.append([*state, into])
    for one, four in zip(*found):
        torch.testing.assert_close(one, four, rtol=0, atol=0, equal_nan=True)


GRAPH = awkward_graph()


def taken(messages, i, op, included, base):
    index = i.index.view(-1, 1).expand_as(messages)
    out = messages.new_full((i.num_dst, messages.size(1)), base)
    return out.scatter_reduce(0, index, messages, op, include_self=included)


BODIES = {  # node part; whether the kernels take it
    "max": (lambda m, i: taken(m, i, "amax", False, 0.0), True),
    "min": (lambda m, i: taken(m, i, "amin", False, 0.0), True),
    "max with what is there": (lambda m, i: taken(m, i, "amax", True, 1.0), True),
    "max and sum": (lambda m, i: taken(m, i, "amax", False, 0.0) + taken(m, i, "sum", True, 0.0), True),
    "max of a square": (lambda m, i: taken(m * m, i, "amax", False, 0.0), False),
    "max less max": (
        lambda m, i: taken(m - taken(m, i, "amax", False, 0.0)[i.index], i, "amin", False, 0.0),
        None,  # one of the two
    ),
}


def results(node_part, ranks, options, owners="random"):
    """Outputs and gradients in node order, and the forms that were seen."""
    seen = set()

    def rank(comm):
        chosen = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[owners]
        graph = shard_in_memory(GRAPH, chosen, comm, options)
        x = torch.randint(-2, 3, (GRAPH.num_nodes, 3), generator=torch.Generator().manual_seed(1)).double()
        x = x[graph.node_ids].requires_grad_()
        program = Program("layer", {"x": x}, {}, {}, lambda i: i.src["x"], node_part)
        program.watch = lambda structure: seen.update(r.form for r in structure.reductions)
        out = core_aggregate.aggregate(program, graph.edge_index.plan, graph.edge_index.shards)
        weight = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (out * (weight + graph.node_ids.view(-1, 1))).sum().backward()
        return out.detach(), x.grad, graph.node_ids

    every = sp.spawn(rank, ranks)
    order = torch.cat([ids for *_, ids in every]).argsort()
    return [torch.cat([found[k] for found in every])[order] for k in (0, 1)], seen


@pytest.mark.parametrize("name", BODIES)
def test_bodies_equal_the_general_path(name, loops, monkeypatch):
    node_part, by_kernels = BODIES[name]
    with monkeypatch.context() as patch:
        patch.setattr(probe, "extremum_form", lambda expr, tails: GENERAL)
        right, seen = results(node_part, 1, sp.Options())
        assert "extremum" not in seen
    runs = [(1, sp.Options(), "random"), (3, sp.Options(mode="keep"), "no edges")]
    for ranks, options, owners in (*runs, (3, sp.Options(block_rows=2), "empty part")):
        found, seen = results(node_part, ranks, options, owners)
        assert by_kernels is None or ("extremum" in seen) == by_kernels
        for mine, theirs in zip(found, right):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
