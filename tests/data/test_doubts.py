"""Partitioning tells of values that training would stumble over, with the node or edge, and refuses none of them."""

import warnings

import pytest
import torch

import shardpass as sp

RING = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
X = torch.ones(6, 2)
X[4, 1], X[1, 0] = float("nan"), float("inf")
PARTS = torch.tensor([0, 0, 1, 1, 1, 1])  # node 4 is not the first of its part

NOT_FINITE = "are NaN or infinite; the first that was found is in row"
DOUBTFUL = {
    "features": ({"x": X}, 2, f"2 values of field 'x' of nodes of type 'node' {NOT_FINITE} 1$"),
    "columns": (
        sp.data.RawGraph(
            {"node": 6},
            {("node", "to", "node"): sp.data.EdgeArrays(*RING)},
            {"node": {"x": X}},
            columns={"node": {"x": ["age", "posts"]}},
        ),
        2,
        f"2 values of field 'x' .* {NOT_FINITE} 1, column 'age'$",
    ),
    "edges": (
        {"edge_attr": X[:, 1], "num_nodes": 6},
        2,
        f"field 'edge_attr' of edges of .* {NOT_FINITE} 4$",
    ),
    "labels": ({"y": torch.tensor([0, 1, -1, 2, -5, 0])}, 2, "1 values of field 'y' .* below 0, but neither .* row 4$"),
    "parts": ({"x": torch.ones(6, 2)}, 9, "7 of 9 parts have no node of 6: .* use fewer parts$"),
}


@pytest.mark.parametrize("what", DOUBTFUL)
def test_doubts_are_told(tmp_path, what):
    fields, parts, sentence = DOUBTFUL[what]
    with pytest.warns(UserWarning, match=sentence) as found:
        graph = {"edge_index": RING, **fields} if isinstance(fields, dict) else fields
        sp.partition(graph, tmp_path / "store", parts, assignment=PARTS)
    assert len(found) == 1 and found[0].filename == __file__


def test_nothing_is_said_of_a_good_graph(tmp_path):
    good = {"edge_index": RING, "x": torch.ones(6, 2), "y": torch.tensor([0, 1, -1, 2, -100, 0])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.partition(good, tmp_path / "store", 2, assignment=PARTS)
