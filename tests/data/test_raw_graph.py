"""`RawGraph.validate` names what is wrong, where, and what is expected."""

import numpy as np
import pytest
import torch

from shardpass.data import EDGE, NODE, EdgeArrays, RawGraph


def graph(src, dst, num_nodes=3, node_fields=None, edge_fields=None) -> RawGraph:
    fields = ({NODE: node_fields or {}}, {EDGE: edge_fields or {}})
    return RawGraph({NODE: num_nodes}, {EDGE: EdgeArrays(src, dst)}, *fields)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, ">i4", np.int32, np.int64, np.uint64])
def test_integers_of_any_width(dtype):
    ends = graph(np.array([0, 2], dtype=dtype), np.array([1, 1], dtype=dtype)).validate().edges[EDGE]
    assert ends.src.tolist() == [0, 2] and ends.src.dtype in (torch.int32, torch.int64)


def test_memory_is_shared():
    src, x = np.array([0, 1]), np.ones((3, 2))
    checked = graph(src, np.array([1, 2]), node_fields={"x": x}).validate()
    assert checked.edges[EDGE].src.data_ptr() == src.ctypes.data
    assert checked.node_fields[NODE]["x"].data_ptr() == x.ctypes.data


@pytest.mark.parametrize(
    ("src", "error", "message"),
    [
        ([0.0, 1.0], TypeError, r"source ids of edges .* are torch.float64; expected integers: convert them to int64"),
        ([0.0, 1.5], TypeError, r"torch.float64 and not whole \(1.5 at position 1\)"),
        ([float("nan"), 1.0], TypeError, r"not whole \(nan at position 0\)"),
        ([True, False], TypeError, r"are torch.bool; expected integers"),
        ([0, 3], ValueError, r"source ids of edges .*: 3 at position 1 is outside the valid interval \[0, 3\)"),
        ([-1, 7], ValueError, r"-1 at position 0 is outside the valid interval \[0, 3\)"),
        ([0], ValueError, "1 sources and 2 destinations; expected as many"),
        ([[0, 1]], ValueError, r"have the shape \[1, 2\]; expected a list of integers"),
        (["a", "b"], TypeError, "which tensors cannot hold; expected numbers or booleans"),
        (np.array([2**64 - 1, 0], dtype=np.uint64), ValueError, "at position 0 is outside the valid interval"),
    ],
)
def test_wrong_edges(src, error, message):
    with pytest.raises(error, match=message):
        graph(src, [0, 1]).validate()


@pytest.mark.parametrize(
    ("name", "fields", "error", "message"),
    [
        (
            "node_fields",
            {"x": np.ones((2, 2))},
            ValueError,
            r"field 'x' of nodes of type 'node' .*\[2, 2\]; expected 3 rows",
        ),
        ("node_fields", {"x": np.array(1.0)}, ValueError, r"has the shape \[\]; expected 3 rows"),
        ("edge_fields", {"w": np.ones(3)}, ValueError, r"field 'w' of edges of type .* expected 2 rows"),
        ("node_fields", {"x": torch.ones(3).to(torch.float8_e5m2)}, TypeError, "is torch.float8_e5m2; expected one of"),
        ("node_fields", {"x": np.array(["a", "b", "c"])}, TypeError, "field 'x' of nodes .* has the type <U1"),
        ("node_fields", {5: np.ones(3)}, TypeError, "name 5 is a int; expected a string"),
    ],
)
def test_wrong_fields(name, fields, error, message):
    with pytest.raises(error, match=message):
        graph([0, 1], [1, 2], **{name: fields}).validate()


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (RawGraph({"a": -1}, {}), ValueError, "number of nodes of type 'a' is -1; expected an integer >= 0"),
        (RawGraph({"a": 2.0}, {}), ValueError, "is 2.0; expected an integer"),
        (
            RawGraph({"a": 1}, {("a", "to", "b"): EdgeArrays([], [])}),
            ValueError,
            "'b' is not a node type of this graph",
        ),
        (
            RawGraph({"a": 1}, {"ab": EdgeArrays([], [])}),
            ValueError,
            "expected .source type, relation, destination type",
        ),
        (RawGraph({"a": 1}, {}, {"b": {}}), ValueError, "node_fields has fields of 'b', which is not a type"),
        (RawGraph({"a": 1}, {}, graph_fields={"g": [1]}), TypeError, "graph field 'g' is a list; expected a number"),
        (
            RawGraph({"a": 1}, {}, graph_fields={"g": torch.ones(1) + 1j}),
            TypeError,
            "'g' is a tensor of torch.complex64",
        ),
        (RawGraph({"\ud800": 1}, {}), ValueError, "is not valid Unicode"),
    ],
)
def test_wrong_types(raw, error, message):
    with pytest.raises(error, match=message):
        raw.validate()


def test_graph_without_types():
    assert RawGraph({}, {}).validate().num_edges == {}
