"""The parts of ``by="space"``: few edges are cut, sizes stay close, and what edges do not tell changes nothing."""

import pytest
import torch
from torch import Tensor

from shardpass.data import NODE, read
from shardpass.data.by_space import bisected, refined
from shardpass.data.partitioners import assign


def close_points(count: int, dimensions: int) -> tuple[Tensor, Tensor]:
    """Points in a cube, and the edges between each and those that are closest to it, with self-loops."""
    points = torch.rand(count, dimensions, generator=torch.Generator().manual_seed(0))
    near = torch.cdist(points, points).topk(9, largest=False).indices
    return points, torch.stack([near.flatten(), torch.arange(count).repeat_interleave(9)])


def cut(owner: Tensor, edges: Tensor) -> int:
    return int((owner[edges[0]] != owner[edges[1]]).sum())


@pytest.mark.parametrize("dimensions", [2, 3])
def test_about_as_few_edges_are_cut_as_by_kaminpar(dimensions: int) -> None:
    pytest.importorskip("kaminpar")
    parts = 8
    points, edges = close_points(4000, dimensions)
    plain = bisected(points, parts)
    found = refined(plain, [(edges[0].int(), edges[1].int())], parts)
    theirs = assign(read({"edge_index": edges, "num_nodes": 4000}), parts, "kaminpar")[NODE]
    assert cut(found, edges) < 0.95 * cut(plain, edges) and cut(found, edges) < 1.5 * cut(theirs, edges)
    assert int(torch.bincount(plain).max()) == 4000 // parts
    assert int(torch.bincount(found, minlength=parts).max()) <= 1.03 * 4000 / parts


def test_a_node_goes_where_most_of_its_neighbours_are() -> None:
    """By any edge type, against any direction; self-loops and the limit of sizes count."""
    owner, ids = torch.arange(300) // 100, torch.arange(100)
    held = ids.repeat(2), (ids + 1).remainder(100).repeat(2)  # so often to one another that these 100 stay
    stray = torch.tensor([150])
    first, second = (stray.expand(2), torch.tensor([0, 1])), (torch.tensor([2]), stray)
    loops, at_home = (stray.expand(9), stray.expand(9)), (stray.expand(2), torch.tensor([151, 152]))
    found = refined(owner, [held, first, loops, second, at_home], 3)
    assert found[150] == 0 and int((found != owner).sum()) == 1
    assert torch.equal(refined(owner, [held, first, at_home], 3), owner)  # as many neighbours there as here
    pairs = ids + 100, ids
    assert torch.bincount(refined(owner, [held, pairs], 3)).tolist() == [103, 97, 100]


def test_no_edges_and_no_nodes() -> None:
    nothing = torch.zeros(0).long()
    assert refined(nothing, [(nothing, nothing)], 4).numel() == 0
    assert torch.equal(refined(torch.tensor([0, 1]), [(nothing, nothing)], 2), torch.tensor([0, 1]))
