"""Attention in one pass: the loops against a dense softmax, and bodies that are, or are almost, an attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardpass as sp
from shardpass.core.aggregation import sharded_call as core_aggregate
from shardpass.core.kernels import attention as kernels
from shardpass.core.kernels import cpu_loops, fused
from shardpass.core.kernels import scores as score_kernels
from shardpass.core.kernels.runs import ClosedScores, EdgeRun, Outer, ScoreGradients, SoftmaxState
from shardpass.core.ranks.random import dropout_factors
from shardpass.core.sharding.shard import Block, build_shards, cut
from shardpass.core.sharding.transposes import Transposes
from shardpass.core.tracing import AdditiveScore, DotScore, MixedScore, Program
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

NUM_DST, BLOCK_ROWS, HEADS, WIDTH = 50, 23, 3, 5


def use_numba(patch):
    pytest.importorskip("numba")


def use_torch(patch):
    patch.setattr(kernels, "numba_loops_for", lambda rows: None)
    patch.setattr(fused, "numba_loops_for", lambda rows: None)


@pytest.fixture(params=[use_numba, use_torch])
def loops(request, monkeypatch):
    request.param(monkeypatch)


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shards(num_edges=400, device="cpu"):
    generator = torch.Generator().manual_seed(4)
    src = torch.randint(0, 2 * BLOCK_ROWS, (num_edges,), generator=generator)
    dst = torch.randint(0, NUM_DST - 2, (num_edges,), generator=generator)  # two destinations have no edge
    dst[: num_edges // 4] = 7
    blocks = [Block(0, 0, BLOCK_ROWS), Block(1, BLOCK_ROWS, 2 * BLOCK_ROWS)]
    src, dst = src.to(device), dst.to(device)
    return src, dst, build_shards(src, dst, blocks, NUM_DST).shards


def by_destination(shard, most):
    for chunk in shard.chunks(most):
        span = slice(chunk.start, chunk.stop)
        yield EdgeRun(shard.indptr, chunk, shard.src_rows[span], shard.dst_rows(chunk) + chunk.low, span)


def by_source(shard, most):
    indptr, dst, position = Transposes().of(shard, with_order=True)
    src = shard.src_rows.long()[position.long()]
    for chunk in cut(indptr, shard.num_edges, most):
        span = slice(chunk.start, chunk.stop)
        yield EdgeRun(indptr, chunk, src[span], dst[span], position[span])


@pytest.mark.parametrize("most, drops, is_double", [
    (1, True, True), (7, False, True), (1000, True, True), (1, False, False), (7, True, False), (1000, False, False),
])  # fmt: skip
def test_loops_equal_a_dense_softmax(loops, most, drops, is_double):
    dtype, bound = (torch.float64, 1e-12) if is_double else (torch.float32, 2e-5)
    equal_a_dense_softmax(400, most, drops, dtype, bound, "cpu")


@pytest.mark.long
def test_triton_equals_a_dense_softmax(triton_device):
    """In chunks; test_triton_matrix.py has the shapes and dtypes."""
    equal_a_dense_softmax(90, 40, True, torch.float64, 1e-12, triton_device)


def equal_a_dense_softmax(num_edges, most, drops, dtype, bound, device):
    src, dst, parts = shards(num_edges, device)
    values = numbers(2 * BLOCK_ROWS, HEADS, WIDTH, seed=1).to(device).requires_grad_()
    scores = (5 * numbers(src.numel(), HEADS, seed=2)).to(device).requires_grad_()
    edges = torch.arange(src.numel(), device=device)
    kept = dropout_factors(3, edges, HEADS, 0.4, torch.float64) if drops else None
    top = torch.full((NUM_DST, HEADS), -1e300, dtype=torch.float64, device=device)
    top = top.scatter_reduce(0, dst.view(-1, 1).expand_as(scores), scores.detach(), "amax")
    exponential = (scores - top[dst]).exp()
    total = torch.zeros(NUM_DST, HEADS, dtype=torch.float64, device=device).index_add(0, dst, exponential)
    weights = exponential / total[dst]
    used = weights if kept is None else weights * kept
    right = torch.zeros(NUM_DST, HEADS, WIDTH, dtype=torch.float64, device=device)
    right = right.index_add(0, dst, used.unsqueeze(-1) * values[src])
    grad = numbers(*right.shape, seed=3).to(device)
    right.backward(grad)

    state = SoftmaxState.fresh(NUM_DST, HEADS, WIDTH, values.detach().to(dtype))
    table = values.detach().to(dtype)
    for shard in parts:
        rows = table[shard.block.start : shard.block.stop].contiguous()
        for run in by_destination(shard, most):
            chosen = shard.places(run.positions)
            factors = None if kept is None else kept[chosen].to(dtype)
            kernels.accumulate(state, run, scores.detach()[chosen].to(dtype).contiguous(), rows, factors)
    out = state.out / state.total.clamp(min=1e-30).unsqueeze(-1)
    torch.testing.assert_close(out.double(), right.detach(), rtol=bound, atol=bound)
    assert (out[NUM_DST - 2 :] == 0).all()

    log_sum = state.top + state.total.log()
    delta = (grad.to(dtype) * out).sum(-1)
    found_values, found_scores = torch.zeros_like(table), torch.zeros_like(scores, dtype=dtype)
    for shard in parts:
        window = slice(shard.block.start, shard.block.stop)
        for run in by_source(shard, most):
            chosen = shard.places(run.positions.long())
            factors = None if kept is None else kept[chosen].to(dtype)
            w = kernels.softmax_weights(run, scores.detach()[chosen].to(dtype).contiguous(), log_sum)
            part = found_values[window]
            relative = kernels.adjoint(run, w, table[window], factors, Outer(grad.to(dtype), delta, log_sum), part)
            found_scores[chosen] = w * relative
    torch.testing.assert_close(found_values.double(), values.grad, rtol=10 * bound, atol=10 * bound)
    torch.testing.assert_close(found_scores.double(), scores.grad, rtol=10 * bound, atol=10 * bound)


FORMULAS = {
    "additive": (AdditiveScore("a", "b", 0.2), lambda a, b, mix: F.leaky_relu(a + b, 0.2).squeeze(-1), (HEADS, 1)),
    "dot": (DotScore("a", "b", 0.3), lambda a, b, mix: 0.3 * (a * b).sum(-1), (HEADS, WIDTH)),
    "mixed": (MixedScore("a", "b", 1.5, 0), lambda a, b, mix: (F.leaky_relu(a + b, 1.5) * mix).sum(-1), (HEADS, WIDTH)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_and_their_adjoint(loops, name):
    form, formula, tail = FORMULAS[name]
    _, _, (shard, _) = shards()
    left = numbers(BLOCK_ROWS, *tail, seed=1).requires_grad_()
    right = numbers(NUM_DST, *tail, seed=2).requires_grad_()
    mix = numbers(HEADS, WIDTH, seed=5).requires_grad_() if name == "mixed" else None
    of = ClosedScores(form, left.detach(), right.detach(), None if mix is None else mix.detach(), None)
    (run,) = by_source(shard, 10_000)
    expected = formula(left[run.src_rows.long()], right[run.dst_rows.long()], mix)
    torch.testing.assert_close(score_kernels.edge_scores(run, of), expected.detach())
    weights, relative = numbers(*expected.shape, seed=3), numbers(*expected.shape, seed=4)
    expected.backward(weights * relative)
    into = ScoreGradients(*(None if t is None else torch.zeros_like(t) for t in (left, right, mix)))
    score_kernels.edge_scores_adjoint(run, of, weights, relative, into)
    for found, leaf in zip(into, (left, right, mix)):
        if leaf is not None:
            torch.testing.assert_close(found, leaf.grad)


def test_threads_share_the_rows_of_a_chunk(monkeypatch):
    pytest.importorskip("numba")
    _, _, (shard, _) = shards(4000)
    scores, values = numbers(shard.num_edges, HEADS, seed=2), numbers(BLOCK_ROWS, HEADS, WIDTH, seed=1)
    (run,), found = by_destination(shard, 10_000), []
    (back,) = by_source(shard, 10_000)
    for count in (1, 4):
        monkeypatch.setattr(cpu_loops, "_num_threads", lambda num_edges, count=count: count)
        state = SoftmaxState.fresh(NUM_DST, HEADS, WIDTH, values)
        kernels.accumulate(state, run, scores.clone(), values, None)
        into = torch.zeros_like(values)
        log_sum = state.top + state.total.log()
        weights = kernels.softmax_weights(back, scores[back.positions.long()], log_sum)
        relative = kernels.adjoint(back, weights, values, None, Outer(state.out, state.total, log_sum), into)
        found.append((*state, into, weights, relative))
    for one, four in zip(*found):
        assert torch.equal(one, four)


def test_dropout_factors_depend_on_the_edge_alone():
    edges = torch.arange(100_000)
    whole = dropout_factors(11, edges, 2, 0.3, torch.float64)
    assert set(whole.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((whole == 0).double().mean()) - 0.3) < 0.005
    assert torch.equal(dropout_factors(11, edges[500:600].flip(0), 2, 0.3, torch.float64), whole[500:600].flip(0))
    other = dropout_factors(12, edges, 2, 0.3, torch.float64)
    for left, right in ((whole, other), (whole[:, :1], whole[:, 1:]), (whole[1:], whole[:-1])):
        assert abs(float(((left == 0) & (right == 0)).double().mean()) - 0.09) < 0.005


# ---- bodies

GRAPH = awkward_graph()


def softmax(score, i, eps=1e-16, detach=True):
    shape = (i.num_dst, *score.shape[1:])
    index = i.index.view(-1, *[1] * (score.dim() - 1)).expand_as(score)
    source = score.detach() if detach else score
    top = score.new_zeros(shape).scatter_reduce_(0, index, source, "amax", include_self=False)
    out = (score - top.index_select(0, i.index)).exp()
    return out / (score.new_zeros(shape).scatter_add_(0, index, out) + eps).index_select(0, i.index)


def score(i):
    return F.leaky_relu(i.src["a"] + i.dst["b"], 0.3)


def weighted(weights, rows):
    return rows * weights.unsqueeze(-1)


MIX = numbers(1, 2, 4, seed=30).requires_grad_()


def mixed(i):
    return (F.leaky_relu(i.src["x"] + i.dst["y"], 0.2) * MIX).sum(dim=-1)


BODIES = {  # body; whether it is one attention, and with which closed form of the score
    "plain": (lambda i: weighted(softmax(score(i), i), i.src["x"]), True, AdditiveScore),
    "other order": (lambda i: i.src["x"] * softmax(i.dst["b"] + i.src["a"], i).view(-1, 2, 1), True, AdditiveScore),
    "maximum with gradient": (lambda i: weighted(softmax(score(i), i, detach=False), i.src["x"]), True, AdditiveScore),
    "some function": (lambda i: weighted(softmax(torch.tanh(i.src["a"] * i.dst["b"]), i), i.src["x"]), True, None),
    "edge term": (lambda i: weighted(softmax(score(i) + i.edge["w"].view(-1, 1), i), i.src["x"]), True, None),
    "dot": (lambda i: weighted(softmax((i.dst["y"] * i.src["x"]).sum(-1) / 2, i), i.src["x"]), True, DotScore),
    "dot, other value": (lambda i: weighted(softmax((i.src["x"] * i.dst["y"]).sum(-1), i), i.src["v"]), True, DotScore),
    "dot over all": (lambda i: softmax((i.src["x"] * i.dst["y"]).sum((1, 2)), i).view(-1, 1) * i.src["z"], True, None),
    "mixed": (lambda i: weighted(softmax(mixed(i), i), i.src["x"]), True, MixedScore),
    "mixed, then more": (lambda i: weighted(softmax(mixed(i).tanh(), i), i.src["x"]), True, None),
    "one head": (lambda i: softmax(i.src["a"][:, :1] * i.dst["b"][:, :1], i) * i.src["z"], True, None),
    "squared": (lambda i: weighted(softmax(score(i), i) ** 2, i.src["x"]), False, None),
    "times edge": (lambda i: weighted(softmax(score(i), i) * i.edge["w"].view(-1, 1), i.src["x"]), False, None),
    "detached": (lambda i: weighted(softmax(score(i).detach(), i), i.src["x"]), False, None),
    "detached weights": (lambda i: weighted(softmax(score(i), i).detach(), i.src["x"]), False, None),
    "large eps": (lambda i: weighted(softmax(score(i), i, eps=0.5), i.src["x"]), False, None),
    "value of both": (lambda i: weighted(softmax(score(i), i), i.src["x"] + i.dst["y"]), False, None),
    "a weight a channel": (lambda i: softmax(i.src["x"], i) * i.src["x"], False, None),
}


def results(body, ranks, options, seen, owners="random"):
    """Outputs and gradients of a body, in node order."""

    def rank(comm):
        chosen = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[owners]
        graph = shard_in_memory(GRAPH, chosen, comm, options)
        rows = {"x": (2, 4), "a": (2,), "b": (2,), "y": (2, 4), "z": (4,), "v": (2, 3)}
        own = {
            name: numbers(GRAPH.num_nodes, *tail, seed=k)[graph.node_ids].requires_grad_()
            for k, (name, tail) in enumerate(rows.items())
        }
        weight = numbers(GRAPH.edge_index.size(1), seed=9)[graph.edge_ids].requires_grad_()

        def add_up(messages, i):
            return messages.new_zeros((i.num_dst, *messages.shape[1:])).index_add(0, i.index, messages)

        program = Program("layer", {k: own[k] for k in "xazv"}, {k: own[k] for k in "by"}, {"w": weight}, body, add_up)
        program.watch = lambda structure: seen.append(structure.attention)
        out = core_aggregate.aggregate(program, graph.edge_index.plan, graph.edge_index.shards)
        (out * numbers(GRAPH.num_nodes, *out.shape[1:], seed=20)[graph.node_ids]).sum().backward()
        found = {"out": (out.detach(), graph.node_ids), "w": (weight.grad, graph.edge_ids)}
        found.update({name: (tensor.grad, graph.node_ids) for name, tensor in own.items()})
        return found

    every, joined = sp.spawn(rank, ranks), {}
    for name in every[0]:
        parts = [found[name] for found in every]
        known = [rows for rows, _ in parts if rows is not None]
        if known:  # on a rank where nothing uses it there is no gradient
            order = torch.cat([ids for _, ids in parts]).argsort()
            filled = [known[0].new_zeros((len(i), *known[0].shape[1:])) if r is None else r for r, i in parts]
            joined[name] = torch.cat(filled)[order]
    return joined


@pytest.mark.parametrize("name", BODIES)
def test_what_is_an_attention(name, monkeypatch):
    body, is_attention, closed = BODIES[name]
    seen = []
    general = results(body, 2, sp.Options(fuse_attention=False), seen)
    assert seen == [None, None]
    number = [*BODIES].index(name)
    turns = ((use_torch, number), (use_numba, number + 1)) if is_attention else ((use_torch, number),)
    for use, turn in turns:  # nothing else runs in these loops
        with monkeypatch.context() as patch:
            use(patch)
            found = equals_the_general_path(body, general, turn % 3)
        assert {attention is not None for attention in found} == {is_attention}
        if is_attention:
            assert {type(attention.score) for attention in found} == {closed or type(None)}


RUNS = (
    (sp.Options(), "random"),
    (sp.Options(mode="keep", chunk_bytes=64), "empty part"),
    (sp.Options(chunk_bytes=1, block_rows=3), "no edges"),
)


def equals_the_general_path(body, general, turn):
    """The attentions that were recognised, in one of `RUNS`, whose results equal those of `general`."""
    seen, (options, owners) = [], RUNS[turn]
    found = results(body, 3, options, seen, owners)
    for key in found.keys() | general.keys():  # no gradient is as good as zeros
        like = (found | general)[key]
        mine, right = found.get(key, torch.zeros_like(like)), general.get(key, torch.zeros_like(like))
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}")
    return seen


def test_scores_of_minus_infinity(loops):
    def body(i):
        hidden = i.edge["w"].view(-1, 1) > 0
        return weighted(softmax(score(i).masked_fill(hidden, float("-inf")), i), i.src["x"])

    seen = []
    with_nan = results(body, 2, sp.Options(), seen)["out"]
    assert seen[0] is not None
    expected = results(body, 1, sp.Options(fuse_attention=False), [])["out"]
    torch.testing.assert_close(with_nan, expected, equal_nan=True)
    assert expected.isnan().any() and not expected.isnan().all()
