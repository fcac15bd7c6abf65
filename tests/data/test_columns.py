"""Names of columns: kept in stores and checkpoints, compared when a model is used, and doubted where they are odd."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardpass as sp
from shardpass.core.ranks import Ranks
from shardpass.core.training.checkpoint_file import read_verified, write_verified
from shardpass.data import NODE, RawGraph, open_store, partition, read, stream_edge_list, stream_tables
from shardpass.data.raw import EdgeArrays
from shardpass.errors import CheckpointError, StoreError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
csv = pytest.importorskip("pyarrow.csv")
pytest.importorskip("duckdb")

N = 6
COLUMNS = {"age": np.arange(N) / 7, "posts": np.arange(N) % 4, "score": np.ones(N)}


def node_table(path: Path, **more: Any) -> Path:
    table = arrow.table({"id": [f"n{i}" for i in range(N)], **COLUMNS, **more})
    (csv.write_csv if path.suffix == ".csv" else parquet.write_table)(table, path)
    return path


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    ends = {"src": [f"n{i}" for i in range(N)], "dst": [f"n{(i + 1) % N}" for i in range(N)]}
    parquet.write_table(arrow.table(ends), tmp_path / "edges.parquet")
    return tmp_path / "edges.parquet"


def numbered(tmp_path: Path, name: str, **columns: Any) -> Any:
    np.save(tmp_path / "ends.npy", np.stack([np.arange(N), (np.arange(N) + 1) % N]))
    table = arrow.table({**COLUMNS, **columns})
    (csv.write_csv if name.endswith(".csv") else parquet.write_table)(table, tmp_path / name)
    return tmp_path / "ends.npy", tmp_path / name


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_store_keeps_them_and_says_them(suffix: str, edges: Path, tmp_path: Path) -> None:
    nodes = node_table(tmp_path / f"nodes{suffix}", label=np.arange(N) % 2)
    made = partition(stream_tables(edges, nodes), tmp_path / "store", 2, "random")
    assert "columns of x: age, posts, score" in str(made) and "label" not in str(made)
    assert open_store(tmp_path / "store").manifest.columns == {NODE: {"x": [*COLUMNS]}}
    assert sp.spawn(lambda comm: sp.load(tmp_path / "store", comm).column_names, 2)[1] == {NODE: {"x": [*COLUMNS]}}
    ends, features = numbered(tmp_path, f"x{suffix}")
    partition(stream_edge_list(ends, features=features), tmp_path / "numbers", 2, "random")
    assert open_store(tmp_path / "numbers").manifest.columns == {NODE: {"x": [*COLUMNS]}}


def test_a_store_without_names_is_as_before(tmp_path: Path) -> None:
    graph = {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.ones((3, 2), np.float32)}
    partition(graph, tmp_path / "store", 1)
    assert "columns" not in json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert open_store(tmp_path / "store").manifest.columns == {}


def test_as_many_names_as_columns(tmp_path: Path) -> None:
    raw = RawGraph(
        {"a": 3, "b": 2}, {("a", "to", "b"): EdgeArrays([0, 1], [0, 1])}, {"a": {"x": torch.ones(3, 2)}},
        columns={"a": {"x": ["one", "two"]}},
    )  # fmt: skip
    made = partition(raw, tmp_path / "store", 1, "range")
    assert "columns of a.x: one, two" in str(made)
    with pytest.raises(ValueError, match=r"rows of the shape \[2\] and 1 names of columns"):
        read(RawGraph(raw.num_nodes, raw.edges, raw.node_fields, columns={"a": {"x": ["one"]}}))
    forged = json.dumps(json.loads((tmp_path / "store" / "manifest.json").read_text())).replace('"two"', '"two", "3"')
    blank, found = "0" * 64, json.loads(forged)["sha256"]
    text = forged.replace(found, blank)
    total = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "store" / "manifest.json").write_text(text.replace(blank, total, 1))
    with pytest.raises(StoreError, match="it names 3 columns of 'x' of 'a', which has not as many"):
        open_store(tmp_path / "store")


class Frame:
    """As much of a DataFrame as is read."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns
        self.shape = (3, len(columns))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.ones((3, len(self.columns)), np.float32)

    def __len__(self) -> int:
        return 3


def test_tables_in_memory() -> None:
    def columns(*names: Any) -> Any:
        return read({"edge_index": np.array([[0, 1], [1, 2]]), "x": Frame(*names)}).columns

    assert columns("one", "two") == {NODE: {"x": ["one", "two"]}} and columns(0, 1) == {NODE: {}}
    with pytest.raises(ValueError, match=r"field 'x': 'label' looks like a label.*pass .to_numpy"):
        columns("one", "label")
    graph = sp.shard({"edge_index": np.array([[0, 1], [1, 2]]), "x": Frame("one", "two")})
    assert graph.column_names == {NODE: {"x": ["one", "two"]}}


ODD = ("__index_level_0__", "Unnamed: 0", "index", "", "y_true", "Label", "target", "class")


@pytest.mark.parametrize("name", ODD)
def test_what_looks_like_an_index_or_a_label_is_no_feature(name: str, edges: Path, tmp_path: Path) -> None:
    odd = {name: np.arange(N) % 2}
    kind = "a label" if name in ODD[4:] else "an index"
    nodes = node_table(tmp_path / "nodes.parquet", **odd)
    with pytest.raises(ValueError, match=rf"'{name}' looks like {kind}, and would become a feature"):
        partition(stream_tables(edges, nodes), tmp_path / "store", 1)
    for given in ({"keep": [name]}, {"drop": [name]}, {"label": name}):
        if kind == "an index" and "label" in given:
            continue
        made = partition(stream_tables(edges, nodes, **given), tmp_path / "store", 1, "range", overwrite=True)
        assert made.columns[NODE]["x"] == [*COLUMNS, *([name] if "keep" in given else [])]
    for file in ("x.parquet", "x.csv"):
        ends, features = numbered(tmp_path, file, **odd)
        with pytest.raises(ValueError, match=rf"'{name}' looks like {kind}"):
            partition(stream_edge_list(ends, features=features), tmp_path / "other", 1)
        kept = stream_edge_list(ends, features=features, keep=[name])
        assert partition(kept, tmp_path / "store", 1, "range", overwrite=True).columns[NODE]["x"][-1] == name


def test_other_doubts(edges: Path, tmp_path: Path) -> None:
    nodes = node_table(tmp_path / "nodes.parquet", kind=np.arange(N) % 2, y=np.arange(N) % 3)
    with pytest.raises(ValueError, match="'y' looks like a label"):
        partition(stream_tables(edges, nodes, label="kind"), tmp_path / "store", 1)
    with pytest.raises(ValueError, match="has no column 'z'"):
        partition(stream_tables(edges, nodes, keep=("z",)), tmp_path / "store", 1)
    ends, _ = numbered(tmp_path, "x.parquet")
    np.save(tmp_path / "x.npy", np.ones((N, 2)))
    with pytest.raises(ValueError, match="name columns of a table of nodes"):
        stream_tables(edges, keep=("age",))
    with pytest.raises(ValueError, match="names columns of features, and none are given"):
        stream_edge_list(ends, num_nodes=N, keep=("age",))
    with pytest.raises(ValueError, match=r"has no column 'age' of features; there are \[\]"):
        partition(stream_edge_list(ends, features=tmp_path / "x.npy", keep=("age",)), tmp_path / "store", 1)
    table = parquet.read_table(node_table(tmp_path / "pandas.parquet"))
    about = json.dumps({"index_columns": ["score"], "columns": []})
    parquet.write_table(table.replace_schema_metadata({"pandas": about}), tmp_path / "pandas.parquet")
    with pytest.raises(ValueError, match="'score' looks like an index"):
        partition(stream_tables(edges, tmp_path / "pandas.parquet"), tmp_path / "store", 1)
    (tmp_path / "ends.csv").write_text("index,a,b\n0,1,2\n1,2,0\n")
    with pytest.raises(ValueError, match="'index' seems to number the rows"):
        partition(stream_edge_list(tmp_path / "ends.csv", num_nodes=3), tmp_path / "store", 1)


def test_a_checkpoint_knows_the_columns_of_training(edges: Path, tmp_path: Path) -> None:
    for name, order in (("trained", [0, 1, 2]), ("turned", [2, 1, 0]), ("more", [0, 1, 2, 0])):
        names = [*COLUMNS, "further"]
        table = {("further" if i == 3 else names[j]): COLUMNS[names[j]] for i, j in enumerate(order)}
        parquet.write_table(arrow.table({"id": [f"n{i}" for i in range(N)], **table}), tmp_path / f"{name}.parquet")
        partition(stream_tables(edges, tmp_path / f"{name}.parquet"), tmp_path / name, 2, "random", seed=len(name))
    bare = {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.ones((3, 3), np.float32)}
    partition(bare, tmp_path / "bare", 2, "range")
    file, old = tmp_path / "checkpoint", tmp_path / "old"

    def work(comm: Ranks) -> list[str]:
        model, found = torch.nn.Linear(3, 2), []
        sp.save_checkpoint(file, comm, model, graph=sp.load(tmp_path / "trained", comm))
        sp.load_checkpoint(file, comm, model, graph=sp.load(tmp_path / "trained", comm))
        text, tensors = read_verified(file)
        before = {key: value for key, value in json.loads(text).items() if key != "columns"}
        if comm.rank == 0:
            write_verified(old, tensors, json.dumps(before))
        comm.barrier("written")
        sp.load_checkpoint(old, comm, model, graph=sp.load(tmp_path / "trained", comm))
        other = sp.load(tmp_path / "bare", comm)
        if comm.rank:
            sp.load_checkpoint(file, comm, model)
            sp.load_checkpoint(file, comm, model, graph=other, other_graph=True)
        else:
            with pytest.warns(UserWarning, match=r"score \(3\) of 'x', and they were not compared with"):
                sp.load_checkpoint(file, comm, model)
            with pytest.warns(UserWarning, match=r"trained on the columns age, posts, score \(3\) of 'x', and this"):
                sp.load_checkpoint(file, comm, model, graph=other, other_graph=True)
        for name in ("turned", "more"):
            with pytest.raises(CheckpointError) as error:
                sp.load_checkpoint(file, comm, model, graph=sp.load(tmp_path / name, comm), other_graph=True)
            found.append(str(error.value))
        with pytest.raises(CheckpointError, match="was trained on other columns"):
            sp.load_checkpoint(file, comm, model, graph=sp.load(tmp_path / "turned", comm))
        with pytest.raises(CheckpointError, match="to use its parameters here, pass other_graph=True"):
            sp.load_checkpoint(file, comm, model, graph=other)
        return found

    for turned, more in sp.spawn(work, 2):
        assert "age, posts, score (3); those of this graph are score, posts, age (3)" in turned
        assert "differ from column 0 on" in turned and "differ from column 3 on" in more


def test_other_separators_and_labels_with_gaps_are_named(edges: Path, tmp_path: Path) -> None:
    for mark, words in ((";", "semicolons"), ("\t", "tabs")):
        (tmp_path / "n.csv").write_text(f"id{mark}age\n1{mark}2,5\n")
        (tmp_path / "e.csv").write_text(f"0{mark}1\n1{mark}0\n")
        mistakes = (
            lambda: stream_tables(edges, tmp_path / "n.csv"),
            lambda: stream_edge_list(tmp_path / "e.csv", num_nodes=2),
            lambda: stream_edge_list(numbered(tmp_path, "x.parquet")[0], features=tmp_path / "n.csv"),
        )
        for mistake in mistakes:
            with pytest.raises(ValueError, match=f"has {words} between its columns, and expected are commas"):
                partition(mistake(), tmp_path / "store", 1)
    nodes = node_table(tmp_path / "nodes.parquet", label=[0.0, None, 1.0, 0.0, 1.0, 0.0])
    with pytest.raises(
        ValueError, match=r"'label' holds double with gaps, as pandas makes .* a missing one becomes -1"
    ):
        partition(stream_tables(edges, nodes), tmp_path / "store", 1)


def test_inverse_edges(edges: Path, tmp_path: Path) -> None:
    weights = [float(i) for i in range(N)]
    table = parquet.read_table(edges).append_column("weight", arrow.array(weights))
    parquet.write_table(table, edges)
    nodes = node_table(tmp_path / "nodes.parquet")
    ends, _ = numbered(tmp_path, "x.parquet")
    np.save(tmp_path / "w.npy", np.array(weights))
    np.savetxt(tmp_path / "ends.csv", np.load(ends).T, "%d", ",")
    around = [pair for i in range(N) for pair in ((i, (i + 1) % N), ((i + 1) % N, i))]
    for number, files in enumerate((
        stream_tables(edges, nodes, add_inverse_edge=True),
        stream_edge_list(ends, num_nodes=N, weights=tmp_path / "w.npy", add_inverse_edge=True),
        stream_edge_list(tmp_path / "ends.csv", num_nodes=N, weights=tmp_path / "w.npy", add_inverse_edge=True),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        sp.spawn(lambda comm, files=files, folder=folder: partition(files, folder, 3, "range", comm=comm), 2)

        def found(comm: Ranks, folder: Path = folder) -> Any:
            graph = sp.load(folder, comm)
            return [end.as_subclass(torch.Tensor).tolist() for end in graph.edge_index], graph.edge_weight.tolist()

        (((src, dst), weight),) = sp.spawn(found, 1)
        assert sorted(zip(src, dst, weight)) == sorted((*pair, weights[k // 2]) for k, pair in enumerate(around))
