"""What puts the rows of edge_index in another order, or takes one of them, is exact; positions of edges are refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric.utils import degree

from .one_by_one import assert_each_exact, refusals
from .pyg_cases import GRAPH


def _apart(h, source, target):
    return torch.zeros_like(h).index_add(0, target, h[source])


def _degrees(h, ids):
    return h * degree(ids, h.size(0), h.dtype).view(-1, 1)


LISTS = {
    "[[1, 0]]": lambda e: e[[1, 0]],
    "[[0, 1]]": lambda e: e[[0, 1]],
    "[[1, 0], :]": lambda e: e[[1, 0], :],
    "[tensor]": lambda e: e[torch.tensor([1, 0])],
    "index_select": lambda e: e.index_select(0, torch.tensor([1, 0])),
    "[:]": lambda e: e[:],
    "[...]": lambda e: e[...],
    "[0:2]": lambda e: e[0:2],
    "flip": lambda e: e.flip(0),
    "flipud": lambda e: torch.flipud(e),
    "roll": lambda e: e.roll(1, 0),
    "permute": lambda e: e.permute(0, 1),
    "reshape": lambda e: e.reshape(2, -1),
    "view": lambda e: e.view(2, e.size(1)),
    "unbind, stack": lambda e: torch.stack(e.unbind()),
    "stack of the reverse": lambda e: torch.stack([e[1], e[0]]),
    "vstack": lambda e: torch.vstack([e[1], e[0]]),
    "chunk, cat": lambda e: torch.cat([*e.chunk(2)]),
    "chunk, cat of the reverse": lambda e: torch.cat([*e.chunk(2)][::-1]),
}
ROWS = {
    "chunk": lambda m, h, e, w: _apart(h, *(row.view(-1) for row in e.chunk(2))),
    "split": lambda m, h, e, w: _apart(h, *(row.squeeze(0) for row in e.split(1))),
    "tensor_split": lambda m, h, e, w: _apart(h, *(row[0] for row in e.tensor_split(2))),
    "select": lambda m, h, e, w: _apart(h, e.select(0, 0), e.select(0, 1)),
    "narrow": lambda m, h, e, w: _apart(h, e.narrow(0, 0, 1).flatten(), e[1:].flatten()),
    "degrees both ways": lambda m, h, e, w: _degrees(h, e.reshape(-1)) + _degrees(h, e.view(-1)),
    "degrees of the reverse": lambda m, h, e, w: _degrees(h, e.flip(0).flatten()),
}


def _passes(change):
    return lambda m, h, e, w: m.last(h, change(e), w)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_rearranged_rows_are_exact(ranks):
    assert_each_exact(ROWS | {name: _passes(change) for name, change in LISTS.items()}, GRAPH, ranks)


BY_POSITION = {
    "a slice": lambda m, h, e, w: m.last(h, e[:, :10]),
    "a slice longer than the list": lambda m, h, e, w: m.last(h, e[:, :1000]),
    "an edge": lambda m, h, e, w: h + e[:, 5].sum(),
    "narrow": lambda m, h, e, w: m.last(h, e.narrow(1, 0, 3)),
    "chunks of edges": lambda m, h, e, w: m.last(h, e.chunk(3, 1)[0]),
    "pieces longer than the list": lambda m, h, e, w: m.last(h, e.split(1000, 1)[0]),
    "flip of edges": lambda m, h, e, w: m.last(h, e.flip(1), w),
    "t": lambda m, h, e, w: m.last(h, e.t()[w > 0.5].t()),
    "T": lambda m, h, e, w: m.last(h, e.T.T),
    "transpose": lambda m, h, e, w: m.last(h, e.transpose(0, 1).transpose(0, 1)),
    "a row twice": lambda m, h, e, w: m.last(h, e[[1, 1]]),
}


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_takes_edges_by_their_position_is_refused(ranks):
    words = "on the edge_index of a sharded graph gives neither the list [2, num_edges] nor one of its rows"
    assert {name: text for name, text in refusals(BY_POSITION, GRAPH, ranks).items() if words not in text} == {}
