"""Sizes and counts as people write them."""

from __future__ import annotations

import pytest

from shardpass.core.ranks.units import bytes_text, parse_bytes, parse_count


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
