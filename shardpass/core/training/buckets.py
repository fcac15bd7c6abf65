"""Many tensors as a few long ones, which travel better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardpass.backends.communicator import Communicator
from shardpass.core.ranks import Ranks

_T = TypeVar("_T", bound=Tensor)

BUCKET_BYTES = 25 << 20


def broadcast_tensors(tensors: Sequence[Tensor], comm: Ranks, label: str, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Overwrite `tensors` with those of rank 0, in place; any dtype. Collective; shapes and dtypes must agree."""
    for bucket in cut_buckets(tensors, bucket_bytes):
        flat = flatten(bucket, comm.device)
        comm.broadcast(flat.view(torch.uint8), 0, label)  # bytes: booleans and complex numbers travel too
        if comm.rank != 0:
            unpack(flat, bucket)


def cut_buckets(tensors: Sequence[_T], bucket_bytes: int) -> Iterator[list[_T]]:
    """The tensors in order, grouped by dtype and cut into lists of about `bucket_bytes`."""
    by_dtype: dict[torch.dtype, list[_T]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        bucket: list[_T] = []
        size = 0
        for tensor in group:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def flatten(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A copy of all numbers of `tensors`, one after the other, in one dimension."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(device)


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with the numbers that `flatten` has put one after the other."""
    with torch.no_grad():
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(values.view(tensor.shape))


def sum_flat(flat: Tensor, comm: Communicator, label: str) -> Tensor:
    """The sum of `flat` over ranks, a new tensor; complex numbers too. Collective."""
    if flat.is_complex():
        return torch.view_as_complex(comm.all_reduce(torch.view_as_real(flat), "sum", label))
    return comm.all_reduce(flat, "sum", label)
