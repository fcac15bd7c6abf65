"""Losses and metrics against torch.nn.functional on the concatenated rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardpass.core.training import metrics, objective
from shardpass.errors import DivergenceError
from shardpass.testing import run

SPLITS = {1: [12], 2: [5, 7], 3: [0, 4, 8], 4: [3, 0, 1, 8]}


def graph(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 4, generator=generator).double()
    y = torch.randint(0, 4, (12,), generator=generator)
    mask = torch.rand(12, generator=generator) < 0.5
    mask[-1] = True
    return logits, y, mask


def own(comm, *tensors):
    return [tensor.split(SPLITS[comm.size])[comm.rank] for tensor in tensors]


def check(loss, ranks, expected, leaf, *tensors):
    """``loss(comm, own rows, own share of each tensor)`` equals the expected one, with the same bits on all ranks.

    The gradients of the shares are those of the whole, `leaf`.
    """

    def body(comm):
        rows, *others = own(comm, leaf.detach(), *tensors)
        rows = rows.clone().requires_grad_()
        value = loss(comm, rows, *others)
        value.backward()
        return value.detach(), rows.grad

    expected.backward()
    results = run(body, ranks)
    for value, _ in results:
        torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-12)
        assert torch.equal(value, results[0][0])
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), leaf.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("use_mask", ["bool", "int32 rows", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, "probabilities"])
def test_cross_entropy_is_that_of_all_rows(ranks, use_mask, weighted, smoothing, kind):
    logits, y, mask = graph()
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1]).double() if weighted else None
    y = torch.softmax(logits.flip(0), 1) if kind == "probabilities" else y
    leaf = logits.clone().requires_grad_()
    chosen = slice(None) if use_mask == "none" else mask
    expected = F.cross_entropy(leaf[chosen], y[chosen], weight, label_smoothing=smoothing)
    y = y if kind == "probabilities" else y.to(kind)

    def loss(comm, rows, targets, marked):
        marked = {"none": None, "bool": marked, "int32 rows": marked.nonzero().squeeze(1).to(torch.int32)}[use_mask]
        return objective.cross_entropy(rows, targets, marked, comm, weight, smoothing)

    check(loss, ranks, expected, leaf, y, mask)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("ignore", "kind"), [(-100, torch.int64), (-1, torch.int64), (2, torch.int64), (255, torch.uint8)]
)
def test_ignored_classes_are_those_of_torch(ranks, weighted, ignore, kind):
    logits, y, mask = graph()
    y[::3] = ignore
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1]).double() if weighted else None
    leaf, arguments = logits.clone().requires_grad_(), {} if ignore == -100 else {"ignore_index": ignore}
    expected = F.cross_entropy(leaf[mask], y[mask], weight, label_smoothing=0.1, **arguments)
    kept = mask & (y != ignore)
    right = (logits[kept].argmax(1) == y[kept]).double().mean().item()

    def loss(comm, rows, targets, marked):
        assert metrics.accuracy(rows, targets, marked, comm, **arguments) == pytest.approx(right, abs=1e-15)
        return objective.cross_entropy(rows, targets, marked, comm, weight, 0.1, **arguments)

    check(loss, ranks, expected, leaf, y.to(kind), mask)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["mean", "sum"])
@pytest.mark.parametrize("masked", ["before the loss", "after it"])
def test_labels_of_some_entries_as_ogb_has_them(ranks, name, masked):
    """NaN labels are indexed away before the loss; a mask of entries may be passed where every label is a number."""
    logits, _, mask = graph()
    y = (logits.flip(0) > 0).double()
    entries = mask[:, None] & (logits.flip(1) > -0.5)
    if masked == "before the loss":
        y[~entries] = torch.nan
    leaf = logits.clone().requires_grad_()
    expected = F.binary_cross_entropy_with_logits(leaf[entries], y[entries], reduction=name)

    def loss(comm, rows, targets, marked):
        if masked == "before the loss":
            rows, targets, marked = rows[~targets.isnan()], targets[~targets.isnan()], None
        losses = F.binary_cross_entropy_with_logits(rows, targets, reduction="none")
        return getattr(objective, name)(losses, marked, comm)

    check(loss, ranks, expected, leaf, y, entries)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4), st.integers(0, 1000))
def test_any_split_and_mask_gives_the_mean_of_the_whole(masks, seed):
    sizes = [len(mask) for mask in masks]
    if not any(any(mask) for mask in masks):
        masks[0], sizes[0] = [True], 1
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(sizes), 3, generator=generator).double()
    y = torch.randint(0, 3, (sum(sizes),), generator=generator)
    mask = torch.tensor([flag for flags in masks for flag in flags], dtype=torch.bool)

    def body(comm):
        rows, targets, marked = (t.split(sizes)[comm.rank] for t in (logits, y, mask))
        return (
            objective.cross_entropy(rows, targets, marked, comm).item(),
            metrics.accuracy(rows, targets, marked, comm),
            objective.sum(rows, marked, comm).item(),
        )

    for loss, accuracy, summed in run(body, len(sizes)):
        assert loss == pytest.approx(F.cross_entropy(logits[mask], y[mask]).item(), abs=1e-12)
        assert accuracy == pytest.approx((logits[mask].argmax(1) == y[mask]).double().mean().item(), abs=1e-15)
        assert summed == pytest.approx(logits[mask].sum().item(), abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["mean", "sum"])
@pytest.mark.parametrize("masked", [False, True])
def test_mean_and_sum_of_any_values(ranks, name, masked):
    values, _, mask = graph()
    leaf = values.clone().requires_grad_()
    chosen = (leaf[mask] if masked else leaf) ** 3
    expected = chosen.mean() if name == "mean" else chosen.sum()

    def loss(comm, rows, marked):
        return getattr(objective, name)(rows**3, marked if masked else None, comm)

    check(loss, ranks, expected, leaf, mask)


@pytest.mark.ranks(2)
def test_an_empty_mask_on_one_rank_gives_zero_gradients(comm):
    rows, targets, _ = own(comm, *graph())
    rows = rows.clone().requires_grad_()
    mask = torch.full((len(rows),), comm.rank == 1)
    objective.cross_entropy(rows, targets, mask, comm).backward()
    assert rows.grad is not None and (rows.grad.all() if comm.rank == 1 else not rows.grad.any())


@pytest.mark.ranks(2)
def test_half_precision_is_computed_in_float32(comm):
    logits, y, mask = graph()
    logits = logits.bfloat16()
    rows, targets, marked = own(comm, logits, y, mask)
    rows = rows.clone().requires_grad_()
    loss = objective.cross_entropy(rows, targets, marked, comm, weight=torch.ones(4))
    loss.backward()
    assert loss.dtype == torch.float32 and rows.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(F.cross_entropy(logits.float()[mask], y[mask]).item(), rel=1e-6)


@pytest.mark.ranks(2)
def test_bools_and_integers_are_averaged(comm):
    flags = torch.tensor([True, False, True]) if comm.rank else torch.tensor([False])
    assert (objective.mean(flags, None, comm).item(), objective.sum(flags.long(), None, comm).item()) == (0.5, 2.0)


def test_a_replicated_term_is_counted_once():
    def body(comm):
        parameter = nn.Parameter(torch.tensor([3.0]))
        term = objective.replicated((parameter**2).sum(), comm)
        term.backward()
        return term.item(), parameter.grad.item()

    results = run(body, 3)
    assert [value for value, _ in results] == [9.0] * 3
    assert sum(grad for _, grad in results) == pytest.approx(6.0)


def test_total_sums_numbers():
    def body(comm):
        return objective.total(comm.rank + 1, comm), objective.total(0.5, comm)

    results = run(body, 3)
    assert results == [(6, 1.5)] * 3 and isinstance(results[0][0], int)


@pytest.mark.ranks(2)
def test_backward_does_not_communicate(comm):
    rows, targets, _ = own(comm, *graph())
    rows = rows.clone().requires_grad_()
    loss = objective.cross_entropy(rows, targets, None, comm)
    if comm.rank == 0:  # the other rank never calls backward
        loss.backward()
    assert (rows.grad is not None) == (comm.rank == 0)


BAD = torch.zeros(3, dtype=torch.int64)
LOGITS = torch.zeros(3, 4)
TRUE = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("logits", "y", "mask", "text"),
    [
        (torch.zeros(3), BAD, TRUE, r"logits must be floating point \[num_own, num_classes\], found float32 \[3\]"),
        (LOGITS.long(), BAD, TRUE, r"logits must be floating point .* found int64 \[3, 4\]"),
        (LOGITS, BAD[:2], TRUE, r"y must be \[3\].*found int64 \[2\]; pass all own nodes"),
        (LOGITS, BAD[:, None], TRUE, r"y must be \[3\].*use y.squeeze\(1\)"),
        (LOGITS, torch.zeros(3), TRUE, r"y must be \[3, 4\] for logits"),
        (LOGITS, TRUE, TRUE, r"y must hold class ids or class probabilities, found bool \[3\]"),
        (LOGITS, BAD, TRUE[:2], "bool mask must have one entry per own node, 3, found 2"),
        (LOGITS, BAD, torch.ones(3), r"mask must be a bool tensor \[3\] or own row numbers, found float32 \[3\]"),
        (LOGITS, BAD, [0, 1], "mask must be a bool tensor .* found list"),
        (LOGITS, BAD, torch.tensor([1, 0, 1]), r"looks like a mask: use mask.bool\(\)"),
        (LOGITS, BAD, torch.tensor([1], dtype=torch.uint8), r"looks like a mask: use mask.bool\(\)"),
        (LOGITS, BAD, torch.tensor([0, 3]), r"row numbers in mask must be in \[0, 3\), found 0 to 3"),
        (LOGITS, torch.tensor([0, -1, -1]), TRUE, r"2 of 3 masked nodes have no label \(y = -1\); leave them out"),
        (LOGITS, torch.tensor([0, 4, 1]), TRUE, r"class ids must be in \[0, 4\), found 4"),
        (LOGITS, torch.tensor([0, -7, 1]), TRUE, r"class ids must be in \[0, 4\), found -7"),
        (LOGITS, torch.tensor([0, 255, 1]).to(torch.uint8), TRUE, r"class ids must be in \[0, 4\), found 255"),
    ],
)
@pytest.mark.parametrize("function", [objective.cross_entropy, metrics.accuracy])
@pytest.mark.ranks(2)
def test_a_mistake_on_one_rank_is_told_on_every_rank(comm, function, logits, y, mask, text):
    with pytest.raises(ValueError, match=text + r".*\(found on rank 1\)"):
        if comm.rank == 1:
            function(logits, y, mask, comm)
        else:
            function(LOGITS, BAD, TRUE, comm)


@pytest.mark.ranks(1)
def test_unlabelled_nodes_outside_the_mask_are_fine(comm):
    y = torch.tensor([0, -1, 2])
    assert objective.cross_entropy(LOGITS, y, y >= 0, comm).item() == pytest.approx(torch.tensor(4.0).log().item())


OTHER_WEIGHTS = (
    r"class weights \[1, 2, 3, 4\] .* on rank 0, .* class weights \[2, 3, 4, 5\] .* weights of classes must be"
)
MISTAKES = {
    ValueError: {
        "selects no node on any rank": lambda c: objective.cross_entropy(LOGITS, BAD, ~TRUE, c),
        "accuracy: the mask selects no node on any": lambda c: metrics.accuracy(LOGITS, BAD, ~TRUE, c),
        "mean: the mask selects no node on any rank": lambda c: objective.mean(LOGITS, ~TRUE, c),
        "selects no node on any rank, or none with a label": lambda c: objective.cross_entropy(
            LOGITS, BAD - 1, None, c, ignore_index=-1
        ),
        r"12 values that the mask leaves out are NaN.* mean\(loss\(out\[mask\], y\[mask\]\), None, comm": lambda c: (
            objective.mean(LOGITS.where(LOGITS > 0, torch.nan).requires_grad_(), LOGITS > 0, c)
        ),
        r"own row numbers, or bool \[3, 4\], found bool \[3, 2\]": lambda c: objective.mean(
            LOGITS, LOGITS[:, :2] > 0, c
        ),
        r"must be a bool tensor \[3\] or own row numbers, found bool \[3, 4\]": lambda c: objective.cross_entropy(
            LOGITS, BAD, LOGITS > 0, c
        ),
        r"one row per own node.*replicated": lambda c: objective.mean(torch.tensor(1.0), None, c),
        "one row per own node, found float": lambda c: objective.sum(1.0, None, c),
        "replicated: expected a floating point tensor, found": lambda c: objective.replicated(1.0, c),
        "y must hold class ids, found float32": lambda c: metrics.accuracy(LOGITS, LOGITS, TRUE, c),
        r"weight must have one entry per class, \[4\], found float32 \[3\]": lambda c: objective.cross_entropy(
            LOGITS, BAD, TRUE, c, weight=torch.ones(3)
        ),
        "weights of the masked nodes add up to 0": lambda c: objective.cross_entropy(
            LOGITS, BAD, TRUE, c, weight=torch.zeros(4)
        ),
    },
    DivergenceError: {
        r"without class -1 on rank 0, .* without class -2 on rank 1; .*ignored class": lambda c: (
            objective.cross_entropy(LOGITS, BAD, None, c, ignore_index=-1 - c.rank)
        ),
        r"float32 \[num_own, 4\] on rank 0, float64 \[num_own, 4\] on rank 1; dtype, trailing": lambda c: (
            objective.cross_entropy(LOGITS.to([torch.float32, torch.float64][c.rank]), BAD, TRUE, c)
        ),
        "ranks pass different kinds of rows": lambda c: objective.cross_entropy(LOGITS[:, : 4 - c.rank], BAD, TRUE, c),
        OTHER_WEIGHTS: lambda c: objective.cross_entropy(LOGITS, BAD, TRUE, c, weight=torch.arange(1.0, 5.0) + c.rank),
    },
}


@pytest.mark.parametrize(("error", "text"), [(error, text) for error in MISTAKES for text in MISTAKES[error]])
@pytest.mark.ranks(2)
def test_mistakes_are_told_in_words(comm, error, text):
    with pytest.raises(error, match=text):
        MISTAKES[error][text](comm)


@pytest.mark.ranks(2)
def test_total_of_several_numbers_names_what_adds_them_up(comm):
    with pytest.raises(ValueError, match=r'one entry, found int64 .*call comm\.all_reduce\(count, "sum"\)'):
        objective.total(torch.ones(3, dtype=torch.int64), comm)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("use_mask", [True, False])
@pytest.mark.parametrize("name", ["mean", "sum"])
def test_what_is_made_of_columns_has_the_gradient_of_all_rows(ranks, use_mask, name):
    values, _, mask = graph()
    leaf = values.clone().requires_grad_()
    chosen = leaf[mask] if use_mask else leaf
    expected = getattr(chosen, name)(0).pow(2).sum()

    def loss(comm, rows, marked):
        found = getattr(objective, name)(rows, marked if use_mask else None, comm, dim=0)
        assert found.shape == (4,)
        return objective.replicated(found.pow(2).sum(), comm)

    check(loss, ranks, expected, leaf, mask)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16])
def test_columns_of_any_shape_are_those_of_torch(ranks, shape, dtype):
    values = torch.arange(torch.Size(shape).numel()).view(shape).remainder(5).to(dtype)

    def body(comm):
        (mine,) = own(comm, values)
        return objective.mean(mine, None, comm, dim=0), objective.sum(mine, None, comm, dim=0)

    wide = values if values.is_floating_point() else values.float()
    for mean, total in run(body, ranks):
        torch.testing.assert_close(mean, wide.mean(0))
        torch.testing.assert_close(total, wide.sum(0))
        assert not mean.requires_grad


def test_columns_without_gradients_on_most_ranks():
    def body(comm):
        rows = torch.full((2, 3), 1.0 + comm.rank).double().requires_grad_(comm.rank == 1)
        objective.replicated(objective.mean(rows, None, comm, dim=0).square().sum(), comm).backward()
        return rows.grad

    assert torch.allclose(run(body, 3)[1], torch.full((2, 3), 2 * 2.0 / 6).double())


@pytest.mark.ranks(2)
def test_what_is_no_reduction_over_nodes_is_refused(comm):
    rows = torch.ones(5, 3)
    with pytest.raises(ValueError, match=r"dim must be 0, or None .* found 1; .*mean\(values.mean\(1\), mask, comm"):
        objective.mean(rows, None, comm, dim=1)
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        objective.mean(rows, rows > 0, comm, dim=0)
    with pytest.raises(DivergenceError, match="over nodes only"):
        objective.mean(rows, None, comm, dim=0 if comm.rank else None)
