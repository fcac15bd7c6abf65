"""Many tensors as a few long ones, which travel better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks

BUCKET_BYTES = 25 << 20


def broadcast_tensors(tensors: Sequence[Tensor], comm: Ranks, label: str, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Overwrite `tensors` with those of rank 0, in place; any dtype. Collective; shapes and dtypes must agree."""
    for bucket, flat in _buckets(tensors, comm.device, bucket_bytes):
        comm.broadcast(flat.view(torch.uint8), 0, label)  # bytes: booleans and complex numbers travel too
        if comm.rank != 0:
            with torch.no_grad():
                for tensor, values in zip(bucket, _parts(flat, bucket)):
                    tensor.copy_(values)


def summed_tensors(
    tensors: Sequence[Tensor], comm: Ranks, label: str, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """The sums of `tensors` over ranks; complex ones too. Collective; shapes and dtypes must agree."""
    found: dict[int, Tensor] = {}
    for bucket, flat in _buckets(tensors, comm.device, bucket_bytes):
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        summed = comm.all_reduce(real, "sum", f"{label} bucket of {len(bucket)}")
        summed = torch.view_as_complex(summed) if flat.is_complex() else summed
        for tensor, values in zip(bucket, _parts(summed, bucket)):
            found[id(tensor)] = values.to(tensor.device)
    return [found[id(tensor)] for tensor in tensors]


def _buckets(
    tensors: Sequence[Tensor], device: torch.device, bucket_bytes: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The tensors in order, by dtype, in lists of about `bucket_bytes`; with a copy of all numbers of each list."""
    by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        if tensor.dtype not in by_dtype or sizes[tensor.dtype] > bucket_bytes:
            by_dtype.setdefault(tensor.dtype, []).append([])
            sizes[tensor.dtype] = tensor.nbytes
        by_dtype[tensor.dtype][-1].append(tensor)
    for bucket in chain.from_iterable(by_dtype.values()):
        yield bucket, torch.cat([tensor.detach().reshape(-1) for tensor in bucket]).to(device)


def _parts(flat: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of each tensor in `flat`, which holds those of one after the other."""
    parts = flat.split([tensor.numel() for tensor in bucket])
    return [part.view(tensor.shape) for part, tensor in zip(parts, bucket)]
