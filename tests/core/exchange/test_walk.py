"""The exchange: several tensors in one message, buffers used again, exact bytes, one gradient return at a time."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from four_ranks import SOURCES, numbering, plan_of, return_all

from shardpass.backends import RecordingCommunicator
from shardpass.core.dryrun.communicator import DryCommunicator
from shardpass.core.dryrun.tracker import MemoryTracker
from shardpass.core.exchange import GradientReturn, Packing, WalkId, build_halo_plan, fetch_blocks, walk
from shardpass.core.exchange.packing import message_buffer
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import Ownership
from shardpass.errors import CommunicationError, InternalError
from shardpass.testing import run

DTYPES = [torch.bool, torch.float64, torch.uint8, torch.bfloat16, torch.int64, torch.float32, torch.float16]


class Counting(RecordingCommunicator):
    """Knows how many exchanges are under way, and how many at most; none may use a buffer of another one."""

    def __init__(self, inner):
        super().__init__(inner)
        self.busy, self.buffers, self.most = [], set(), 0

    @property
    def under_way(self):
        return len(self.busy)

    def exchange(self, send, to, recv, source, tag, label=""):
        mine = [t.untyped_storage().data_ptr() for t in (send, recv) if t is not None and t.numel()]
        assert not set(mine) & {pointer for other in self.busy for pointer in other}
        handle, busy = super().exchange(send, to, recv, source, tag, label), self.busy
        busy.append(mine)
        self.buffers |= set(mine)
        self.most = max(self.most, len(busy))

        class Waited:
            def wait(self, timeout=None):
                handle.wait(timeout)
                busy.remove(mine)

        return Waited()


def table(dtype, width, seed):
    """One row per node of the whole graph, all rows different."""
    count = SOURCES.num_total
    values = (torch.arange(count).view(-1, *[1] * len(width)) * 3 + seed).expand(count, *width)
    return (values % 2 == 0 if dtype is torch.bool else values).to(dtype)


def tables():
    widths = [(3,), (2,), (), (2, 5), (1,), (0,), (7,)]
    return [table(dtype, width, k) for k, (dtype, width) in enumerate(zip(DTYPES, widths))]


def own(comm, tensors):
    first, last = SOURCES.offsets[comm.rank], SOURCES.offsets[comm.rank + 1]
    return [t[first:last] for t in tensors]


OPTIONS = [{"mode": ("sar", "halo")[i % 2], "block_rows": rows, "prefetch": ahead}
           for i, (rows, ahead) in enumerate(itertools.product((None, 1, 2), (0, 1, 3)))]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.ranks(4)
def test_several_tensors_of_different_dtypes(comm, options):
    whole = tables()
    plan = plan_of(comm, **options)
    ids, seen = numbering(comm.rank), []
    for position, block, rows in fetch_blocks(plan, own(comm, whole), WalkId(1, 0, "test")):
        assert block == plan.blocks[position] and len(rows) == len(whole)
        for found, tensor in zip(rows, whole):
            assert found.dtype == tensor.dtype and found.shape == (block.num_rows, *tensor.shape[1:])
            assert torch.equal(found, tensor[ids[block.start : block.stop]])
        seen += ids[block.start : block.stop]
    assert sorted(seen) == sorted(ids)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.ranks(4)
def test_rows_stay_valid_as_long_as_promised(comm, keep, ahead):
    """Kept rows for ever; others until the next step, while later messages arrive as early as they can."""
    whole = [table(torch.float64, (3,), 0)]
    plan = plan_of(comm, block_rows=1, prefetch=ahead)
    ids, held, storages = numbering(comm.rank), [], set()
    for _, block, (rows,) in fetch_blocks(plan, own(comm, whole), WalkId(1, 0, "test"), keep=keep):
        comm.barrier()  # everything that is posted may have arrived
        assert torch.equal(rows, whole[0][ids[block.start : block.stop]])
        held.append((rows, ids[block.start : block.stop]))
        if block.num_rows and block.owner != comm.rank:
            storages.add(rows.untyped_storage().data_ptr())
    if keep:
        assert all(torch.equal(rows, whole[0][wanted]) for rows, wanted in held)
    else:
        assert len(storages) <= ahead + 1, "buffers are used again"


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
@pytest.mark.ranks(4)
def test_no_more_messages_under_way_than_allowed(comm, ahead):
    comm = Counting(comm)
    plan = plan_of(Ranks(comm), block_rows=1, prefetch=ahead)
    list(fetch_blocks(plan, own(comm, [table(torch.float32, (2,), 0)]), WalkId(1, 0, "test")))
    rounds = len(plan.schedule.rounds)
    assert comm.most == min(max(1, ahead), rounds) and comm.under_way == 0 and rounds > 4


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.ranks(4)
def test_messages_under_way_have_buffers_of_their_own(comm, ahead):
    """A transport may read what is sent until the wait; then the buffer is used again."""
    comm = Counting(comm)
    plan = plan_of(Ranks(comm), block_rows=1, prefetch=ahead)
    list(fetch_blocks(plan, own(comm, [table(torch.float32, (2,), 0)]), WalkId(1, 0, "test")))
    assert len(comm.buffers) <= ahead + 1 + max(1, ahead)
    comm.buffers.clear()
    returned(comm, plan)
    assert len(comm.buffers) <= 3


@pytest.mark.ranks(4)
def test_one_round_in_halo_mode_posts_everything(comm):
    comm = Counting(comm)
    plan = plan_of(Ranks(comm), mode="halo", block_rows=1)
    next(rounds := fetch_blocks(plan, own(comm, [table(torch.float32, (2,), 0)]), WalkId(1, 0, "test")))
    next(rounds)
    assert comm.most == len(plan.schedule.rounds)
    list(rounds)


@pytest.mark.parametrize("options", [{}, {"block_rows": 2}, {"mode": "halo"}], ids=str)
@pytest.mark.ranks(4)
def test_bytes_on_the_wire(comm, options):
    """Without tensors of odd alignment: rows times bytes per row, in both directions; nothing for empty pairs."""
    whole = [table(torch.float64, (3,), 0), table(torch.float32, (2, 2), 1), table(torch.int64, (), 2)]
    row_bytes = 3 * 8 + 4 * 4 + 8
    comm = Ranks(RecordingCommunicator(comm))
    plan = plan_of(comm, **options)
    del comm.inner.messages[:]
    before = comm.bytes_sent
    list(fetch_blocks(plan, own(comm, whole), WalkId(1, 0, "test")))
    fetched = comm.bytes_sent - before
    sent = sum(m.num_bytes for m in comm.inner.messages if m.kind == "send")
    received = sum(m.num_bytes for m in comm.inner.messages if m.kind == "recv")
    assert fetched == sent == row_bytes * sum(rows.numel() for rows in plan.send_rows)
    assert received == row_bytes * plan.num_halo
    received_from = {m.peer for m in comm.inner.messages if m.kind == "recv"}
    assert received_from == {b.owner for b in plan.blocks[1:] if b.num_rows}
    assert all(m.num_bytes for m in comm.inner.messages)
    assert {m.label for m in comm.inner.messages} <= {f"test, round {k}" for k in range(len(plan.schedule.rounds))}

    for wire, width in ((None, 12), (torch.bfloat16, 6)):
        plan = plan_of(comm, **options, wire_dtype=wire)
        del comm.inner.messages[:]
        into = torch.zeros(SOURCES.num_own(comm.rank), 3)
        return_all(plan, [into], WalkId(1, 1, "back"), lambda buffer: buffer.fill_(1 / 3))
        rounds = {f"back, round {k}" for k in range(len(plan.schedule.rounds))}
        assert {m.label for m in comm.inner.messages} <= rounds
        sizes = {kind: sum(m.num_bytes for m in comm.inner.messages if m.kind == kind) for kind in ("send", "recv")}
        assert sizes["send"] == width * plan.num_halo
        assert sizes["recv"] == width * sum(map(len, plan.send_rows))
        third = torch.tensor(1 / 3, dtype=wire or torch.float32).float()
        counts = torch.zeros(len(into)).index_add_(0, torch.cat(plan.send_rows), torch.ones(sizes["recv"] // width))
        torch.testing.assert_close(into, (counts * third).view(-1, 1).expand_as(into), rtol=1e-6, atol=0)


def test_a_profile_names_the_rounds(monkeypatch):
    names = [[] for _ in range(4)]
    span = lambda name: names[ranks[get_ident()]].append(name) or nullcontext()  # noqa: E731
    monkeypatch.setattr(walk, "torch_private", SimpleNamespace(span=span))
    ranks = {}

    def work(comm):
        ranks[get_ident()] = comm.rank
        plan = plan_of(comm)
        list(fetch_blocks(plan, own(comm, tables()), WalkId(1, 0, "there")))
        return_all(plan, [torch.zeros(SOURCES.num_own(comm.rank), 3)], WalkId(1, 1, "back"))

    run(work, 4)
    blocks = [f"{what} block {k} (there)" for k in (1, 2, 3) for what in ("wait for", "compute")]
    sends = [f"send in round {k} (there)" for k in range(3)]
    backs = [f"wait for gradients of round {k} (back)" for k in range(3)]
    assert all(sorted(found) == sorted([*sends, "compute own block (there)", *blocks, *backs]) for found in names)


@pytest.mark.ranks(1)
def test_without_rounds_there_is_the_own_block(comm, monkeypatch):
    names = []
    monkeypatch.setattr(walk, "torch_private", SimpleNamespace(span=lambda name: names.append(name) or nullcontext()))
    plan, _ = build_halo_plan(comm, Ownership.from_counts([3]), torch.tensor([2, 0, 2]), 3, Options())
    mine = torch.ones(3, 2)
    ((position, block, (rows,)),) = fetch_blocks(plan, [mine], WalkId(1, 0, "there"))
    assert (position, block) == (0, plan.blocks[0]) and torch.equal(rows, mine)
    GradientReturn(plan, [mine], WalkId(1, 1, "back")).finish()
    assert torch.equal(mine, torch.ones(3, 2)), "nothing returns"
    assert names == ["compute own block (there)"]


@pytest.mark.ranks(4)
def test_no_tensors_no_messages(comm):
    comm = Ranks(RecordingCommunicator(comm))
    plan = plan_of(comm)
    del comm.inner.messages[:]
    steps = [(position, rows) for position, _, rows in fetch_blocks(plan, [], WalkId(1, 0, "test"))]
    assert steps == [(position, []) for position in range(len(plan.blocks))]
    back = GradientReturn(plan, [], WalkId(1, 1, "back"))
    back.send(1)
    back.finish()
    assert comm.inner.messages == []


def returned(comm, plan, dtype=torch.float32, pause=False):
    """Own rows plus everything that came back, when every rank returns numbers of its own for each halo row."""
    generator = torch.Generator().manual_seed(comm.rank)
    into = [torch.rand(SOURCES.num_own(comm.rank), 3, generator=generator).to(dtype)]
    start = into[0].clone()
    back = GradientReturn(plan, into, WalkId(2, 1, "back"))
    sent = torch.zeros(plan.num_src, 3, dtype=dtype)
    for position, block in enumerate(plan.blocks[1:], start=1):
        (rows,) = back.buffers(position)
        assert bool((rows == 0).all()) and rows.shape == (block.num_rows, 3)
        rows += torch.rand(rows.shape, generator=generator).to(dtype)
        sent[block.start : block.stop] = rows
        if pause:
            comm.barrier()
        back.send(position)
        if pause:
            comm.barrier()
    back.finish()
    back.finish()  # nothing is left
    return start, sent, into[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_return_to_their_owners(options):
    def work(comm):
        plan = plan_of(comm, **options)
        return (*returned(comm, plan, torch.float64), numbering(comm.rank))

    results = run(work, 4)
    expected = torch.cat([r[0] for r in results])
    for _, sent, _, ids in results:
        expected.index_add_(0, torch.tensor(ids, dtype=torch.int64), sent)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), expected, rtol=0, atol=1e-14)


def test_returns_are_added_in_one_order():
    """Bit for bit the same however fast each rank is."""
    runs = [
        run(lambda comm: returned(comm, plan_of(comm, block_rows=1), pause=pause)[2], 4)  # noqa: B023
        for pause in (False, True, False, True, False)
    ]
    for results in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, runs[0]))


@pytest.mark.ranks(4)
def test_at_most_one_return_is_under_way(comm):
    comm = Counting(comm)
    returned(comm, plan_of(Ranks(comm), block_rows=1, prefetch=3))
    assert (comm.most, comm.under_way) == (1, 0)


def test_packing_keeps_every_tensor_aligned():
    tensors = tables()
    packing = Packing(tensors)
    for rows in (0, 1, 3):
        views = packing.views(torch.zeros(packing.num_bytes(rows), dtype=torch.uint8), rows)
        ends = []
        for view, tensor in zip(views, tensors):
            assert view.shape == (rows, *tensor.shape[1:]) and view.dtype == tensor.dtype
            assert view.data_ptr() % view.itemsize == 0
            ends.append((view.data_ptr(), view.data_ptr() + view.numel() * view.itemsize))
        filled = [b for b in ends if b[0] < b[1]]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(filled)), "one after the other, never overlapping"
    assert Packing([]).num_bytes(4) == 0


def test_packing_converts_float32_rows_alone():
    tensors = [
        torch.arange(6.0).view(3, 2) / 3,
        torch.arange(3.0, dtype=torch.float64),
        torch.tensor([True, False, True]),
    ]
    packing, plain = Packing(tensors, torch.bfloat16), Packing(tensors)
    assert packing.converts and not plain.converts and packing.layout != plain.layout
    assert packing.dtypes == [torch.bfloat16, torch.float64, torch.bool]
    assert (packing.num_bytes(2), plain.num_bytes(2)) == (8 + 16 + 2, 16 + 16 + 2)
    for rows in (None, torch.tensor([2, 0])):
        wanted = tensors if rows is None else [tensor[rows] for tensor in tensors]
        buffer = message_buffer(packing.num_bytes(len(wanted[0])), torch.device("cpu"))
        packing.write(tensors, buffer, rows)
        found = packing.read(buffer, len(wanted[0]))
        assert [rows.dtype for rows in found] == [rows.dtype for rows in tensors]
        assert torch.equal(found[0], wanted[0].bfloat16().float())
        assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])


def test_what_a_row_is_in_words():
    assert Packing([torch.ones(3, 2), torch.ones(3).long()], torch.bfloat16).describe() == "bfloat16 [2], int64 []"


class Elsewhere(DryCommunicator):
    """Rank 0 on a device without memory, in the place of a GPU."""

    def exchange(self, send, to, recv, source, tag, label=""):
        assert all(tensor.is_meta for tensor in (send, recv) if tensor is not None)
        return super().exchange(send, to, recv, source, tag, label)


@pytest.mark.parametrize("mode", ["sar", "halo"])
def test_messages_are_on_the_device_of_the_ranks(mode):
    """So are gradients that are to be converted."""
    inner, devices = Elsewhere(4), set()
    plan = plan_of(Ranks(inner), mode=mode, wire_dtype=torch.bfloat16)
    inner.device = torch.device("meta")
    plan = replace(plan, send_rows=tuple(rows.to("meta") for rows in plan.send_rows))
    mine = torch.ones(SOURCES.num_own(0), 3, device="meta")
    for _, _, (rows,) in fetch_blocks(plan, [mine], WalkId(1, 0, "there")):
        devices.add(rows.device.type)
    return_all(plan, [mine], WalkId(1, 1, "back"), lambda buffer: devices.add(buffer.device.type))
    assert devices == {"meta"}


def test_the_planner_tells_memory_for_messages_from_other_memory():
    with MemoryTracker() as tracker:
        kept = torch.empty(8), message_buffer(8, torch.device("cpu"))
    assert [storage.is_message for storage in tracker.storages] == [False, True] and len(kept) == 2


def test_tags_differ():
    tags = {WalkId(c, w, "").tag(r) for c in (0, 1, 4095) for w in (0, 1, 31) for r in (0, 1, (1 << 14) - 1)}
    assert len(tags) == 27 and max(tags) < 2**31 and min(tags) >= 0
    assert WalkId(4096 + 6, 32 + 3, "").tag(5) == WalkId(6, 3, "").tag(5), "numbers begin anew, and fit"
    with pytest.raises(InternalError, match="round 16384 does not fit a message tag; use larger blocks"):
        WalkId(1, 1, "").tag(1 << 14)


def test_ranks_in_different_calls_are_told():
    def work(comm):
        plan = plan_of(comm)
        list(fetch_blocks(plan, own(comm, tables()), WalkId(1, comm.rank == 3, f"call of rank {comm.rank == 3}")))

    with pytest.raises(CommunicationError, match="call of rank"):
        run(work, 4, timeout=10)
