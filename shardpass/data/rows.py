"""Fields read row by row: dense tensors, and sparse matrices that become dense only in the rows that are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, blocks

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class CsrRows:
    """A sparse [num_rows, num_columns] matrix whose rows come out dense. Duplicate entries add up, as in SciPy.

    Args:
        values: the stored entries, [nnz].
        columns: the column of each entry, [nnz], in `[0, num_columns)`.
        row_starts: where each row's entries start, [num_rows + 1].
        shape: (num_rows, num_columns).

    Raises:
        ValueError: when the four do not describe one matrix.
    """

    values: Tensor
    columns: Tensor
    row_starts: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        starts, nnz = self.row_starts, self.values.numel()
        if starts.numel() != self.shape[0] + 1 or int(starts[0]) != 0 or int(starts[-1]) != nnz:
            raise ValueError(
                f"sparse features: row starts are {starts.numel()} numbers that end at {int(starts[-1])}; "
                f"expected {self.shape[0] + 1} from 0 to {nnz} for shape {list(self.shape)}"
            )
        if bool((starts[1:] < starts[:-1]).any()):
            raise ValueError("sparse features: row starts decrease somewhere; expected them in ascending order")
        if self.columns.numel() != nnz:
            raise ValueError(f"sparse features: {self.columns.numel()} columns for {nnz} values; expected as many")
        if nnz and not (int(self.columns.min()) >= 0 and int(self.columns.max()) < self.shape[1]):
            raise ValueError(f"sparse features: a column id is outside [0, {self.shape[1]})")

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def take(self, ids: Tensor) -> Tensor:
        """The rows `ids`, dense, [len(ids), num_columns]."""
        starts = self.row_starts[ids].long()
        counts = self.row_starts[ids + 1].long() - starts
        rows = torch.repeat_interleave(torch.arange(ids.numel()), counts)
        within = torch.arange(rows.numel()) - (counts.cumsum(0) - counts)[rows]
        entries = starts[rows] + within
        dense = torch.zeros(ids.numel(), self.shape[1], dtype=self.dtype)
        add = self.dtype is not torch.bool
        return dense.index_put_((rows, self.columns[entries].long()), self.values[entries], accumulate=add)

    def to_dense(self) -> Tensor:
        """The whole matrix, dense."""
        return self.take(torch.arange(self.shape[0]))


Field = Tensor | CsrRows | FileRows
"""One node or edge field: a dense tensor, a sparse matrix or an array in a file, one row per node or edge."""

# index_select lacks the wide unsigned types on CPU; the bits of the signed type of that width are the same.
_SIGNED_TWIN = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take_rows(field: Field, ids: Tensor) -> Tensor:
    """The rows `ids` (int64, on the CPU) of a field, contiguous, on the CPU."""
    if isinstance(field, CsrRows | FileRows):
        return field.take(ids)
    twin = _SIGNED_TWIN.get(field.dtype)
    rows = (field if twin is None else field.view(twin))[ids.to(field.device)].cpu().contiguous()
    return rows if twin is None else rows.view(field.dtype)


def row_bytes(field: Field) -> int:
    """The bytes of one dense row of a field."""
    width = 1
    for size in field.shape[1:]:
        width *= size
    return width * field.dtype.itemsize


def row_blocks(field: Field, ids: Tensor | FileRows, block_bytes: int = BLOCK_BYTES) -> Iterator[Tensor]:
    """The rows `ids` of a field in consecutive blocks of about `block_bytes` bytes."""
    step = max(1, block_bytes // max(8, row_bytes(field)))
    for _, wanted in blocks(ids, step):
        yield take_rows(field, wanted)


def as_field(values: Any, what: str) -> Field:
    """The field of an array; a sparse matrix of torch stays sparse until its rows are asked for.

    Raises:
        TypeError: as `as_tensor`.
    """
    if isinstance(values, CsrRows | FileRows):
        return values
    if not isinstance(values, Tensor) or values.dim() != 2:
        return as_tensor(values, what)
    shape = (values.shape[0], values.shape[1])
    if values.layout is torch.sparse_csr:
        csr = values.detach().cpu()
        return CsrRows(csr.values(), csr.col_indices(), csr.crow_indices(), shape)
    if values.layout is torch.sparse_coo and values.sparse_dim() == 2:
        coo = values.detach().cpu().coalesce()
        rows, columns = coo.indices()
        sizes = torch.bincount(rows, minlength=shape[0])
        return CsrRows(coo.values(), columns, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]), shape)
    return as_tensor(values, what)


def as_tensor(values: Any, what: str) -> Tensor:
    """The torch tensor of an array, sharing its memory where that is possible; detached, dense.

    Raises:
        TypeError: for values that have no torch dtype (objects, strings), named by `what`.
    """
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
        raise TypeError(
            f"{what} has the type {array.dtype}, which tensors cannot hold; expected numbers or booleans"
        ) from None
