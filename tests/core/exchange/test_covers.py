"""Minimum vertex covers, beside those that trying all sets finds."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardpass.core.exchange import minimum_cover

pytest.importorskip("scipy")
EDGES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=14)


def smallest(edges):
    vertices = sorted({("src", s) for s, _ in edges} | {("dst", d) for _, d in edges})
    tried = (of for n in range(len(vertices) + 1) for of in combinations(vertices, n))
    return len(next(of for of in tried if all({("src", s), ("dst", d)} & {*of} for s, d in edges)))


@given(EDGES)
def test_a_cover_is_the_smallest(edges):
    src, dst = torch.tensor(edges, dtype=torch.int64).view(-1, 2).T
    is_source, is_destination = minimum_cover(src, dst, 5, 4)
    assert bool((is_source[src] | is_destination[dst]).all())
    assert int(is_source.sum() + is_destination.sum()) == smallest(edges)


@pytest.mark.parametrize("hub", [0, 1])
def test_a_hub_covers_its_edges_alone(hub):
    ends = torch.zeros(9, dtype=torch.int64), torch.arange(9)
    found = minimum_cover(*(ends if hub == 0 else ends[::-1]), 9, 9)
    assert [int(one.sum()) for one in found] == ([1, 0] if hub == 0 else [0, 1])
