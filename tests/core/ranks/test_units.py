"""Sizes and counts as people write them."""

import pytest
import torch

from shardpass.core.ranks import bytes_text, is_out_of_memory, memory_error, parse_bytes, parse_count


@pytest.mark.parametrize("text, count", [("6GiB", 6 << 30), ("512MB", 512_000_000), (1e9, 10**9), ("1.5 kib", 1536)])
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


def test_counts_are_read():
    assert (parse_count("111M"), parse_count("3.2B"), parse_count("50_000")) == (111_000_000, 3_200_000_000, 50_000)
    assert bytes_text(6 << 30) == "6.00 GiB"


def test_a_lack_of_memory_is_known_and_found_behind_what_is_raised_while_it_is_handled():
    lack = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ValueError) as caught:
        try:
            raise lack
        except RuntimeError:
            raise ValueError("the index is wrong")  # noqa: B904
    assert memory_error(caught.value) is lack is memory_error(lack) and memory_error(ValueError("wrong")) is None
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("the sizes do not fit"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
