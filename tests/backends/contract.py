"""What every backend must do, as functions of a communicator: ``assert_*(comm)``. Every rank calls all of them."""

import contextlib
import copy
import errno
import gc
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shardpass.errors import CommunicationError, DivergenceError

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)


def run_all(comm: Any) -> list[str]:
    """Run every check; their names."""
    checks = [(name, check) for name, check in sorted(globals().items()) if name.startswith("assert_")]
    for name, check in checks:
        check(comm)
        comm.barrier(name)
    return [name for name, _ in checks]


def values(rank: int, rows: int, dtype: torch.dtype = torch.float32, width: int = 3) -> torch.Tensor:
    """What rank ``rank`` holds; small integers, exact in every dtype."""
    numbers = torch.arange(rows * width).reshape(rows, width) + rank
    return (numbers % 2 == 0) if dtype == torch.bool else (numbers % 11).to(dtype)


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> str:
    """The text of the error that ``call`` must raise."""
    try:
        call()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return str(error)
    raise AssertionError(f"no {kind.__name__} ({words!r})")


def ring(comm: Any) -> tuple[int, int]:
    """The next rank and the previous one."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def assert_all_reduce(comm: Any) -> None:
    for dtype in DTYPES:
        mine = values(comm.rank, 4, dtype)
        kept = mine.clone()
        everyone = torch.stack([values(rank, 4, dtype) for rank in range(comm.size)])
        wide = everyone.to(torch.float32 if dtype in FLOATS[2:] else dtype)
        expected = {"sum": wide.sum(0), "max": wide.amax(0), "min": wide.amin(0), "prod": wide.prod(0)}
        for op, right in expected.items():
            found = comm.all_reduce(mine, op, f"reduce {dtype}")
            assert found.dtype == dtype and torch.equal(found, right.to(dtype)), (dtype, op, found, right)
        assert torch.equal(mine, kept), "the input has changed"
    for shape in ((), (0,), (0, 5), (1,), (2, 3, 4)):
        found = comm.all_reduce(torch.ones(shape))
        assert found.shape == shape and torch.equal(found, torch.full(shape, float(comm.size)))
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(comm.all_reduce(transposed), transposed * comm.size)


def assert_all_reduce_gives_the_same_bits(comm: Any) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    for rows in (1, 7, 1000, 30011):
        total = comm.all_reduce(torch.randn(rows, generator=generator))
        for other in comm.all_gather(total):
            assert torch.equal(other, total)


def assert_all_gather(comm: Any) -> None:
    for dtype in DTYPES:
        for rows_of in (lambda rank: 2, lambda rank: rank, lambda rank: 3 * (rank == comm.size - 1)):
            found = comm.all_gather(values(comm.rank, rows_of(comm.rank), dtype), "gather")
            assert len(found) == comm.size
            for rank, tensor in enumerate(found):
                right = values(rank, rows_of(rank), dtype)
                assert tensor.dtype == dtype and tensor.shape == right.shape and torch.equal(tensor, right)
    assert [int(t) for t in comm.all_gather(torch.tensor(comm.rank))] == list(range(comm.size))
    for rows in ((1, 500), (500, 0), (102, 103)):  # behind the header, or in a message of their own
        found = comm.all_gather(torch.full((rows[comm.rank % 2],), float(comm.rank), dtype=torch.float64))
        assert [t.tolist() for t in found] == [[float(rank)] * rows[rank % 2] for rank in range(comm.size)]
    mine = torch.zeros(2)
    comm.all_gather(mine)[comm.rank].fill_(1)
    assert mine.sum() == 0, "a result is the input itself"


def assert_broadcast(comm: Any) -> None:
    for root in range(comm.size):
        for dtype in DTYPES:
            tensor = values(comm.rank, 3, dtype)
            assert comm.broadcast(tensor, root, "params") is tensor
            assert torch.equal(tensor, values(root, 3, dtype))
        assert comm.broadcast(torch.empty(0, 4), root).shape == (0, 4)
    raises(ValueError, f"the root is {comm.size}", lambda: comm.broadcast(torch.ones(1), comm.size))


def assert_all_to_all(comm: Any) -> None:
    for dtype in DTYPES:
        rows = [(comm.rank + 2 * to) % 3 for to in range(comm.size)]
        found = comm.all_to_all([values(comm.rank, count, dtype) for count in rows], "rows")
        for source, tensor in enumerate(found):
            right = values(source, (source + 2 * comm.rank) % 3, dtype)
            assert tensor.dtype == dtype and tensor.shape == right.shape and torch.equal(tensor, right)
    raises(ValueError, "tensors for", lambda: comm.all_to_all([torch.ones(1)] * (comm.size + 1)))


def assert_objects_and_barrier(comm: Any) -> None:
    found = comm.all_gather_object({"rank": comm.rank, "name": "ü" * comm.rank, "list": [1, None, 2.5]}, "set-up")
    assert [entry["rank"] for entry in found] == list(range(comm.size)) and found[-1]["list"] == [1, None, 2.5]
    raises(TypeError, "pass its tolist", lambda: comm.all_gather_object(torch.ones(2), "a tensor"))
    comm.barrier("all here")
    assert comm.rank in comm.local_ranks and set(comm.local_ranks) <= set(range(comm.size))


def assert_exchange(comm: Any) -> None:
    to, source = ring(comm)
    for tag, dtype in enumerate(DTYPES):
        before = comm.bytes_sent
        send = values(comm.rank, 5 + comm.rank, dtype)
        recv = torch.zeros_like(values(source, 5 + source, dtype))
        handle = comm.exchange(send, to, recv, source, tag, "ring")
        handle.wait()
        send.zero_()
        handle.wait()
        assert torch.equal(recv, values(source, 5 + source, dtype))
        sent = send.numel() * send.element_size() if comm.size > 1 else 0
        assert comm.bytes_sent - before == sent
    comm.exchange(None, to, None, source, 3, "nothing").wait()
    comm.exchange(torch.empty(0, 4), to, torch.empty(0, 4), source, 2**31 - 1, "empty").wait()
    scalar = torch.zeros(())
    comm.exchange(torch.tensor(float(comm.rank)), to, scalar, source, 2**31 - 1).wait()
    assert scalar == source


def assert_exchange_with_itself(comm: Any) -> None:
    send, recv = torch.arange(4.0), torch.zeros(4)
    comm.exchange(send, comm.rank, recv, comm.rank, 1, "self").wait()
    assert torch.equal(send, recv)
    raises(DivergenceError, "with itself", lambda: comm.exchange(send, comm.rank, torch.zeros(5), comm.rank, 1).wait())
    raises(ValueError, "a message to itself", lambda: comm.exchange(send, comm.rank, None, comm.rank, 1).wait())


def assert_arguments_of_exchange(comm: Any) -> None:
    one = torch.ones(1)
    raises(ValueError, f"peer is {comm.size}", lambda: comm.exchange(one, comm.size, None, 0, 1))
    raises(ValueError, "the tag is -1", lambda: comm.exchange(one, 0, one, 0, -1))
    raises(ValueError, "not contiguous", lambda: comm.exchange(torch.ones(2, 2)[:, 0], 0, None, 0, 1))
    raises(TypeError, "cannot be sent", lambda: comm.all_gather(torch.zeros(1, dtype=torch.uint16)))
    raises(ValueError, "at most 8 dimensions", lambda: comm.all_gather(torch.zeros([1] * 9)))
    raises(ValueError, "the operation is 'mean'", lambda: comm.all_reduce(one, "mean"))


def assert_many_exchanges_under_way(comm: Any) -> None:
    """All pairs, several tags, waited for in another order than started."""
    under_way = []
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        for tag in range(6):
            recv = torch.zeros(50 + tag)
            send = torch.full((50 + tag,), 100.0 * comm.rank + tag)
            under_way.append((comm.exchange(send, to, recv, source, tag, f"t{tag}"), recv, 100.0 * source + tag))
    for handle, recv, right in reversed(under_way):
        handle.wait()
        assert (recv == right).all()


def assert_the_adjoint(comm: Any) -> None:
    """<exchange x, y> = <x, exchange^T y>: the adjoint swaps the peers."""
    to, source = ring(comm)
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(3 + comm.rank, dtype=torch.float64, generator=generator)
    y = torch.randn(3 + source, dtype=torch.float64, generator=generator)
    forward, backward = torch.zeros_like(y), torch.zeros_like(x)
    comm.exchange(x, to, forward, source, 0, "forward").wait()
    comm.exchange(y, source, backward, to, 1, "backward").wait()
    left = comm.all_reduce((forward * y).sum())
    right = comm.all_reduce((x * backward).sum())
    assert abs(left - right) < 1e-12


def assert_long_messages_are_split(comm: Any) -> None:
    twin = comm.duplicate("split")
    twin.max_message_bytes = 1000
    to, source = ring(comm)
    send, recv = torch.arange(2001.0) + comm.rank, torch.zeros(2001)
    twin.exchange(send, to, recv, source, 4, "long").wait()
    assert torch.equal(recv, torch.arange(2001.0) + source)
    assert torch.equal(twin.all_reduce(send), torch.arange(2001.0) * comm.size + comm.size * (comm.size - 1) / 2)
    assert torch.equal(twin.all_gather(send)[source], recv)
    assert torch.equal(twin.all_to_all([send] * comm.size)[source], recv)
    assert torch.equal(twin.broadcast(send.clone(), 0), torch.arange(2001.0))


def assert_duplicates_do_not_mix(comm: Any) -> None:
    to, source = ring(comm)
    twin = comm.duplicate("twin")
    ours, theirs = torch.zeros(2), torch.zeros(2)
    first = comm.exchange(torch.full((2,), 1.0), to, ours, source, 7, "x")
    second = twin.exchange(torch.full((2,), 2.0), to, theirs, source, 7, "x")
    second.wait()
    assert (theirs == 2).all()
    first.wait()
    assert (ours == 1).all()
    assert twin.all_reduce(torch.ones(1)) == comm.size
    twin.close()
    twin.close()
    raises(CommunicationError, "closed", lambda: twin.barrier())


def assert_two_threads_of_a_rank(comm: Any) -> None:
    """Two threads of a rank communicate at once, each on a communicator of its own."""
    if not comm.serves_threads:
        return
    twin = comm.duplicate("another thread")
    to, source = ring(comm)
    with ThreadPoolExecutor(1) as other:
        sums = [other.submit(twin.all_reduce, torch.full((5000,), float(i)), label=f"sum {i}") for i in range(30)]
        for i in range(30):
            recv = torch.zeros(3000)
            comm.exchange(torch.full((3000,), float(comm.rank)), to, recv, source, i, f"round {i}").wait()
            assert (recv == source).all()
            assert comm.all_reduce(torch.ones(1)) == comm.size
        assert all((sums[i].result() == i * comm.size).all() for i in range(30))


def assert_it_stays_in_its_process(comm: Any) -> None:
    raises(TypeError, "belongs to its process", lambda: pickle.dumps(comm))
    assert copy.deepcopy(comm) is comm
    assert copy.deepcopy({"comm": comm})["comm"] is comm
    with comm.random_lock():
        pass


def assert_shared_memory(comm: Any) -> None:
    """What a rank wrote before a message, the others of its host read after it."""
    if not hasattr(os, "memfd_create"):
        assert comm.share(8) is None
        return
    for first in (0, 1, 4096, 3_000_000):
        memory = comm.share(first + 8 * comm.rank, "contract")
        assert memory is not None and sorted(memory) == sorted(comm.local_ranks)
        for rank, found in memory.items():
            assert found.shape == (first + 8 * rank,) and found.dtype == torch.uint8
            assert found.data_ptr() % 64 == 0 and not found.any()
        for turn in range(1, 3):
            comm.barrier("read")
            memory[comm.rank].fill_(10 * turn + comm.rank)
            comm.barrier("written")
            assert all((found == 10 * turn + rank).all() for rank, found in memory.items())
    memory = None  # on this rank; the others use theirs
    assert comm.duplicate("a twin").shares_memory == comm.shares_memory
    if comm.size > 1:
        raises(DivergenceError, "b: shared memory", lambda: comm.share(8, "b" if comm.rank else "a"))


def assert_shared_memory_that_one_rank_cannot_have(comm: Any) -> None:
    """Then no rank has it, and all go on."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, broken in (("posix_fallocate", full), ("stat", full)):
        whole = getattr(os, name)
        comm.barrier("before")
        if comm.rank == comm.size - 1:
            setattr(os, name, broken)
        try:
            assert comm.share(1000, "too much") is None
        finally:
            comm.barrier("after")
            setattr(os, name, whole)
    assert (comm.share(1000) is None) == (not hasattr(os, "memfd_create"))


def assert_diverging_collectives(comm: Any) -> None:
    """Every kind of difference, on every rank, in words; and the communicator goes on."""
    if comm.size == 1:
        return
    odd, one = comm.rank == comm.size - 1, torch.ones(2)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("GATConv", lambda: comm.all_gather(one, "call 3 GATConv") if odd else comm.all_reduce(one, label="loss")),
        ("'b'", lambda: comm.barrier("b" if odd else "a")),
        ("[3]", lambda: comm.all_reduce(torch.ones(3 if odd else 2))),
        ("float64", lambda: comm.all_reduce(one.double() if odd else one)),
        ("max", lambda: comm.all_reduce(one, "max" if odd else "sum")),
        ("root 1", lambda: comm.broadcast(one.clone(), int(odd))),
        ("[2, 3]", lambda: comm.all_gather(torch.ones(2, 3 if odd else 4))),
        ("[1, 1]", lambda: comm.all_to_all([torch.ones(1, *([1] * odd))] * comm.size)),
        ("two", lambda: comm.duplicate("two" if odd else "one")),
    ]
    for words, call in calls:
        text = raises(DivergenceError, words, call)
        assert f"rank {comm.size - 1} is in" in text
        assert len(set(comm.all_gather_object(text))) == 1


def assert_diverging_exchanges(comm: Any) -> None:
    """Rank 0 and 1 disagree on one message: neither hangs, and both are told by their next wait at the latest."""
    if comm.size == 1:
        return

    def both(words: str, name: str, call: Callable[[Any], None]) -> None:
        twin = comm.duplicate(name)
        if comm.rank < 2:
            raises(DivergenceError, words, lambda: (call(twin), twin.barrier("after")))
        comm.barrier("next")

    peer, here = 1 - comm.rank, comm.rank

    def exchange(twin: Any, rows: int, tag: int = 5, label: str = "x", dtype: torch.dtype = torch.float32) -> None:
        send, recv = torch.ones(rows, 500, dtype=dtype), torch.zeros(rows, 500, dtype=dtype)
        twin.exchange(send, peer, recv, peer, tag, label).wait()

    both("[4, 500]", "sizes", lambda twin: exchange(twin, 3 + here))
    both("int32", "dtypes", lambda twin: exchange(twin, 3, dtype=(torch.float32, torch.int32)[here]))
    both("round 1", "labels", lambda twin: exchange(twin, 3, label=f"round {here}"))
    both("tag 6", "tags", lambda twin: exchange(twin, 3, tag=5 + here))
    both("all_reduce", "kinds", lambda twin: exchange(twin, 3) if here else twin.all_reduce(torch.ones(1)))

    def one_sided(twin: Any) -> None:
        recv = torch.zeros(1000) if here == 0 else None
        twin.exchange(None, peer, recv, peer, 5, "nobody sends").wait()

    both("nobody sends", "one-sided", one_sided)


def assert_a_wait_can_time_out(comm: Any) -> None:
    if comm.size == 1:
        return
    twin = comm.duplicate("late")
    if comm.rank == 0:
        handle = twin.exchange(None, 1, torch.zeros(3), 1, 9, "call 2 round 1")
        text = raises(CommunicationError, "call 2 round 1", lambda: handle.wait(timeout=0.3))
        assert "rank 1" in text and "tag 9" in text
    comm.barrier("late")


def assert_a_wait_given_up_writes_nowhere(comm: Any) -> None:
    """A message that comes after its receiver has given up does not land in memory that has a new owner by then."""
    if comm.size == 1:
        return
    twin = comm.duplicate("given up")
    num = 200_000
    if comm.rank == 0:
        recv = torch.zeros(num)
        handle = twin.exchange(None, 1, recv, 1, 9, "given up")
        raises(CommunicationError, "given up", lambda: handle.wait(timeout=0.1))
        del recv, handle
        gc.collect()
        owners = [torch.full((num,), 7.0) for _ in range(4)]
    comm.barrier("given up")
    if comm.rank == 1:
        with contextlib.suppress(CommunicationError):
            twin.exchange(torch.full((num,), 3.0), 0, None, 0, 9, "given up").wait(timeout=0.2)
    comm.barrier("sent")
    if comm.rank == 0:
        assert all((owner == 7).all() for owner in owners)
