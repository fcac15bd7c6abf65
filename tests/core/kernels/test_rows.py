"""Rows of nodes for edges, and back: the compiled loops against plain torch."""

import pytest
import torch

from shardpass.core.kernels import gather_rows, scatter_rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tail", [(), (1,), (5,), (3, 4), (0,)])
@pytest.mark.parametrize("num_edges", [0, 1, 40])
def test_gathering_and_scattering(
    dtype: torch.dtype, index_dtype: torch.dtype, tail: tuple[int, ...], num_edges: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-9, 9, (7, *tail), generator=generator).to(dtype)
    index = torch.randint(7, (num_edges,), generator=generator)
    found = gather_rows(rows, index.to(index_dtype))
    assert torch.equal(found, rows[index])

    out, expected = rows.clone(), rows.clone()
    scatter_rows(out, index.to(index_dtype), found)
    for edge, row in enumerate(index.tolist()):
        expected[row] += found[edge]
    assert torch.equal(out, expected)


def test_rows_with_gaps_between_them() -> None:
    wide = torch.arange(40.0).view(5, 8)
    index = torch.tensor([4, 0, 4], dtype=torch.int32)
    assert torch.equal(gather_rows(wide[:, ::2], index), wide[:, ::2][index.long()])
    out = torch.zeros(5, 8)
    scatter_rows(out[:, ::2], index, torch.ones(3, 4))
    assert out.sum(1).tolist() == [4, 0, 0, 0, 8]
