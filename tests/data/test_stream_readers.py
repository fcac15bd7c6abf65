"""Readers of graphs in files: every format gives the same graph; what is wrong is told with file and place."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_helpers import assert_same, rebuilt

from shardpass.data import EDGE, NODE, GraphFiles, RawGraph, open_store, partition, read_edge_list, stream_edge_list
from shardpass.data.file_rows import FileRows
from shardpass.data.streaming import Budget

EDGES = np.array([[0, 1, 1, 3, 2, 4, 4], [1, 0, 2, 3, 1, 0, 0]])
WEIGHTS = np.linspace(0, 1, 7, dtype=np.float32)
X = np.arange(10, dtype=np.float32).reshape(5, 2) / 4
Y = np.array([0, -1, 2, 1, 0])
MASK = np.array([True, False, True, True, False])


def stored(data: Any, folder: Path) -> RawGraph:
    """The graph, put together again from the store of it."""
    partition(data, folder / "store", 2, "random", overwrite=True, memory_bytes=1000)
    return rebuilt(open_store(folder / "store"), 2)


def write_text(path: Path, *columns: Any, header: str = "", delimiter: str = ",") -> Path:
    lines = [delimiter.join(map(str, row)) for row in zip(*(np.asarray(column).tolist() for column in columns))]
    text = "\n".join([*([header] if header else []), *lines]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    pa = pytest.importorskip("pyarrow")
    __import__("pyarrow.parquet").parquet.write_table(
        pa.table({name: list(values) for name, values in columns.items()}), path, row_group_size=3
    )
    return path


@pytest.fixture
def npy(tmp_path: Path) -> dict[str, Path]:
    for name, array in {"edges": EDGES, "x": X, "y": Y, "train_mask": MASK, "weights": WEIGHTS}.items():
        np.save(tmp_path / f"{name}.npy", array)
    return {name: tmp_path / f"{name}.npy" for name in ("edges", "x", "y", "train_mask", "weights")}


def expected(weights: bool = True) -> RawGraph:
    given = {"weights": WEIGHTS} if weights else {}
    return read_edge_list(EDGES, features=X, labels=Y, masks={"train_mask": MASK}, **given)


def streamed(npy: dict[str, Path], edges: Path, **other: Any) -> GraphFiles:
    fields = {"features": npy["x"], "labels": npy["y"], "masks": {"train_mask": npy["train_mask"]}, **other}
    return stream_edge_list(edges, **fields)


@pytest.mark.parametrize("order", ["rows", "columns", "fortran rows", "fortran columns"])
@pytest.mark.parametrize("kind", ["<i8", "<i4", ">i4", "<u2"])
def test_npy_in_every_order_and_type(tmp_path, npy, order, kind):
    edges = EDGES if "rows" in order else EDGES.T
    np.save(tmp_path / "e.npy", np.asarray(edges.astype(kind), order="F" if "fortran" in order else "C"))
    assert_same(stored(streamed(npy, tmp_path / "e.npy", weights=npy["weights"]), tmp_path), expected())


@pytest.mark.parametrize(("name", "header"), [("e.csv", "a,b,c"), ("e.csv.gz", ""), ("e.txt", "# c"), ("e.txt.gz", "")])
@pytest.mark.parametrize("weights", [True, False])
def test_text(tmp_path, npy, name, header, weights):
    columns = (*EDGES, WEIGHTS) if weights else EDGES
    path = write_text(tmp_path / name, *columns, header=header, delimiter="," if ".csv" in name else " ")
    assert_same(stored(streamed(npy, path), tmp_path), expected(weights))


def test_text_fields_and_large_ids(tmp_path, npy):
    write_text(tmp_path / "x.csv.gz", *X.T, header="a,b")
    write_text(tmp_path / "y.csv", Y)
    data = streamed(npy, npy["edges"], features=tmp_path / "x.csv.gz", labels=tmp_path / "y.csv")
    assert_same(stored(data, tmp_path), expected(weights=False))
    path = write_text(tmp_path / "e.csv", [2**53 + 1], [0])
    with pytest.raises(ValueError, match=rf"e\.csv: source ids .*: {2**53 + 1} at position 0 is outside"):
        stored(streamed(npy, path), tmp_path)


@pytest.mark.parametrize("names", [("src", "dst"), ("target", "source"), ("DST_ID", "SRC_ID"), ("u", "v")])
def test_parquet(tmp_path, npy, names):
    ends = dict(zip(names, EDGES if names[0] not in ("target", "DST_ID") else EDGES[::-1]))
    path = write_parquet(tmp_path / "e.parquet", **ends, weight=WEIGHTS)
    x = write_parquet(tmp_path / "x.parquet", id=range(5), a=X[:, 0], b=X[:, 1])
    y = write_parquet(tmp_path / "y.parquet", label=Y)
    mask = write_parquet(tmp_path / "m.parquet", mask=MASK.tolist())
    data = streamed(npy, path, features=x, labels=y, masks={"train_mask": mask})
    assert_same(stored(data, tmp_path), expected())


def test_parquet_lists_and_folders(tmp_path, npy):
    (tmp_path / "edges").mkdir()
    write_parquet(tmp_path / "edges" / "part-0.parquet", src=EDGES[0, :4], dst=EDGES[1, :4])
    write_parquet(tmp_path / "edges" / "part-1.parquet", src=EDGES[0, 4:], dst=EDGES[1, 4:])
    x = write_parquet(tmp_path / "x.parquet", x=[row.tolist() for row in X])
    graph = stored(streamed(npy, tmp_path / "edges", features=x), tmp_path)
    assert torch.equal(graph.node_fields[NODE]["x"].float(), torch.from_numpy(X))
    assert_same(replace(graph, node_fields={NODE: {}}), RawGraph({NODE: 5}, expected(False).edges))


def test_folder(tmp_path, npy):
    folder = tmp_path / "graph"
    folder.mkdir()
    for name, path in npy.items():
        path.rename(folder / f"{name}.npy")
    assert_same(stored(folder, tmp_path), expected())
    assert_same(stored(str(folder), tmp_path), expected())
    write_text(folder / "edges.csv", *EDGES)
    with pytest.raises(ValueError, match=r"holds both edges\.npy and edges\.csv; expected one"):
        stored(folder, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no edges: expected edges\.npy, .*; of a DGL partition pass"):
        stored(tmp_path / "empty", tmp_path)


def test_fields_are_dropped(tmp_path, npy):
    graph = stored(replace(streamed(npy, npy["edges"], weights=npy["weights"]), drop=("x", "edge_weight")), tmp_path)
    assert list(graph.node_fields[NODE]) == ["y", "train_mask"] and not graph.edge_fields[EDGE]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0,1\n1,2.5\n",
            r"e\.csv cannot be read as numbers, in the rows from 0 on: could not convert string '2\.5' to int64",
        ),
        ("a,b\n\n0,1\n1,nan\n", r"e\.csv cannot be .* could not convert string 'nan' to int64 at row 1"),
        ("0,1\n1\n", r"e\.csv cannot be .* requires 2 columns but 1 were found at row 2"),
        ("0,1\n1,2,3\n", r"e\.csv cannot be .* requires 2 columns but 3 were found at row 2"),
        ("0,1\n1,\n", r"e\.csv cannot be .* could not convert string '' to int64 at row 1"),
        ("0,1,0.5\n1,2,x\n", r"e\.csv cannot be .* could not convert string 'x' to float32 at row 1"),
        ("0,1,2,3\n", r"e\.csv has 4 columns; expected source, destination"),
        ("0\n", r"has one column .commas separate those of a .csv, spaces those of a .txt.; expected source"),
        ("0;1\n1;2\n", "has semicolons between its columns"),
        ("dst,src\n0,1\n", r"e\.csv has the columns dst, src; expected source, destination .* in this order"),
        ('"weight","src","dst"\n1,0,1\n', r"e\.csv has the columns \"weight\", \"src\", \"dst\"; exp"),
        ("0,1\n-3,2\n", r"e\.csv: source ids .*: -3 at position 1 is outside the valid interval \[0, 5\)"),
        ("0,1\n3,5\n", r"e\.csv: destination ids .*: 5 at position 1 is outside the valid interval \[0, 5\)"),
        ("0,99999999999999999999\n", r"e\.csv cannot be .* could not convert string '99999999999999999999' to int64"),
    ],
)
def test_wrong_text(tmp_path, npy, text, message):
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        stored(streamed(npy, tmp_path / "e.csv"), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "temporary files are left"


def test_torn_files(tmp_path, npy):
    whole = gzip.compress(b"0,1\n" * 1000)
    (tmp_path / "e.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"e\.csv\.gz cannot be read as text"):
        stored(streamed(npy, tmp_path / "e.csv.gz"), tmp_path)
    for name in ("edges", "x"):
        raw = npy[name].read_bytes()
        npy[name].write_bytes(raw[:-8])
        with pytest.raises(ValueError, match=rf"{name}\.npy cannot be read as an \.npy file of numbers"):
            stored(streamed(npy, npy["edges"]), tmp_path)
        npy[name].write_bytes(raw)
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"e\.parquet cannot be read as a Parquet file"):
        stored(streamed(npy, tmp_path / "e.parquet"), tmp_path)


def test_wrong_arrays(tmp_path, npy):
    cases: list[tuple[Any, str]] = [
        (EDGES.astype(float), r"e\.npy: source ids .* are torch\.float64; expected integers"),
        (EDGES + 0.5, r"e\.npy: source ids .* not whole \(0\.5 at position 0\)"),
        (np.where(EDGES == 3, np.nan, EDGES), r"not whole \(nan at position 3\)"),
        (EDGES - 1, r"e\.npy: source ids of .*: -1 at position 0 is outside the valid interval \[0, 5\)"),
        (np.zeros((3, 4), int), r"e\.npy: edges have the shape \[3, 4\]; expected \[2, num_edges\]"),
        (np.zeros((2, 2), int), r"e\.npy: edges of the shape \[2, 2\] can be read both ways"),
        (EDGES.astype(str), r"e\.npy holds <U21, which tensors cannot hold"),
    ]
    for array, message in cases:
        np.save(tmp_path / "e.npy", array)
        with pytest.raises((ValueError, TypeError), match=message):
            stored(streamed(npy, tmp_path / "e.npy"), tmp_path)
    np.save(tmp_path / "short.npy", Y[:3])
    with pytest.raises(ValueError, match="different numbers of rows: x has 5, y has 3, train_mask has 5"):
        stored(streamed(npy, npy["edges"], labels=tmp_path / "short.npy"), tmp_path)
    with pytest.raises(ValueError, match="the number of nodes of type 'node' is unknown"):
        stored(stream_edge_list(npy["edges"]), tmp_path)
    with pytest.raises(ValueError, match="edge weights are given twice"):
        stored(streamed(npy, write_text(tmp_path / "e.csv", *EDGES, WEIGHTS), weights=npy["weights"]), tmp_path)
    for name, message in [("nothere.npy", "there is no file"), ("x.pt", r"x\.pt: expected one of \.npy, \.parquet")]:
        (tmp_path / "x.pt").write_bytes(b"")
        with pytest.raises(ValueError, match=message):
            stream_edge_list(tmp_path / name, num_nodes=3)


def test_wrong_parquet(tmp_path, npy):
    pytest.importorskip("pyarrow")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"src": [0, 1, 2, None], "dst": [1, 1, 1, 1]}, r"e\.parquet, column 'src', row 3: there is no value"),
        ({"src": [0.0, 1.0], "dst": [1, 1]}, r"e\.parquet, column 'src', row 0: float64; expected integers"),
        ({"src": ["a"], "dst": [1]}, r"e\.parquet, column 'src': string; expected numbers"),
        ({"dst": [0], "a": [1]}, r"has the columns \['dst', 'a'\]; expected two of node ids \(src and dst\)"),
        ({"src": [0], "dst": [1], "time": [3]}, r"has the columns \['src', 'dst', 'time'\]; expected two of node ids"),
        ({"src": [0, 7], "dst": [1, 1]}, r"e\.parquet: source ids .*: 7 at position 1 is outside"),
    ]
    for columns, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            stored(streamed(npy, write_parquet(tmp_path / "e.parquet", **columns)), tmp_path)
    fields: list[tuple[dict[str, Any], str]] = [
        ({"id": [0, 1, 2, 4, 3], "a": Y}, r"x\.parquet, column 'id', row 3: found 4; expected 3: sort the rows by id"),
        ({"a": [[1], [2], [3], [4], [5, 6]]}, r"x\.parquet, column 'a', rows from 3 on: lists of \[1, 2\] numbers"),
        ({"a": [1.0, None, 3.0, 4.0, 5.0]}, r"x\.parquet, column 'a', row 1: there is no value"),
    ]
    for columns, message in fields:
        x = write_parquet(tmp_path / "x.parquet", **columns)
        with pytest.raises(ValueError, match=message):
            stored(streamed(npy, npy["edges"], features=x), tmp_path)


def test_missing_pyarrow(tmp_path, npy, monkeypatch):
    (tmp_path / "e.parquet").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.dataset", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"reading Parquet files needs the package 'pyarrow'.*pip install pyarrow"):
        stored(streamed(npy, tmp_path / "e.parquet"), tmp_path)


@pytest.mark.parametrize("fortran", [False, True])
def test_rows_of_a_file(tmp_path, fortran):
    array = np.random.default_rng(0).standard_normal((5000, 3))
    np.save(tmp_path / "a.npy", np.asarray(array, order="F" if fortran else "C"))
    rows, tensor = FileRows.of_npy(tmp_path / "a.npy"), torch.from_numpy(array)
    ids = torch.randint(0, 5000, (4000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows.take(ids), tensor[ids])
    assert torch.equal(rows.block(7, 4990), tensor[7:4990]) and torch.equal(rows.load(), tensor)
    column = rows[:, 1]
    assert column.shape == (5000,) and torch.equal(column.take(ids), tensor[ids, 1])
    assert rows.take(ids[:0]).shape == (0, 3)


def test_no_room_for_temporary_files(tmp_path):
    with pytest.raises(
        ValueError, match=r"sorting needs \d+\.\d\d GiB of temporary files beside the store, and the disk"
    ):
        Budget(tmp_path).require_disk(1 << 60, "sorting")
