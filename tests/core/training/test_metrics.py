"""Metrics against scikit-learn on the rows of all ranks."""

import warnings

import numpy as np
import pytest
import torch

import shardpass as sp
from shardpass.testing import run

sklearn_metrics = pytest.importorskip("sklearn.metrics")

SPLITS = {1: [40], 3: [0, 13, 27]}
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(40, 6, generator=GENERATOR).double()
LOGITS[:, 4:] -= 9  # classes 4 and 5 are never predicted
CLASSES = torch.randint(0, 4, (40,), generator=GENERATOR)
CLASSES[:2] = 5  # class 4 is in neither
LABELS = torch.rand(40, 6, generator=GENERATOR) > 0.6
LABELS[:, 4] = False
SCORES = torch.randn(40, 6, generator=GENERATOR).round(decimals=1)  # with ties
SCORES[3] = -0.0
MASK = torch.rand(40, generator=GENERATOR) > 0.3


def on_ranks(metric, ranks, *tensors, use_mask=True, **kwargs):
    """The number that every rank has."""

    def work(comm):
        own = [tensor.split(SPLITS[comm.size])[comm.rank] for tensor in (*tensors, MASK)]
        return metric(*own[:-1], own[-1] if use_mask else None, comm, **kwargs)

    found = run(work, ranks)
    assert all(value == found[0] or value != value for value in found)
    return found[0]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("use_mask", [True, False])
def test_f1_and_mae(ranks, use_mask):
    rows = MASK if use_mask else slice(None)
    for average in ("micro", "macro", "weighted"):
        for y, predicted in ((CLASSES, LOGITS.argmax(1)), (LABELS, LOGITS > 0), (LABELS.float(), LOGITS > 0)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = sklearn_metrics.f1_score(y[rows].numpy(), predicted[rows].numpy(), average=average)
            found = on_ranks(sp.f1, ranks, LOGITS, y, use_mask=use_mask, average=average)
            assert found == pytest.approx(expected, abs=1e-12), average
    expected = sklearn_metrics.f1_score(
        CLASSES[rows].numpy(), LOGITS[rows].argmax(1).numpy(), average=None, labels=range(6), zero_division=0
    )
    found = on_ranks(
        lambda *given, average: sp.f1(*given, average=average).tolist(),
        ranks, LOGITS, CLASSES, use_mask=use_mask, average=None,
    )  # fmt: skip
    assert found == pytest.approx(expected.tolist(), abs=1e-12)
    assert on_ranks(sp.f1, ranks, LOGITS, CLASSES) == pytest.approx(on_ranks(sp.accuracy, ranks, LOGITS, CLASSES))
    for pair in ((LOGITS, LOGITS.flip(1)), (LOGITS[:, 0].float(), CLASSES)):
        expected = sklearn_metrics.mean_absolute_error(*(t[rows].double().numpy() for t in pair))
        assert on_ranks(sp.mae, ranks, *pair, use_mask=use_mask) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_roc_auc_and_average_precision(ranks, dtype):
    scores, kept = SCORES.to(dtype), [0, 1, 2, 3, 5]
    for column in kept:
        y = LABELS[:, column].long()
        for ours, theirs in ((sp.roc_auc, "roc_auc_score"), (sp.average_precision, "average_precision_score")):
            expected = getattr(sklearn_metrics, theirs)(y[MASK].numpy(), scores[MASK, column].double().numpy())
            assert on_ranks(ours, ranks, scores[:, column], y) == pytest.approx(expected, abs=1e-12)
    y, given = LABELS[:, kept][MASK].numpy(), scores[:, kept]
    expected = sklearn_metrics.roc_auc_score(y, given[MASK].double().numpy())
    assert on_ranks(sp.roc_auc, ranks, given, LABELS[:, kept]) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(on_ranks(sp.roc_auc, ranks, scores, LABELS))  # column 4 has one class
    assert on_ranks(sp.average_precision, ranks, scores[:, 4], LABELS[:, 4]) == 0


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("as_mask", [False, True])
def test_entries_without_a_label_as_in_ogb(ranks, as_mask):
    """OGB's evaluators leave out NaN labels, and tasks of which only one class is labelled."""
    known = torch.rand(40, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    y = LABELS.double().where(known, torch.nan)
    found, use_mask = (LABELS, known & MASK[:, None]) if as_mask else (y, MASK)
    kept = known & MASK[:, None]

    def on_all(metric, given, **kwargs):
        def work(comm):
            own = [tensor.split(SPLITS[comm.size])[comm.rank] for tensor in (given, found, use_mask)]
            return metric(*own, comm, **kwargs)

        values = run(work, ranks)
        assert len(set(values)) == 1
        return values[0]

    for ours, theirs in ((sp.roc_auc, "roc_auc_score"), (sp.average_precision, "average_precision_score")):
        columns = [(LABELS[kept[:, i], i].numpy(), SCORES[kept[:, i], i].double().numpy()) for i in range(6) if i != 4]
        expected = np.mean([getattr(sklearn_metrics, theirs)(*column) for column in columns])
        assert on_all(ours, SCORES) == pytest.approx(expected, abs=1e-12)
    expected = (LOGITS.double() - LABELS.double())[kept].abs().mean().item()
    assert on_all(sp.mae, LOGITS) == pytest.approx(expected, abs=1e-12)
    expected = sklearn_metrics.f1_score(LABELS[kept].numpy(), (LOGITS > 0)[kept].numpy())
    assert on_all(sp.f1, LOGITS) == pytest.approx(expected, abs=1e-12)
    columns = [(LABELS[kept[:, i], i].numpy(), (LOGITS > 0)[kept[:, i], i].numpy()) for i in range(6)]
    expected = np.mean([sklearn_metrics.f1_score(*column, zero_division=0) for column in columns])
    assert on_all(sp.f1, LOGITS, average="macro") == pytest.approx(expected, abs=1e-12)


WRONG = {
    r"1 of 1 masked nodes have no label \(y = -100\)": (sp.f1, lambda t: (t, torch.tensor([-100]), None), {}),
    "average is 'micro', 'macro', 'weighted' or None": (
        sp.f1,
        lambda t: (t, CLASSES[:1], None),
        {"average": "binary"},
    ),
    r"y must be \[1, 6\] for logits \[1, 6\], found float64": (sp.f1, lambda t: (t, t[:, 0], None), {}),
    r"class ids must be in \[0, 6\), found 6": (sp.f1, lambda t: (t, torch.tensor([6]), None), {}),
    "y must hold zeros and ones, found 2": (sp.f1, lambda t: (t, torch.full((1, 6), 2), None), {}),
    "two tensors of one shape": (sp.mae, lambda t: (t, t[:, :1], None), {}),
    "1 of 6 scores are NaN": (sp.roc_auc, lambda t: (t.where(t != t[0, 0], torch.nan), LABELS[:1], None), {}),
    "y must hold zeros and ones, found 7": (sp.roc_auc, lambda t: (t, torch.full((1, 6), 7), None), {}),
    r"\[n\] or \[n, tasks\]": (sp.average_precision, lambda t: (t[None], t[None] > 0, None), {}),
    "bool mask must have one entry": (sp.roc_auc, lambda t: (t, t > 0, MASK), {}),
}


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.ranks(2)
def test_what_one_rank_does_wrong_is_raised_on_all(comm, words):
    metric, arguments, kwargs = WRONG[words]
    right = {sp.f1: (LOGITS, CLASSES, None)}.get(metric, (LOGITS, LABELS, None))
    given = arguments(LOGITS[:1]) if comm.rank == 1 else right
    with pytest.raises(ValueError, match=rf"{words}.*\(found on rank 1\)"):
        metric(*given, comm, **(kwargs if comm.rank == 1 else {}))


@pytest.mark.parametrize("metric", [sp.f1, sp.mae, sp.roc_auc, sp.average_precision])
@pytest.mark.ranks(2)
def test_no_rows_on_any_rank(comm, metric):
    with pytest.raises(ValueError, match="selects no node on any rank"):
        metric(LOGITS, LABELS.double(), torch.zeros(40, dtype=torch.bool), comm)
