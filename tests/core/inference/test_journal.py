"""The journal of a forward: what every rank has is read, the rest is computed, and another run begins anew."""

import json
import shutil

import pytest
import torch

from shardpass import connect
from shardpass.backends import RecordingCommunicator
from shardpass.core.inference import row_sources
from shardpass.core.inference.deferred import Deferral, DeferredRows, whole
from shardpass.core.inference.journal import Journal
from shardpass.core.inference.row_sources import StoredRows
from shardpass.core.ranks import Ranks
from shardpass.errors import RefusedError
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
    assert run(lambda comm: forward(comm, tmp_path, "a"), 1) == [[0, 1, 2]]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0"]
    assert run(lambda comm: forward(comm, tmp_path, "b"), 2) == [[0, 1, 2]] * 2
    assert run(lambda comm: forward(comm, tmp_path, "b"), 2) == [[], []]


DAMAGE = {
    "a flipped bit": lambda data: data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
    "a flipped bit in the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "torn": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_result_is_computed_again_and_this_is_said(how, tmp_path):
    run(lambda comm: forward(comm, tmp_path, "a"), 2)
    entry = tmp_path / "rank-1" / "call-0001.safetensors"
    entry.write_bytes(DAMAGE[how](entry.read_bytes()))
    with pytest.warns(UserWarning, match="rank 1: .*call-0001.safetensors.* computed again"):
        assert run(lambda comm: forward(comm, tmp_path, "a"), 2) == [[1, 2]] * 2
    assert run(lambda comm: forward(comm, tmp_path, "a"), 2) == [[], []]


@pytest.mark.parametrize("other", [{"number": 0}, {"fingerprint": "b"}], ids=["call", "inference"])
def test_a_whole_result_in_the_place_of_another_is_computed_again(other, tmp_path):
    run(lambda comm: forward(comm, tmp_path / "a", "a"), 2)
    run(lambda comm: forward(comm, tmp_path / "b", other.get("fingerprint", "a")), 2)
    entry = "rank-0/call-{:04}.safetensors"
    shutil.copy(tmp_path / "b" / entry.format(other.get("number", 1)), tmp_path / "a" / entry.format(1))
    with pytest.warns(
        UserWarning, match=r"rank 0: .*call-0001.safetensors' is of another call. What it held is comput"
    ):
        assert run(lambda comm: forward(comm, tmp_path / "a", "a"), 2) == [[1, 2]] * 2


def test_what_lies_on_the_disk_and_what_ranks_agree_on(tmp_path):
    """A journal that another release has begun goes on."""

    def work(inner):
        comm = Ranks(RecordingCommunicator(inner))
        Journal(tmp_path, comm, "a").result("call", lambda: rows(comm.rank, 1))
        return [message.label for message in comm.inner.messages]

    assert run(work, 2) == [["journal: results kept", "journal: calls kept"]] * 2
    assert sorted(path.name for path in (tmp_path / "rank-1").iterdir()) == ["call-0000.safetensors", "journal.json"]
    assert json.loads((tmp_path / "rank-1" / "journal.json").read_text()) == {"fingerprint": "a", "ranks": 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_says_that_results_of_an_earlier_run_are_used(ranks, tmp_path):
    with pytest.warns(UserWarning) as told:
        run(lambda comm: forward(comm, tmp_path, "a"), ranks)
        run(lambda comm: forward(comm, tmp_path, "a"), ranks)
    found = [str(warning.message) for warning in told if "an earlier run" in str(warning.message)]
    assert len(found) == 1 and found[0].startswith(f"'{tmp_path}'") and "the results of its first 3 calls" in found[0]


def test_calls_with_several_results_and_calls_that_are_refused_at_first(tmp_path):
    """A caller that is refused may know another way, which is the same call."""

    def refused():
        raise RefusedError("not so")

    def work(comm):
        journal, computed = Journal(tmp_path, comm, "a"), []
        for call in range(3):
            if call and journal.num_known < 3:
                with pytest.raises(RefusedError, match="not so"):
                    journal.result("another way", refused)
            several = tuple(rows(comm.rank, 10 * call + k) for k in range(12))  # in order, not by their names
            found = journal.result("call", lambda several=several: computed.append(1) or several)
            assert type(found) is tuple and all(map(torch.equal, found, several)) and len(found) == 12
        return len(computed)

    assert run(work, 2) == [3, 3]
    assert run(work, 2) == [0, 0]


def test_strangers_in_the_folder_are_left_alone(tmp_path):
    for name in ("rank-x", "rank-", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "rank-7").write_text("a file")
    run(lambda comm: forward(comm, tmp_path, "a"), 2)
    assert {path.name for path in tmp_path.iterdir()} == {"rank-x", "rank-", "rank-7", "other", "rank-0", "rank-1"}


def test_a_folder_that_cannot_be_used_is_said_on_every_rank(tmp_path):
    (tmp_path / "rank-1").write_text("a file")
    with pytest.raises(OSError, match="found on rank 1"):
        run(lambda comm: forward(comm, tmp_path, "a"), 2)


def test_each_call_is_told_and_a_removed_journal_leaves_nothing(tmp_path):
    folder, told = tmp_path / "run", []

    def work(comm):
        journal = Journal(folder, comm, "a", told.append if comm.rank == 0 else None)
        for name in ("first", "second"):
            journal.result(name, lambda: rows(comm.rank, 1))
        comm.barrier()
        journal.remove()
        journal.remove()  # nothing is left

    run(work, 2)
    assert told == ["first", "second"] and not folder.exists()


TABLE = torch.arange(2000.0).view(1000, 2)  # eight blocks


@torch.no_grad()
def test_deferred_results_stay_in_their_files_until_the_forward_begins_again(tmp_path, monkeypatch):
    monkeypatch.setattr(row_sources, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(row_sources, "hold", None)  # which would make rows as a whole, before they are written
    comm, ones = connect("local"), (torch.Tensor.new_full, (TABLE, (1000, 2)), {"fill_value": 1.0})

    def calls(journal):
        first = journal.result("first", lambda: journal.filled(*ones) * 3)
        return first, *journal.result("second", lambda: (journal.deferred([TABLE])[0] + 1, TABLE))

    for deferral in (Deferral(), Deferral(), None):  # the first computes, the others read
        journal = Journal(tmp_path, comm, "a", deferral=deferral)
        found = calls(journal)
        assert all(map(torch.equal, map(whole, found), (torch.full_like(TABLE, 3), TABLE + 1, TABLE)))
        assert deferral is None or all(isinstance(rows.rows, StoredRows) for rows in found)
        assert deferral is None or isinstance(journal.deferred([TABLE])[0], DeferredRows)
        (read,) = journal.operands({"rows": found[0]})
        assert type(read["rows"]) is torch.Tensor and torch.equal(read["rows"], torch.full_like(TABLE, 3))
        journal.begin_again()
        assert {type(rows) for rows in calls(journal)} == {torch.Tensor}
        assert journal.deferred([TABLE])[0] is TABLE and torch.equal(journal.filled(*ones), torch.ones(1000, 2))


@pytest.mark.parametrize("deferral", [None, Deferral()], ids=["in memory", "deferred"])
def test_results_are_read_to_the_device_of_the_ranks(deferral, tmp_path):
    comm = connect("local")
    Journal(tmp_path, comm, "a").result("call", lambda: TABLE)
    comm.inner.device = torch.device("meta")
    found = Journal(tmp_path, comm, "a", deferral=deferral).result("call", lambda: TABLE)
    assert found.device == comm.device and found.shape == TABLE.shape
