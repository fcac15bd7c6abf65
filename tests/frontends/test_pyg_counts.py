"""What models do with the number of rows: sizes and comparisons work, what is computed from it is refused."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assert_exact, assignments

from .conv_cases import _plain
from .pyg_cases import GRAPH
from .test_pyg_check import called


class Net(nn.Module):
    def __init__(self, between: Any) -> None:
        super().__init__()
        self.conv, self.last, self.between = gnn.GCNConv(5, 6), gnn.SAGEConv(6, 6), between
        self.attention = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0)

    def forward(self, x, edge_index):
        return self.last(self.between(self, self.conv(x, edge_index), x, edge_index), edge_index)


def heads(h, ei):
    return h.view(1, -1, 2, 3).transpose(1, 2)


REFUSED = {
    "a share": lambda s, h, x, ei: h * (1.0 / x.size(0)),
    "PageRank": lambda s, h, x, ei: 0.85 * h + 0.15 / h.shape[0],
    "twice": lambda s, h, x, ei: h * (2.0 * x.size(0)),
    "log": lambda s, h, x, ei: h * math.log(x.size(0) + 1),
    "NumPy": lambda s, h, x, ei: h * float(np.log(x.size(0))),
    "mean degree": lambda s, h, x, ei: h * (1.0 * ei.size(1) / x.size(0)),
    "a tensor": lambda s, h, x, ei: h / torch.tensor([x.size(0)]),
    "the shape": lambda s, h, x, ei: h / torch.tensor(x.shape)[0],
    "numel": lambda s, h, x, ei: h / x.shape.numel(),
    "written": lambda s, h, x, ei: h.clone().index_fill_(1, torch.tensor([0]), 0.0) + torch.linspace(0, x.size(0), 6),
    "half": lambda s, h, x, ei: h * (x.size(0) >> 1),
    "rounded": lambda s, h, x, ei: h * round(x.size(0)),
    "a number of NumPy": lambda s, h, x, ei: h * x.size(0).item() if hasattr(x.size(0), "item") else h / (1 / len(x)),
    "a new tensor": lambda s, h, x, ei: h * h.new_tensor(x.size(0)),
    "as an array": lambda s, h, x, ei: h * torch.asarray(x.size(0)),
    "a slope": lambda s, h, x, ei: F.leaky_relu(h, x.size(0)),
    "a factor": lambda s, h, x, ei: torch.addcmul(h, h, h, value=x.size(0)),
    "ones": lambda s, h, x, ei: h * torch.ones(x.size(0)).sum(),
    "edge_index.max()": lambda s, h, x, ei: h / (int(ei.max()) + 1),
    "the largest id": lambda s, h, x, ei: h + ei.max(),
    "the largest source": lambda s, h, x, ei: h * (ei[0].max() + 1),
    "1 / len": lambda s, h, x, ei: h * (1 / len(x)),
    "a spread mean": lambda s, h, x, ei: h - h.mean(0).expand(h.size(0), 6),
    "a mean as rows": lambda s, h, x, ei: s.last(h.mean(0).expand_as(h), ei),
    "a repeated mean": lambda s, h, x, ei: s.last(h.mean(0).repeat(x.size(0), 1), ei),
    "a broadcast mean": lambda s, h, x, ei: s.last(torch.broadcast_tensors(h.mean(0), h)[0], ei),
    "a deep copy": lambda s, h, x, ei: h - copy.deepcopy(h.detach()).mean(0),
    "attention": lambda s, h, x, ei: F.scaled_dot_product_attention(*[heads(h, ei)] * 3).transpose(1, 2).reshape(-1, 6),
    "a transformer": lambda s, h, x, ei: s.attention(h),
}


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, n) for name in REFUSED for n in (1, 3) if (name, n) != ("1 / len", 1)]
)
def test_what_is_computed_from_the_number_of_rows_is_refused(name, ranks):
    line = REFUSED[name].__code__.co_firstlineno
    with pytest.raises(RefusedError, match=re.escape(f"{Path(__file__).name}:{line}: ")):
        called(lambda: Net(REFUSED[name]), _plain, ranks=ranks)


ALLOWED = {
    "zeros": lambda s, h, x, ei: h + torch.zeros(x.size(0), 6, dtype=h.dtype) + h.new_ones(x.shape[0], 1),
    "shapes": lambda s, h, x, ei: h.view((*h.shape[:1], 2, 3)).reshape(x.shape[0], h.shape[1:].numel()),
    "smaller": lambda s, h, x, ei: h[: min(x.size(0), h.size(0))],
    "larger": lambda s, h, x, ei: h + torch.zeros(max(int(ei.max()) + 1, x.size(0)), 6),
    "any": lambda s, h, x, ei: h.relu() if x.size(0) > 1 and len(x.shape) == 2 else h,
    "concatenated": lambda s, h, x, ei: torch.cat([h, h]).view(2, h.size(0), 6).sum(0),
    "an int": lambda s, h, x, ei: h * (2 if isinstance(x.size(0), int) and isinstance(x.shape, torch.Size) else 1),
    "edges": lambda s, h, x, ei: h + torch.zeros(h.size(0)).index_add(0, ei[1], torch.ones(ei.size(1)))[:, None],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_sizes_work(name):
    assert_exact(Net(ALLOWED[name]).double(), GRAPH, _plain, sp.pyg.wrap, ranks=(1, 3), modes=("sar",))


WITHOUT_ROWS = {
    "Fourier transform": lambda s, h, x, ei: torch.fft.rfft(h, dim=1).abs(),
    "convolution": lambda s, h, x, ei: F.conv1d(h.t().unsqueeze(0), torch.ones(6, 6, 1, dtype=h.dtype))[0].t(),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_what_torch_cannot_do_without_rows(name):
    """torch raises on the rank without nodes; the engine mends that, and it is no refusal that the model caught."""
    owners = {"empty part": assignments(41, 3, GRAPH.edge_index)["empty part"]}
    model = Net(lambda s, h, x, ei: h + WITHOUT_ROWS[name](s, h, x, ei).sum(1, keepdim=True))
    assert_exact(model.double(), GRAPH, _plain, sp.pyg.wrap, ranks=3, modes=("sar",), owners=owners)
