"""Fields read row by row: dense tensors, sparse matrices and arrays in files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, blocks

BLOCK_BYTES = 16 << 20

Field = Tensor | FileRows
"""A node or edge field, with one row per node or edge. A tensor is dense, or sparse in torch's CSR layout."""

# index_select lacks the wide unsigned types on the CPU; the bits of the signed type of that width are the same.
SIGNED_TWIN = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take_rows(field: Field, ids: Tensor) -> Tensor:
    """The rows `ids` (int64, on the CPU) of a field: dense, contiguous, on the CPU."""
    if isinstance(field, FileRows):
        return field.take(ids)
    if field.layout is torch.sparse_csr:
        return _dense_rows(field, ids)
    twin = SIGNED_TWIN.get(field.dtype)
    rows = (field if twin is None else field.view(twin))[ids.to(field.device)].cpu().contiguous()
    return rows if twin is None else rows.view(field.dtype)


def _dense_rows(matrix: Tensor, ids: Tensor) -> Tensor:
    """The rows `ids` of a CSR matrix, dense. Only these rows are ever dense: the whole might not fit into memory."""
    row_starts = matrix.crow_indices().long()
    starts, counts = row_starts[ids], row_starts.diff()[ids]
    rows = torch.repeat_interleave(torch.arange(ids.numel()), counts)
    entries = starts[rows] + torch.arange(rows.numel()) - (counts.cumsum(0) - counts)[rows]
    dense = torch.zeros(ids.numel(), matrix.shape[1], dtype=matrix.dtype)
    return dense.index_put_((rows, matrix.col_indices()[entries].long()), matrix.values()[entries])


def row_blocks(field: Field, ids: Tensor | FileRows) -> Iterator[Tensor]:
    """The rows `ids` of a field in consecutive blocks of about `BLOCK_BYTES` bytes."""
    row_bytes = math.prod(field.shape[1:]) * field.dtype.itemsize
    for _, wanted in blocks(ids, max(1, BLOCK_BYTES // max(8, row_bytes))):
        yield take_rows(field, wanted.long())


def as_field(values: Any, what: str) -> Field:
    """The field of an array. A sparse matrix of torch or SciPy stays sparse."""
    if isinstance(values, FileRows):
        return values
    if hasattr(values, "tocsr"):  # of SciPy
        rows = values.tocsr()
        return csr_rows(rows.data, rows.indices, rows.indptr, rows.shape)
    if isinstance(values, Tensor) and values.dim() == 2:
        if values.layout is torch.sparse_csr:
            return values.detach().cpu()
        if values.layout is torch.sparse_coo and values.sparse_dim() == 2:
            return _compressed(values.detach().cpu())
    return as_tensor(values, what)


def csr_rows(values: Any, columns: Any, row_starts: Any, shape: tuple[int, int]) -> Tensor:
    """The sparse matrix of SciPy's CSR arrays, in torch's CSR layout. Entries for the same place are added up."""
    values, columns, starts = (torch.as_tensor(array) for array in (values, columns, row_starts))
    if starts[:1].tolist() != [0]:
        raise ValueError("sparse features: the row starts do not begin with 0")
    try:
        rows = torch.repeat_interleave(torch.arange(shape[0]), starts.diff())
        return _compressed(
            torch.sparse_coo_tensor(torch.stack([rows, columns.long()]), values, shape, check_invariants=True)
        )
    except RuntimeError as error:
        raise ValueError(f"sparse features are no CSR matrix of the shape {list(shape)}: {error}") from error


def _compressed(matrix: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return matrix.coalesce().to_sparse_csr()


def as_tensor(values: Any, what: str) -> Tensor:
    """The torch tensor of an array: dense, detached, and sharing the memory of the array where that is possible."""
    if isinstance(values, Tensor):
        dense = values.detach() if values.layout is torch.strided else values.detach().to_dense()
        return dense.as_subclass(Tensor)
    array = np.asarray(values)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # fields are only ever read
            return torch.from_numpy(array)
    except TypeError:
        objects = " (objects, such as lists of different lengths)" if array.dtype == object else ""
        raise TypeError(
            f"{what} has the type {array.dtype}{objects}, which tensors cannot hold; expected numbers or booleans"
        ) from None
