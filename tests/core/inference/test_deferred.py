"""Rows that are computed block by block are the rows that torch computes at once, whatever is done with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardpass.core.inference import row_sources
from shardpass.core.inference.deferred import Deferral, DeferredRows, block_of, in_memory, whole
from shardpass.core.inference.row_sources import ChangedRowsError
from shardpass.core.training import write_verified

N, C = 40, 6  # more than one block of 7 rows of 6 doubles
NORM, LAYER_NORM, LINEAR = nn.BatchNorm1d(C).double().eval(), nn.LayerNorm(C).double(), nn.Linear(C, 4).double()
NUMBERS = torch.arange(N) * 7 % N
OTHER = torch.linspace(-1, 1, N * C, dtype=torch.float64).view(N, C)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(row_sources, "_BLOCK_BYTES", 7 * C * 8)


def features():
    return torch.randn(N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


ROW_WISE = {
    "layers": lambda x: LINEAR(NORM(F.relu(LAYER_NORM(x)))),
    "views": lambda x: x.view(-1, 2, 3).transpose(1, 2).reshape(N, C) + x.view(N, 3, 2).flatten(1),
    "numbers of rows": lambda x: x / x.size(0) + x.unsqueeze(1).expand(N, 2, C).sum(1),
    "joined columns": lambda x: torch.cat([x, OTHER, x.chunk(2, 1)[1]], dim=1),
    "a tensor in memory with as many rows": lambda x: torch.where(OTHER > 0, x, OTHER),
    "columns and scores": lambda x: (x[:, 2:] * x[:, :1]).softmax(1).amax(-1),
    "a width of as many as rows": lambda x: x.mean(1, keepdim=True).expand(-1, N).sum(1),
    "another dtype": lambda x: x.float().double().abs().sqrt(),
    "changed in place": lambda x: F.relu(x * 2, inplace=True).add_(1).mul_(OTHER),
}
OF_ALL_ROWS = {
    "sums": lambda x: x - x.mean(0),
    "products": lambda x: x @ (x.t() @ x),
    "a softmax over rows": lambda x: x.softmax(0),
    "some rows": lambda x: x[OTHER[:, 0] > 0].relu(),
    "numbered rows": lambda x: x.index_select(0, NUMBERS) + x[NUMBERS],
    "sorted rows": lambda x: x.sort(0).values.cumsum(0),
    "the first rows": lambda x: x[:3] * 2,
    "rows one after the other": lambda x: torch.cat([x, x]),
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2),
    "scattered rows": lambda x: torch.zeros(N, C, dtype=x.dtype).index_add_(0, NUMBERS, x),
    "as many columns as rows": lambda x: x[:, :1] * torch.linspace(0, 1, N, dtype=x.dtype),
}


@pytest.mark.parametrize("name", [*ROW_WISE, *OF_ALL_ROWS])
@torch.no_grad()
def test_the_rows_are_those_of_torch(name):
    compute = (ROW_WISE | OF_ALL_ROWS)[name]
    x = features()
    found = compute(Deferral().held(x))
    assert isinstance(found, DeferredRows) or name in OF_ALL_ROWS
    expected = compute(features())
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.stride() == expected.stride()
    assert torch.allclose(whole(found), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(x, features())


def written_through_a_view(x):
    y = x * 2
    z, view = y + 1, y.view(N, 2, 3)
    view[:, 0] = 5  # of columns
    y.add_(1)
    view.mul_(2)
    return torch.cat([x, y, z, view.flatten(1)], 1)


def written_by_a_mask(x):
    y = x * 2
    z = y + 1
    y[OTHER[:, 0] > 0] = 7
    return torch.cat([y, z], 1)


@pytest.mark.parametrize("compute", [written_through_a_view, written_by_a_mask])
@torch.no_grad()
def test_what_is_written_into_a_tensor_is_in_its_views_and_nowhere_else(compute):
    assert torch.equal(whole(compute(Deferral().held(features()))), compute(features()))


@torch.no_grad()
def test_rows_that_were_changed_behind_its_back_are_never_used():
    x = features()
    found = Deferral().held(x).relu()
    x[0] = 1
    with pytest.raises(ChangedRowsError):
        whole(found)
    y = Deferral().held(features()) * 2
    z = y + 1
    first = y[0]  # a view of one row, which is in memory
    with pytest.raises(ChangedRowsError, match="after a view of some of them was made"):
        y.add_(1)
    first.add_(1)
    with pytest.raises(ChangedRowsError, match="after others were made of them"):
        whole(z)
    with pytest.raises(ChangedRowsError, match="writes into several tensors, or into an `out`"):
        torch.add(z, 1, out=z)


@torch.no_grad()
def test_what_a_call_reads_is_made_together_and_held():
    y = nn.Linear(C, C).double()(Deferral().held(features()))
    (sides,) = in_memory({"a": y, "b": y, "score": y.sum(1)})
    assert sides["a"] is sides["b"] is whole(y) and torch.equal(sides["score"], sides["a"].sum(1))


@torch.no_grad()
def test_stored_rows_are_read_from_their_file_even_if_it_is_gone(tmp_path):
    tensors = {"rows": features(), "few": torch.ones(1, 3), "bits": OTHER[:, 0] > 0, "half": features().bfloat16()}
    write_verified(tmp_path / "file", tensors, "text")
    found = Deferral().stored(tmp_path / "file", torch.device("cpu"))
    (tmp_path / "file").unlink()
    assert [type(found[name]) is DeferredRows for name in tensors] == [True, False, True, True]
    for name, tensor in tensors.items():
        assert torch.equal(whole(found[name]), tensor)
        assert torch.equal(block_of(found[name], 0, 1), tensor[:1])
