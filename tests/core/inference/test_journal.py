"""The journal of a forward: what every rank has is read, the rest is computed, and another run begins anew."""

from __future__ import annotations

import torch

from shardpass.core.inference.journal import Journal
from shardpass.testing import run


def rows(rank, call):
    return torch.full((rank + 1, 2), float(call))


def forward(comm, folder, fingerprint, calls=3):
    """The calls that were computed, out of `calls`; the results are checked."""
    journal, computed = Journal(folder, comm, fingerprint), []

    def compute(call):
        computed.append(call)
        return rows(comm.rank, call)

    for call in range(calls):
        assert torch.equal(journal.result(f"call {call}", lambda call=call: compute(call)), rows(comm.rank, call))
    return computed


def test_calls_that_every_rank_has_are_read(tmp_path):
    def work(comm):
        first = forward(comm, tmp_path, "a", calls=2 + comm.rank)  # rank 0 ended after two calls
        comm.barrier()
        return first, forward(comm, tmp_path, "a")

    assert run(work, 2) == [([0, 1], [2]), ([0, 1, 2], [2])]


def test_another_fingerprint_or_number_of_ranks_begins_anew(tmp_path):
    run(lambda comm: forward(comm, tmp_path, "a"), 3)
    assert run(lambda comm: forward(comm, tmp_path, "a"), 2) == [[0, 1, 2]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    assert run(lambda comm: forward(comm, tmp_path, "b"), 2) == [[0, 1, 2]] * 2
    assert run(lambda comm: forward(comm, tmp_path, "b"), 2) == [[], []]


def test_each_call_is_told_and_a_removed_journal_leaves_nothing(tmp_path):
    folder, told = tmp_path / "run", []

    def work(comm):
        journal = Journal(folder, comm, "a", told.append if comm.rank == 0 else None)
        for name in ("first", "second"):
            journal.result(name, lambda: rows(comm.rank, 1))
        comm.barrier()
        journal.remove()

    run(work, 2)
    assert told == ["first", "second"] and not folder.exists()
