"""The planner: what it adds up, what it picks, what it says; how sizes are read."""

from __future__ import annotations

import pytest
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.core.dryrun.units import bytes_text, parse_bytes, parse_count

COUNTS = sp.GraphCounts(nodes=40_000, edges=400_000, num_features=16, num_classes=3)


def gat():
    return GAT(16, 32, 2, 3, heads=4)


@pytest.fixture(scope="module")
def planned():
    return sp.plan(gat(), COUNTS, ranks=[4, 8])


def test_terms_are_summed_and_none_is_negative(planned):
    for row in planned.rows:
        assert row.training == sum(row.terms.values()) and min(row.terms.values()) >= 0
        assert row.peak >= row.training > row.above_loaded > 0


def test_keeping_rows_needs_more_and_more_ranks_need_less(planned):
    for ranks in (4, 8):
        sar, keep, halo = (planned.on(ranks, mode) for mode in ("sar", "keep", "halo"))
        assert sar.training <= keep.training <= halo.training
        assert sar.fetched > keep.fetched == halo.fetched
    assert planned.on(8, "sar").training < planned.on(8, "keep").training  # of few large blocks sar has as many at once
    assert planned.on(8, "sar").peak < planned.on(4, "sar").peak


def test_features_are_as_many_bytes_as_there_are():
    row = sp.plan(gat(), COUNTS, ranks=[4], modes=["sar"]).rows[0]
    assert row.terms["features"] == pytest.approx(10_000 * (16 * 4 + 8 + 1), rel=0.01)


@pytest.mark.parametrize("text, count", [("6GiB", 6 << 30), ("512MB", 512_000_000), (1e9, 10**9), ("1.5 kib", 1536)])
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "six", "6 GiBs", "-1GB", 0, "0", True, float("nan"), float("inf")])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a number of bytes"):
        parse_bytes(text)


def test_counts_are_read():
    assert (parse_count("111M"), parse_count("3.2B"), parse_count("50_000")) == (111_000_000, 3_200_000_000, 50_000)
    assert bytes_text(6 << 30) == "6.00 GiB"
