"""Gradients summed over ranks while backward still runs.

[Note: two threads of one rank]
Backward itself communicates: the sharded calls, on the caller's communicator, in the thread that runs backward. The
sums of gradients run in one other thread, on a duplicate of that communicator (`Communicator.background`), bucket after
bucket in one order. So no message of the one can meet one of the other, and ranks cannot cross. The other thread waits
for other ranks' other threads only, and these for their own backward; backward never waits for the other thread until
it is over on every rank, which the agreement at the end of the block (on the caller's communicator) makes sure of.
Hence no circle of waits runs through both. A rank that leaves the block by an exception gives the duplicate up: the
other ranks' threads wake up with its reason.

A sum is put into ``.grad`` at the end of the block only. Until then a gradient is this rank's own part, so that all
checks are those of `sync_gradients`, and a block left by an exception has changed no gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from shardpass.backends.communicator import Communicator
from shardpass.core.ranks import Ranks
from shardpass.core.training.gradients import (
    BUCKET_BYTES,
    CHANGED,
    PROBLEMS,
    agree_on_gradients,
    alike,
    cut_buckets,
    flatten,
    gradient_of,
    mark_summed,
    refuse_ddp,
    state_of,
    sum_flat,
    sum_gradients,
    unpack,
    watch_of,
)
from shardpass.errors import RefusedError


@contextmanager
def sync_during_backward(model: nn.Module, comm: Ranks, bucket_bytes: int = BUCKET_BYTES) -> Iterator[None]:
    """A ``with`` block for the last backward of a step, after which gradients are as `sync_gradients` leaves them.

    ``with sync_during_backward(model, comm): loss.backward()``. Buckets of gradients are summed over ranks in another
    thread while backward goes on. A bucket is summed when backward has made all its gradients and the buckets before it
    are under way; what backward does not reach on this rank waits for the end of the block. Where the transport cannot
    be called from two threads (an MPI without them), all is summed at the end.

    Collective: every rank enters and leaves the block. The sums are those of `sync_gradients` up to rounding, the same
    bits on every rank; and the same bits as `sync_gradients` where every parameter that some rank trains has a gradient
    on some rank, with the same `bucket_bytes`. To accumulate gradients, run the earlier backward passes before the
    block. Within it, a parameter may get a gradient by one backward; clip or scale gradients after it.

    Args:
        model: the same architecture on every rank.
        comm: the ranks. It keeps one duplicate of itself for all blocks.
        bucket_bytes: gradients travel concatenated, per dtype, in buckets of about this size; the same on every rank. A
            model whose gradients fit into one bucket has nothing to overlap.

    Raises:
        ShardpassError: on every rank, where `sync_gradients` raises, and if a gradient was changed within the block
            after backward had made it.
        RefusedError: DistributedDataParallel is around the model or within it, or the block is within another one.
        DivergenceError: another rank has left the block by an exception, or takes another path.
    """
    refuse_ddp(model)
    open_blocks = comm.caches.of(_OpenBlocks)
    if open_blocks.any:
        raise RefusedError(
            "sync_during_backward within a sync_during_backward block of the same communicator is refused: end the "
            "first block, or put both models into one nn.ModuleList and use one block"
        )
    open_blocks.any = True
    try:
        block = _Block(model, comm, bucket_bytes)
        try:
            yield
            block.finish()
        except BaseException as error:
            block.give_up(error)
            raise
        finally:
            block.close()
    finally:
        open_blocks.any = False


class _OpenBlocks:
    """Whether gradients of some model are being summed during backward."""

    any = False


class _Block:
    """What one block knows of gradients, and the sums under way."""

    def __init__(self, model: nn.Module, comm: Ranks, bucket_bytes: int) -> None:
        self.comm = comm
        self.bucket_bytes = bucket_bytes
        self.named = list(alike(model))
        planned = [
            parameter for parameter in reversed(self._trained_somewhere()) if not nn.parameter.is_lazy(parameter)
        ]
        self.buckets: list[list[nn.Parameter]] = list(cut_buckets(planned, bucket_bytes))
        self.bucket_of = {id(parameter): k for k, bucket in enumerate(self.buckets) for parameter in bucket}
        self.missing = [{id(parameter) for parameter in bucket if _trains(parameter)} for bucket in self.buckets]
        self.seen: dict[int, tuple[Tensor | None, int]] = {}  # gradients as they were made, and their versions
        self.changed: set[int] = set()
        self.sums: list[Callable[[], Tensor]] = []
        self.lock = threading.Lock()  # autograd has a thread for each device
        self.background = comm.background() if self.buckets else None
        self.worker = None if self.background is None else ThreadPoolExecutor(1, "shardpass gradients")
        self.hooks = []
        for parameter in filter(_trains, planned):
            watch_of(parameter)  # its hook comes first
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))

    def _trained_somewhere(self) -> list[nn.Parameter]:
        own = torch.tensor([_trains(parameter) for _, parameter in self.named], device=self.comm.device)[None]
        every = self.comm.all_gather(own.to(torch.uint8), f"sync_during_backward of {len(self.named)} parameters")
        return [parameter for (_, parameter), some in zip(self.named, torch.cat(every).any(0).tolist()) if some]

    def _arrived(self, parameter: Tensor) -> None:
        """For autograd, when backward has added all of its gradient to `parameter`."""
        with self.lock:
            key = id(parameter)
            if key in self.seen:
                self.changed.add(key)
            self._look(parameter)
            self.missing[self.bucket_of[key]].discard(key)
            while self.worker and len(self.sums) < len(self.buckets) and not self.missing[len(self.sums)]:
                self._send()

    def _look(self, parameter: Tensor) -> None:
        grad = parameter.grad
        self.seen.setdefault(id(parameter), (grad, 0 if grad is None else grad._version))

    def _send(self) -> None:
        """Start summing the next bucket, with what its gradients are now."""
        assert self.worker is not None and self.background is not None
        number = len(self.sums)
        bucket = self.buckets[number]
        for parameter in bucket:
            self._look(parameter)
        with torch.no_grad():
            flat = flatten([_gradient_or_zeros(parameter) for parameter in bucket], self.comm.device)
        label = f"sync_during_backward bucket {number + 1} of {len(self.buckets)}"
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        self.sums.append(self.worker.submit(_sum, flat, self.background, label, stream).result)

    def finish(self) -> None:
        """Sum what is left, and put all sums in place. Collective."""
        self._remove_hooks()
        states = [self._state(parameter) for _, parameter in self.named]
        label = f"gradients of {len(self.named)} parameters at the end of sync_during_backward"
        present = agree_on_gradients(self.named, states, self.comm, label)
        found = [parameter for (_, parameter), has in zip(self.named, present) if has]
        if self.worker is not None:
            while len(self.sums) < len(self.buckets):
                self._send()
            wanted = {id(parameter) for parameter in found}
            for bucket, result in zip(self.buckets, self.sums):
                _put(result(), bucket, wanted)
            found = [parameter for parameter in found if id(parameter) not in self.bucket_of]
        sum_gradients(found, self.comm, self.bucket_bytes)
        mark_summed(self.named)

    def _state(self, parameter: nn.Parameter) -> int:
        state, key = state_of(parameter), id(parameter)
        if state in PROBLEMS or key not in self.seen:
            return state
        grad, version = self.seen[key]
        same = grad is parameter.grad and (grad is None or grad._version == version)
        return state if same and key not in self.changed else CHANGED

    def give_up(self, error: BaseException) -> None:
        """Let no rank wait for what this one will not do."""
        if self.background is not None:
            self.background.give_up(_left_by(error))

    def close(self) -> None:
        """End the thread."""
        self._remove_hooks()
        if self.worker is not None:
            self.worker.shutdown(wait=True, cancel_futures=True)

    def _remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


def _sum(flat: Tensor, comm: Communicator, label: str, stream: torch.cuda.Stream | None) -> Tensor:
    """For the other thread: the sum of `flat`, which was made on `stream`."""
    try:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            summed = sum_flat(flat, comm, label)
        if stream is not None:
            stream.synchronize()
        return summed
    except BaseException as error:
        comm.give_up(_left_by(error))  # the buckets that follow must not be taken for this one
        raise


def _put(summed: Tensor, bucket: list[nn.Parameter], wanted: set[int]) -> None:
    if summed.is_cuda:
        summed.record_stream(torch.cuda.current_stream(summed.device))
    pieces = summed.split([parameter.numel() for parameter in bucket])
    for parameter, piece in zip(bucket, pieces):
        if id(parameter) in wanted:
            unpack(piece, [gradient_of(parameter)])


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    return grad if grad is not None and grad.layout == torch.strided else torch.zeros_like(parameter)  # sparse: refused


def _trains(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.is_leaf


def _left_by(error: BaseException) -> str:
    return f"it has left sync_during_backward by {type(error).__name__}: {error}"
