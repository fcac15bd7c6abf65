"""Many tensors as a few long ones, which travel better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks

BUCKET_BYTES = 25 << 20


def broadcast_tensors(tensors: Sequence[Tensor], comm: Ranks, label: str, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Overwrite `tensors` with those of rank 0, in place; any dtype. Collective; shapes and dtypes must agree."""
    for bucket in _cut(tensors, bucket_bytes):
        flat = _flatten(bucket, comm.device)
        comm.broadcast(flat.view(torch.uint8), 0, label)  # bytes: booleans and complex numbers travel too
        if comm.rank != 0:
            _unpack(flat, bucket)


def summed_tensors(
    tensors: Sequence[Tensor], comm: Ranks, label: str, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """The sums of `tensors` over ranks; complex ones too. Collective; shapes and dtypes must agree."""
    found: dict[int, Tensor] = {}
    for bucket in _cut(tensors, bucket_bytes):
        flat = _flatten(bucket, comm.device)
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        summed = comm.all_reduce(real, "sum", f"{label} bucket of {len(bucket)}")
        summed = torch.view_as_complex(summed) if flat.is_complex() else summed
        for tensor, values in zip(bucket, summed.split([tensor.numel() for tensor in bucket])):
            found[id(tensor)] = values.view(tensor.shape).to(tensor.device)
    return [found[id(tensor)] for tensor in tensors]


def _cut(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors in order, grouped by dtype and cut into lists of about `bucket_bytes`."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _flatten(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A copy of all numbers of `tensors`, one after the other, in one dimension."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(device)


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with the numbers that `_flatten` has put one after the other."""
    with torch.no_grad():
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(values.view(tensor.shape))
