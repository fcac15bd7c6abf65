"""Checksums by which tensors are found again, and by which ranks compare their data."""

import subprocess
import sys

import pytest
import torch

from shardpass.core.ranks import checksum

SIZES = [1, 3, 1023, 1024, 1025, 40 * 1024 + 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", SIZES)
def test_small_changes_are_seen(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(1, 100, (size,), generator=generator).to(dtype)
    known = checksum(tensor)
    assert checksum(tensor.clone()) == known
    for _ in range(20):
        first, second = torch.randint(size, (2,), generator=generator).tolist()
        negated, swapped, added = tensor.clone(), tensor.clone(), tensor.clone()
        negated[[first, second]] = -negated[[first, second]]
        swapped[[first, second]] = swapped[[second, first]]
        added[first] += 1
        for changed in (negated, swapped, added):
            assert torch.equal(changed, tensor) == (checksum(changed) == known)


def test_places_that_make_a_rectangle_are_seen() -> None:
    tensor = torch.zeros(8 * 1024, dtype=torch.float64)
    tensor[[5, 1024 + 9]] = 1
    other = torch.zeros_like(tensor)
    other[[9, 1024 + 5]] = 1
    assert checksum(tensor) != checksum(other)


def test_lengths_differ() -> None:
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4)) and checksum(torch.ones(2, 3).T) != 0


def test_processes_agree() -> None:
    program = "import torch; from shardpass.core.ranks import checksum; print(checksum(torch.arange(5000)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(found) == checksum(torch.arange(5000))
