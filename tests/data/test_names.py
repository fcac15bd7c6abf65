"""Ids of the user's own: tables joined by id, names kept in the store, found again, and told where they are wrong."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import bipartite, rebuilt

import shardpass as sp
from shardpass.data import EDGE, NODE, EdgeArrays, RawGraph, open_store, partition, stream_tables, verify
from shardpass.errors import StoreError
from shardpass.testing import run
from tests.forged import document_of, reseal, seal

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
csv = pytest.importorskip("pyarrow.csv")
pytest.importorskip("duckdb")

NAMES = ["zoé", "NA", "b", "", "lone", "x" * 100]
SRC, DST = [0, 1, 1, 2, 3, 5, 0], [1, 0, 2, 2, 0, 3, 1]
X = np.arange(12, dtype=np.float32).reshape(6, 2) / 4
NODES = {
    "name": NAMES,
    "age": X[:, 0],
    "size": X[:, 1],
    "label": [0, None, 2, 1, 0, 2],
    "split": ["train", "valid", "Test", None, "train", "val"],
}


def write(path: Path, columns: dict[str, Any]) -> Path:
    """A table as a Parquet or CSV file, by the suffix."""
    table = pyarrow.table(columns)
    if path.name.endswith(".parquet"):
        parquet.write_table(table, path)
    else:
        with pyarrow.output_stream(str(path)) as file:  # which compresses .gz
            csv.write_csv(table, file)
    return path


def edges(names: list[Any] = NAMES, **more: Any) -> dict[str, Any]:
    return {"src": [names[i] for i in SRC], "dst": [names[i] for i in DST], **more}


def assert_edges(path: Path, src: list[Any], dst: list[Any]) -> None:
    """The edges of a store by name are these, in this order."""
    ends, names = rebuilt(open_store(path), 1).edges[EDGE], sp.node_names(path)
    assert names[ends.src].tolist() == src and names[ends.dst].tolist() == dst


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz"])
def test_tables(tmp_path: Path, suffix: str) -> None:
    nodes = write(tmp_path / f"nodes{suffix}", NODES)
    ends = write(tmp_path / f"edges{suffix}", edges(weight=np.arange(7) / 8))
    tables = stream_tables(ends, nodes, node_id="name")
    partition(tables, tmp_path / "store", 3, "random")
    verify(tmp_path / "store")
    assert sp.node_names(tmp_path / "store").tolist() == NAMES
    assert_edges(tmp_path / "store", edges()["src"], edges()["dst"])

    def work(comm: Any) -> Any:
        graph = sp.load(tmp_path / "store", comm)
        assert sp.node_names(tmp_path / "store", graph.node_ids).tolist() == [NAMES[i] for i in graph.node_ids]
        sp.gather(graph, graph.x, path=tmp_path / "x.parquet")
        fields = ("x", "y", "train_mask", "val_mask", "test_mask")
        return [sp.gather(graph, graph.node[name]) for name in fields], graph.edge_weight.dtype

    (x, y, *masks), dtype = run(work, 2)[0]
    assert torch.equal(x, torch.from_numpy(X)) and y.tolist() == [0, -1, 2, 1, 0, 2] and dtype is torch.float32
    assert [mask.nonzero().flatten().tolist() for mask in masks] == [[0, 4], [1, 5], [2]]
    out = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert out == {"id": NAMES, "output": X.tolist()}


def test_lists_folders_and_columns_by_name(tmp_path: Path) -> None:
    (tmp_path / "edges").mkdir()
    columns = {"follows": edges()["dst"], "who": edges()["src"], "since": range(7)}
    for number, rows in enumerate((slice(0, 3), slice(3, 7))):
        write(tmp_path / "edges" / f"{number}.parquet", {name: list(column)[rows] for name, column in columns.items()})
    nodes = write(tmp_path / "n.parquet", {"id": NAMES, "vector": X.tolist(), "age": range(6), "kind": range(6)})
    tables = stream_tables(
        tmp_path / "edges", nodes, src="who", dst="follows", label="kind", drop=("since", "age")
    )  # fmt: skip
    found = partition(tables, tmp_path / "store", 2, "random")
    assert {name: info.shape for name, info in found.node_fields[NODE].items()} == {"x": (2,), "y": ()}
    assert_edges(tmp_path / "store", edges()["src"], edges()["dst"])


def test_without_a_table_of_nodes(tmp_path: Path) -> None:
    """The nodes are those of the edges, in the order of their names, so the number of processes does not matter."""
    for names, expected in ((NAMES, sorted(set(NAMES) - {"lone"})), ([7, -2, 2**62, 0, 1, -5], [-5, -2, 0, 7, 2**62])):
        for suffix in (".parquet", ".csv"):
            path = write(tmp_path / f"e{suffix}", edges(names))
            partition(stream_tables(path), tmp_path / "store", 2, "random", overwrite=True)
            assert sp.node_names(tmp_path / "store").tolist() == expected
            assert_edges(tmp_path / "store", edges(names)["src"], edges(names)["dst"])


INTEGERS = [5, -1, 2**62, 0, 10**12, -(2**62)]
KINDS = {
    "int64": (INTEGERS, np.int64),
    "uint64": ([2**64 - 1 - i for i in range(6)], np.uint64),
    "int32": ([3, 1, 2, -4, 9, 8], np.int32),
    "strings": (["5", "-1", "0", "77", "8", "9"], object),
    "huge": (["1", "-2", "123456789012345678901", "4", "5", "6"], object),
    "07": (["07", "7", "-0", "+1", "1e3", "1.0"], object),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffixes", [(a, b) for a in (".parquet", ".csv") for b in (".parquet", ".csv")])
def test_integers_and_what_looks_alike(tmp_path: Path, kind: str, suffixes: tuple[str, str]) -> None:
    names, dtype = KINDS[kind]
    nodes = write(tmp_path / f"n{suffixes[0]}", {"id": np.array(names, dtype)})
    ends = write(tmp_path / f"e{suffixes[1]}", {name: np.array(c, dtype) for name, c in edges(names).items()})
    partition(stream_tables(ends, nodes), tmp_path / "store", 2, "random")
    if kind == "strings" and suffixes == (".csv", ".csv"):
        names = [int(name) for name in names]  # nothing says that they are strings
    found = sp.node_names(tmp_path / "store")
    assert found.tolist() == names and found.dtype in (dtype, np.int64, object)
    assert_edges(tmp_path / "store", edges(names)["src"], edges(names)["dst"])


def test_integers_of_two_types(tmp_path: Path) -> None:
    nodes = write(tmp_path / "n.parquet", {"id": np.array([1, 2, 2**64 - 1], np.uint64)})
    ends = write(tmp_path / "e.parquet", {"src": np.array([2, 1], np.int8), "dst": np.array([1, 2], np.int64)})
    partition(stream_tables(ends, nodes), tmp_path / "store", 2, "random")
    assert_edges(tmp_path / "store", [2, 1], [1, 2])
    with pytest.raises(ValueError, match=r"column 'src': 1 of 1 rows name a node .*\(-1 in row 0\)"):
        ends = write(tmp_path / "e.parquet", {"src": [-1], "dst": [1]})
        partition(stream_tables(ends, nodes), tmp_path / "other", 2, "random")


ANY_IDS = st.one_of(
    st.lists(st.text(max_size=12), min_size=1, max_size=30, unique=True),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30, unique=True),
)


@settings(deadline=None, max_examples=15)
@given(names=ANY_IDS, seed=st.integers(0, 100))
def test_any_ids_go_round(names: list[Any], seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(seed)
    src, dst = ([names[i] for i in rng.integers(0, len(names), 40)] for _ in range(2))
    nodes, ends = write(folder / "n.parquet", {"id": names}), write(folder / "e.parquet", {"src": src, "dst": dst})
    partition(stream_tables(ends, nodes), folder / "store", 2, "random")
    verify(folder / "store")
    assert sp.node_names(folder / "store").tolist() == names
    assert_edges(folder / "store", src, dst)
    numbers = rng.permutation(len(names))
    assert sp.find_nodes(folder / "store", [names[i] for i in numbers]).tolist() == numbers.tolist()


WRONG_NODES = {
    "twice": ({"id": [*"abcdefgabcdefa"]},
              r"n\.parquet, column 'id': 6 ids are there more than once, in 13 rows \('a' 3 times, first in row 0, 'b' "
              r"2 times, first in row 1, .*'e' 2 times, first in row 4, \.\.\.\); expected one row per node"),
    "null": ({"id": [None, *"abcdef", None]}, r"n\.parquet, column 'id': 2 of 8 rows have no id \(row 0, row 7\)"),
    "missing": ({"id": [*"abc"]}, r"e\.parquet, column 'src': 3 of 6 rows name a node that .*n\.parquet, column 'id' "
                                  r"has no row for \('d' in row 3, 'e' in row 4, 'f' in row 5\); add these nodes"),
    "integers": ({"id": range(6)}, r"e\.parquet, column 'src' holds strings, .* integers; expected ids of one type"),
    "floats": ({"id": [0.5, 1]}, r"column 'id' holds double; expected strings or integers .* gaps .* pandas"),
    "no id": ({"a": [*"abcdef"], "b": range(6)}, r"columns \['a', 'b'\]; which one holds the ids\? Pass node_id="),
    "text": ({"id": [*"abcdef"], "city": ["x"] * 6}, r"'city' \(string\) cannot be kept.* drop=\['city'\]"),
    "label": ({"id": [*"abcdef"], "label": ["x"] * 6}, r"column 'label' holds string; .* pandas.factorize\("),
    "split": ({"id": [*"abcdef"], "split": ["train"] * 5 + ["hold"]}, r"'hold' in row 5; expected train, val"),
    "feature": ({"id": [*"abcdef"], "f": [1, 2, None, 4, 5, 6]}, r"column 'f', row 2: there is no value"),
    "mask": ({"id": [*"abcdef"], "val_mask": [0, 1, 2, 0, 0, 0]}, r"column 'val_mask', rows from 0 on: .* booleans"),
    "both": ({"id": [*"abcdef"], "f": [[1]] * 6, "g": range(6)}, r"one column of lists, or columns of numbers"),
    "labels": ({"id": [*"abcdef"], "y": range(6), "label": range(6)}, r"\['y', 'label'\], of which one is enough"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_NODES)
def test_wrong_nodes(tmp_path: Path, case: str) -> None:
    columns, message = WRONG_NODES[case]
    ends = write(tmp_path / "e.parquet", {"src": [*"abcdef"], "dst": [*"aaabbc"]})
    with pytest.raises((ValueError, TypeError), match=message):
        partition(stream_tables(ends, write(tmp_path / "n.parquet", columns)), tmp_path / "store", 2, "random")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.parquet", "n.parquet"]  # nothing is left behind


WRONG_EDGES = {
    "mixed": ({"src": ["a"], "dst": [1]}, r"column 'src' holds .*string, .*column 'dst' int64; expected ids of one"),
    "null": ({"src": ["a", None], "dst": ["a", "b"]}, r"column 'src': 1 of 2 rows have no id \(row 1\)"),
    "more": ({"src": ["a"], "dst": ["b"], "since": [1]}, r"'since' \(int64\) cannot be kept, since of edges only"),
    "one": ({"src": ["a"], "to_whom": ["b"]}, r"columns \['src', 'to_whom'\]; expected src, dst"),
    "none": ({"a": ["a"], "b": ["b"], "c": ["b"]}, r"columns \['a', 'b', 'c'\]; expected src, dst and perhaps weight"),
}


@pytest.mark.parametrize("case", WRONG_EDGES)
def test_wrong_edges(tmp_path: Path, case: str) -> None:
    columns, message = WRONG_EDGES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        partition(stream_tables(write(tmp_path / "e.parquet", columns)), tmp_path / "store", 2, "random")


def test_wrong_text(tmp_path: Path) -> None:
    path, nodes = tmp_path / "e.csv", tmp_path / "n.csv"
    nodes.write_text("id,f\na,1\nb,2\n")
    for text, message in {
        "a,b\nb,a\n": r"e\.csv has the columns \['a', 'b'\]; expected src, dst .* in the first line",
        "src,dst\na,\n": r"column 'dst': 1 of 1 rows have no id \(row 0\)",
        "src,dst\na,b,c\n": r"e\.csv cannot be read as a CSV file with a header",
        "src,dst,weight\na,b,one\n": r"e\.csv cannot be read as a CSV file with a header.*one",
        "": r"e\.csv cannot be read as a CSV file with a header",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            partition(stream_tables(path, nodes), tmp_path / "store", 2, "random")
    with pytest.raises(ValueError, match=r"e\.txt: expected a table, one of \.parquet, \.csv, \.csv\.gz"):
        stream_tables(path.rename(tmp_path / "e.txt"))


def test_pyg_names(tmp_path: Path) -> None:
    data_module = pytest.importorskip("torch_geometric.data")
    data = data_module.Data(x=torch.rand(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), name=["a", "b", "ü"])
    partition(data, tmp_path / "store", 2, "random", node_id="name")
    assert sp.node_names(tmp_path / "store", torch.tensor([2, 0])).tolist() == ["ü", "a"]
    with pytest.raises(ValueError, match=r"field 'name' \(list\) .* pass node_id='name' to shardpass\.partition"):
        partition(data, tmp_path / "other", 2)
    for names, message in {
        ("a", 1, "b"): "names of nodes of type 'node': 2 are str, as 'a'; 1 are int, as 1; expected all strings",
        ("a", None, "b"): "1 of 3 rows have no id (row 1)",
        ("a", "b", "a"): "1 ids are there more than once, in 2 rows ('a' 2 times, first in row 0)",
        ("a", "b"): "nodes of type 'node' have 2 names; expected 3",
        ("a", "\ud800", "c"): "surrogates not allowed; expected all strings",
        (0.5, 1.0, 2.0): "holds double; expected strings or integers as ids",
    }.items():
        data.name = list(names)
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            partition(data, tmp_path / "other", 2, node_id="name")
    with pytest.raises(ValueError, match=r"node_id='nothing': there is no such node field; there are name, x"):
        data.name = ["a", "b", "c"]
        partition({"edge_index": data.edge_index, "x": data.x, "name": data.name}, tmp_path / "o", 2, node_id="nothing")


def test_names_in_an_npz(tmp_path: Path) -> None:
    ends = np.array([[0, 1], [1, 2]])
    np.savez(tmp_path / "g.npz", edge_index=ends, x=X[:3], key=np.array(["a", "bü", ""]), year=np.array([3, -1, 2]))
    for node_id, expected, dropped in [("key", ["a", "bü", ""], "year"), ("year", [3, -1, 2], "key")]:
        graph = sp.data.read(tmp_path / "g.npz", node_id=node_id, drop=[dropped])
        partition(graph, tmp_path / node_id, 2, "random")
        assert sp.node_names(tmp_path / node_id).tolist() == expected


def test_several_types(tmp_path: Path) -> None:
    data_module = pytest.importorskip("torch_geometric.data")
    data = data_module.HeteroData()
    data["user"].key, data["item"].num_nodes = torch.tensor([70, -3]), 3
    data["user", "buys", "item"].edge_index = torch.tensor([[0, 1], [2, 0]])
    data["user"].num_nodes = 2
    partition(data, tmp_path / "store", 2, "random", node_id="key")
    assert sp.node_names(tmp_path / "store", node_type="user").tolist() == [70, -3]
    assert sp.node_names(tmp_path / "store", node_type="item").tolist() == [0, 1, 2]  # has none
    assert sp.find_nodes(tmp_path / "store", np.array([-3, -3, 70]), "user").tolist() == [1, 1, 0]

    def work(comm: Any) -> None:
        graph = sp.load(tmp_path / "store", comm)
        for kind, ids in graph.node_ids_dict.items():
            sp.gather(graph, ids.float().view(-1, 1, 1), kind, tmp_path / f"{kind}.parquet")

    run(work, 2)
    user, item = (parquet.read_table(tmp_path / f"{kind}.parquet").to_pydict() for kind in ("user", "item"))
    assert user == {"id": [70, -3], "output": [[[0.0]], [[1.0]]]} and item["id"] == [0, 1, 2]
    for call, message in [
        (lambda: sp.node_names(tmp_path / "store"), "node_type=None; expected one of"),
        (lambda: sp.node_names(tmp_path / "store", torch.tensor([2]), "user"), r"ids from 2 to 2; expected \[0, 2\)"),
        (lambda: sp.find_nodes(tmp_path / "store", [70, 5], "user"), r"1 of 2 rows name a node .*\(5 in row 1\)"),
        (lambda: sp.find_nodes(tmp_path / "store", ["a"], "user"), "holds strings, .* integers"),
        (lambda: sp.find_nodes(tmp_path / "store", [0], "item"), "have no names; their original ids are 0, 1, 2"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def named(names: list[Any]) -> RawGraph:
    ends = EdgeArrays(torch.tensor([0, 1]), torch.tensor([1, 2]))
    return RawGraph({NODE: len(names)}, {EDGE: ends}, names={NODE: names})


def change(store: Path, old: bytes, new: bytes) -> None:
    path = store / "names.safetensors"
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


def test_damaged_names(tmp_path: Path) -> None:
    store = tmp_path / "store"
    partition(named(["aä", "bb", "cccc"]), store, 2, "random")
    assert sp.node_names(store).tolist() == ["aä", "bb", "cccc"]
    change(store, b"bbcccc", b"bbcdcc")
    for call in (sp.node_names, verify):
        with pytest.raises(StoreError, match=r"names\.safetensors is altered: the checksum of the tensor"):
            call(store)
    for old, new, message in [
        (b"bbcdcc", b"bb\xffccc", "the names are not UTF-8"),
        ("ä".encode() + b"bb\xff", b"abb\xc3\xa4", "a name begins within a character"),
        (np.array([3, 5, 9]).tobytes(), np.array([5, 3, 9]).tobytes(), "do not ascend to 9"),
        (np.array([5, 3, 9]).tobytes(), np.array([3, 5, 99]).tobytes(), "do not ascend to 9"),
        (np.array([3, 5, 99]).tobytes(), np.array([2, 4, 8]).tobytes(), "the names end at 8; expected 9"),
        (b'"shape":[3]', b'"shape":[2]', "is not as shardpass.partition writes it"),
    ]:
        change(store, old, new)
        reseal(store)
        with pytest.raises(StoreError, match=message):
            sp.node_names(store)
    (store / "names.safetensors").unlink()
    with pytest.raises(StoreError, match=r"names\.safetensors cannot be read"):
        sp.load(store, sp.connect("local"))
    partition(named([7, 8, 9]), store, 2, "random", overwrite=True)  # a store with names is replaced like any other
    assert sp.node_names(store).dtype == np.int64
    document = document_of(store)
    document["names"]["name"] = "../elsewhere"
    seal(store, document)
    with pytest.raises(StoreError, match=r"it lists the file '\.\./elsewhere'; expected 'names\.safetensors'"):
        open_store(store)


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardpass.data.names.dictionary._LEAST_MIB", 1)
    path = write(tmp_path / "e.parquet", {"src": range(300000), "dst": range(300000)})
    with pytest.raises(ValueError, match=r"DuckDB could not look up ids in 1MiB, half of memory_bytes= \(--memory\)"):
        partition(stream_tables(path), tmp_path / "store", 2, "random", memory_bytes=1 << 20)


def test_ids_that_are_none(tmp_path: Path) -> None:
    partition(named(["b", "a", "c"]), tmp_path / "store", 1)
    for wrong in (torch.tensor([True, False, True]), torch.tensor([1.7])):
        with pytest.raises(ValueError, match="expected ids of nodes, integers, found torch"):
            sp.node_names(tmp_path / "store", wrong)
    assert sp.find_nodes(tmp_path / "store", []).tolist() == []
    assert sp.find_nodes(tmp_path / "store", ["c", "b", "c"]).tolist() == [2, 0, 2]
    partition(named([2**63 + 5, 3, 2**64 - 1]), tmp_path / "large", 1)
    assert sp.find_nodes(tmp_path / "large", [2**64 - 1, 3]).tolist() == [2, 1]


def test_stores_without_names(tmp_path: Path) -> None:
    partition(bipartite(), tmp_path / "store", 2, "range")
    assert "names" not in document_of(tmp_path / "store")  # the same bytes as before there were names
    assert open_store(tmp_path / "store").names("item") is None
    assert sp.node_names(tmp_path / "store", node_type="item").tolist() == [0, 1, 2]
