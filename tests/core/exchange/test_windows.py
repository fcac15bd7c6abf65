"""Rows through shared memory: the numbers of messages to the bit, tokens instead of rows, memory used again."""

from contextlib import nullcontext
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from four_ranks import IDS, SOURCES, plan_of, return_all

from shardpass.backends import RecordingCommunicator
from shardpass.core.dryrun.communicator import DryCommunicator
from shardpass.core.dryrun.tracker import MemoryTracker
from shardpass.core.exchange import GradientReturn, WalkId, WindowPool, fetch_blocks, shares_all_rows, tokens, walk
from shardpass.core.exchange.windows import take_window
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import PlacedRows
from shardpass.errors import CommunicationError, DivergenceError
from shardpass.testing import run

HOSTS = {"one host": (0, 0, 0, 0), "two hosts": (0, 1, 0, 1), "three hosts": (0, 1, 1, 2)}

OPTIONS = [
    {},
    {"block_rows": 1, "prefetch": 0},
    {"block_rows": 2, "prefetch": 3},
    {"mode": "halo"},
    {"mode": "keep", "wire_dtype": torch.bfloat16},
]


def sharing(comm, hosts=(0, 0, 0, 0)):
    """`comm` as that of a process: it shares memory with the ranks of its host."""
    comm.inner.shares_memory = True
    comm.inner.local_ranks = tuple(rank for rank in range(comm.size) if hosts[rank] == hosts[comm.rank])
    return comm


def rows_of(comm, call):
    generator = torch.Generator().manual_seed(100 * call + comm.rank)
    own = [torch.randn(SOURCES.num_own(comm.rank), *tail, generator=generator) for tail in ((3,), (), (2, call))]
    return [own[0], own[1].to(torch.float64), own[2]]


def walks(comm, plan, calls, slow=None):
    """What came in and what came back: in every call rows are fetched twice, the second time with gradients back."""
    found = []
    for call in calls:
        own = rows_of(comm, call)
        fetched = [rows for _, _, rows in fetch_blocks(plan, own, WalkId(call, 1, "there"), keep=True)]
        into = [torch.zeros_like(tensor) for tensor in own]
        back = GradientReturn(plan, into, WalkId(call, 2, "back"))
        for position, _, rows in fetch_blocks(plan, own, WalkId(call, 3, "again")):
            if comm.rank == slow:
                sleep(0.002)
            if position:
                for buffer, kept, again in zip(back.buffers(position), fetched[position], rows):
                    assert torch.equal(kept, again)
                    buffer += again * (comm.rank + 1)
                back.send(position)
        back.finish()
        back.finish()  # nothing is left
        found += [*into, *(part for rows in fetched for part in rows)]
    return found


def in_turn(first):
    """Each of `OPTIONS` with one of `HOSTS`, beginning with the host of the number `first`."""
    hosts = [*HOSTS.values()]
    return [pytest.param(options, hosts[(i + first) % 3], id=str(options)) for i, options in enumerate(OPTIONS)]


@pytest.mark.parametrize(("options", "hosts"), in_turn(0))
@pytest.mark.ranks(4)
def test_the_numbers_of_messages_to_the_bit(comm, options, hosts):
    by_message = walks(comm, plan_of(comm, **options), (1, 2, 3))
    plan = plan_of(sharing(comm, hosts), **options)
    shared = walks(comm, plan, (4, 1, 2, 3), slow=2)[-len(by_message) :]
    assert plan.shared is not None and not comm.caches.of(WindowPool).refused
    assert len(comm.caches.of(WindowPool).windows) == 2, "rows and gradients at a time"
    assert all(torch.equal(a, b) for a, b in zip(by_message, shared, strict=True))


@pytest.mark.parametrize(("options", "hosts"), [*in_turn(0), *in_turn(2)])
def test_rows_may_be_used_where_they_lie(hosts, options):
    """With `placed`, rows of the same host are a table and places in it, but where they are kept or converted."""

    def work(inner):
        comm = Ranks(RecordingCommunicator(sharing(inner, hosts)))
        plan, seen = plan_of(comm, **options), 0
        for call in (1, 2, 3):
            own = [tensor.contiguous() for tensor in rows_of(comm, call)]
            every = [rows for _, _, rows in fetch_blocks(plan, own, WalkId(call, 1, "kept"), keep=True)]
            for position, block, rows in fetch_blocks(plan, own, WalkId(call, 2, "placed"), placed=True):
                comm.barrier()  # every owner would have written again if it could
                for kept, found in zip(every[position], rows, strict=True):
                    if isinstance(found, PlacedRows):
                        seen += 1
                        assert hosts[block.owner] == hosts[comm.rank]
                        found = found.table[found.places.long()]
                    assert torch.equal(kept, found)
        waits = [m.label for m in comm.inner.messages if m.kind == "barrier" and "in shared memory (" in m.label]
        assert len(waits) == 6, "one for each walk, when all is written"
        return seen

    seen = run(work, 4)
    if options.get("mode") in ("halo", "keep"):  # whole, or as bfloat16
        assert sum(seen) == 0
    elif hosts == HOSTS["one host"]:
        assert seen[0] and seen[1] and seen[3]


class Strict(RecordingCommunicator):
    """Takes no message without both peers: a transport may look at the one to which nothing goes."""

    def exchange(self, send, to, recv, source, tag, label=""):
        assert {to, source} <= set(range(self.size))
        return super().exchange(send, to, recv, source, tag, label)


def payload(comm, plan):
    before = comm.bytes_sent
    list(fetch_blocks(plan, [torch.zeros(SOURCES.num_own(comm.rank), 100)], WalkId(1, 0, "test")))
    return comm.bytes_sent - before


@pytest.mark.ranks(4)
def test_tokens_instead_of_rows(comm):
    comm = Ranks(Strict(sharing(comm)))
    assert payload(comm, plan_of(comm, share_memory=False)) == sum(400 * len(rows) for rows in IDS_OF[comm.rank])
    plan = plan_of(comm)
    del comm.inner.messages[:]
    payload(comm, plan)
    assert [m.kind for m in comm.inner.messages] == ["share", "barrier"], "no rows, and no notices"
    assert comm.inner.messages[1].label.endswith(" in shared memory (float32 [100]): test"), "what an error says"
    del comm.inner.messages[:]
    payload(comm, plan)
    read = "test: shared memory has been read"
    assert [m.label for m in comm.inner.messages if m.label == read] == [read], "nothing is written while they read"
    comm.barrier("any")
    del comm.inner.messages[:]
    payload(comm, plan)
    assert [m.kind for m in comm.inner.messages] == ["barrier"], "they have read before the last collective"
    del comm.inner.messages[:]
    peers = sum(len(rows) > 0 for rows in plan.send_rows)
    owners = sum(block.num_rows > 0 for block in plan.blocks[1:])
    return_all(plan, [torch.zeros(SOURCES.num_own(comm.rank), 100)], WalkId(2, 0, "back"))
    awaited = [m.peer for m in comm.inner.messages if m.kind == "recv" and m.label.endswith("has read")]
    assert sorted(awaited) == sorted(block.owner for block in plan.blocks[1:] if block.num_rows)
    sent = [m for m in comm.inner.messages if m.kind == "send"]
    assert all(m.num_bytes == 4 for m in sent)
    returned = [m.label for m in sent]
    assert len(returned) == peers + owners, "none where nothing returns"
    assert sum(label == f"back, rank {comm.rank} has read" for label in returned) == peers


@pytest.mark.parametrize(("hosts", "block_rows"), [*zip([*HOSTS.values(), (0, 1, 2, 3)], [2, None, 2, None])])
def test_which_rows_are_shared(hosts, block_rows):
    """Those that ranks of the same host need, and no others."""

    def work(inner):
        comm = Ranks(RecordingCommunicator(sharing(inner, hosts)))
        assert shares_all_rows(comm) == (len(set(hosts)) == 1)
        plan = plan_of(comm, block_rows=block_rows)
        labels = ["halo plan: needed rows", "halo plan", "halo plan: shared rows", "halo plan: sizes of shared memory"]
        assert [m.label for m in comm.inner.messages] == labels
        return plan

    plans = run(work, 4)
    if len(set(hosts)) == 4:
        assert all(plan.shared is None for plan in plans)
        return
    for p, plan in enumerate(plans):
        here = [q for q in range(4) if q != p and hosts[q] == hosts[p]]
        wanted = {row for q in here for row in plan.send_rows[q].tolist()}
        assert plan.shared.rows.tolist() == sorted(wanted)
        assert plan.shared.published == tuple(len(other.shared.rows) for other in plans)
        for q in range(4):
            found = plans[q].shared.rows[plan.shared.places[q].long()]
            assert torch.equal(found, plans[q].send_rows[p] if q in here else found[:0])
        blocks = [block.num_rows for block in plan.blocks[1:] if block.owner in here]
        assert plan.shared.returned[p] == max(blocks, default=0)


@pytest.mark.parametrize("back", [False, True], ids=["rows", "gradients"])
def test_rows_of_other_widths_are_told(back):
    """Memory would be read as whatever the reader takes it for; a message has a length."""

    def work(inner):
        comm = sharing(inner)
        plan, wide = plan_of(comm), comm.rank != 3
        rows = torch.zeros(SOURCES.num_own(comm.rank), 8 if wide and not back else 4)
        for position, _, _ in fetch_blocks(plan, [rows], WalkId(1, 0, "sums")):
            if back and not position:
                returned = GradientReturn(plan, [rows.double() if wide else rows], WalkId(1, 1, "gradients"))
            if back and position:
                returned.buffers(position)
                returned.send(position)
        if back:
            returned.finish()

    both = r"in shared memory \(float32 \[8\]\).*\(float32 \[4\]\)"
    one = r"rank \d reads rows of other widths or dtypes than rank \d has written"
    with pytest.raises(DivergenceError, match=one if back else both):
        run(work, 4)


IDS_OF = [[[i for i in set(IDS[p]) if SOURCES.offsets[q] <= i < SOURCES.offsets[q + 1]] for p in range(4) if p != q]
          for q in range(4)]  # fmt: skip


@pytest.mark.parametrize("options", [{"share_memory": False}, {}], ids=str)
@pytest.mark.ranks(4)
def test_communicators_that_share_nothing(comm, options):
    """Threads, and everybody on request: messages, and not one collective more."""
    comm = comm if not options else sharing(comm)
    comm = Ranks(RecordingCommunicator(comm))
    assert plan_of(comm, **options).shared is None
    assert [m.label for m in comm.inner.messages] == ["halo plan: needed rows", "halo plan"]


@pytest.mark.ranks(4)
def test_no_memory_on_one_rank_means_messages_on_all(comm):
    comm = Ranks(RecordingCommunicator(sharing(comm)))
    plan = plan_of(comm)
    comm.share = lambda num_bytes, label: comm.barrier(label)
    assert payload(comm, plan) == sum(400 * len(rows) for rows in IDS_OF[comm.rank])
    assert comm.caches.of(WindowPool).refused and comm.caches.of(WindowPool).windows == []
    del comm.inner.messages[:]
    payload(comm, plan)
    assert {m.kind for m in comm.inner.messages} <= {"send", "recv"}, "asked once"
    assert not shares_all_rows(comm)


@pytest.mark.ranks(4)
def test_memory_is_used_again_and_grows(comm):
    sharing(comm)
    sizes = [[0, 10, 20, 30], [0, 10, 20, 30], [5, 5, 5, 5], [1, 1, 1, 1]]
    found = []
    for call, wanted in enumerate(sizes, start=1):
        window = take_window(comm, wanted, call, "test")
        found.append(window)
        assert [len(window.memory[rank]) for rank in range(4)] == list(window.sizes)
        window.give_back()
    assert found[0] is found[1] is not found[2] is found[3]
    assert found[2].sizes == (5, 10, 20, 30) and found[1].memory == {}
    first, second = (take_window(comm, [1] * 4, 9, "test") for _ in range(2))
    assert first is found[3] and second is not first and second.sizes == (1, 1, 1, 1)
    second.give_back()
    first.give_back()
    assert take_window(comm, [1] * 4, 9, "test") is second, "the smallest that does"
    left = take_window(comm, [1] * 4, 9, "test")
    assert left is first
    assert take_window(comm, [1] * 4, 10, "test") not in (first, second), "call 9 has left them"
    assert take_window(comm, [0] * 4, 10, "test") is None


def test_the_planner_tells_windows_from_other_memory():
    with MemoryTracker() as tracker:
        window = take_window(Ranks(DryCommunicator(2, per_host=2)), [8, 8], 1, "test")
    assert window is not None and [storage.is_message for storage in tracker.storages] == [True]


@pytest.mark.parametrize("is_profiled", [False, True])
def test_a_profiler_sees_waits_and_no_notice_outlives_it(monkeypatch, is_profiled):
    names = []
    monkeypatch.setattr(walk, "torch_private", SimpleNamespace(span=lambda name: names.append(name) or nullcontext()))
    monkeypatch.setattr(tokens, "torch_private", SimpleNamespace(is_profiled=lambda: is_profiled))

    def work(comm):
        walks(comm, plan_of(sharing(comm)), (1,))
        return sum(len(window.readers) for window in comm.caches.of(WindowPool).windows)

    assert any(run(work, 4)) != is_profiled
    assert names.count("wait for rows in shared memory (there)") == 4


def test_ranks_in_different_calls_are_told():
    def work(comm):
        plan = plan_of(sharing(comm))
        walks(comm, plan, (1,))
        list(fetch_blocks(plan, rows_of(comm, 2), WalkId(2, comm.rank == 3, f"call of rank {comm.rank == 3}")))

    with pytest.raises(CommunicationError, match="call of rank"):
        run(work, 4, timeout=10)
