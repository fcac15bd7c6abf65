"""Who owns which node."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardpass.core.sharding import Ownership

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(COUNTS)
def test_every_id_has_one_owner_and_comes_back(counts):
    ownership = Ownership.from_counts(counts)
    assert ownership.num_ranks == len(counts) and ownership.num_total == sum(counts)
    assert [ownership.num_own(r) for r in range(len(counts))] == counts
    ids = torch.arange(sum(counts))
    expected = [rank for rank, count in enumerate(counts) for _ in range(count)]
    owners = ownership.owner_of(ids)
    assert owners.tolist() == expected and owners.dtype == torch.int64
    for rank, count in enumerate(counts):
        assert torch.equal(ownership.to_global(torch.arange(count), rank), ids[owners == rank])


def test_ids_keep_their_shape_and_may_be_int32():
    ownership = Ownership((0, 0, 2, 2, 5))
    ids = torch.tensor([[4, 0], [1, 2]], dtype=torch.int32)
    assert ownership.owner_of(ids).tolist() == [[3, 1], [1, 3]]
    assert ownership.owner_of(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)
    assert Ownership((0, 0, 0)).owner_of(torch.empty(0, dtype=torch.int64)).tolist() == []
