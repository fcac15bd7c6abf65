"""Several ranks partition one graph in files together: the bytes are those of one process, and errors end all ranks."""

import gzip
import hashlib
import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import bipartite
from test_streaming import TINY, Typed, files, random_edges

import shardpass as sp
from shardpass.data import GraphFiles, read_edge_list, stream_edge_list, stream_tables
from shardpass.data.kaminpar_parts import write_parhip
from shardpass.data.streaming import Adjacency, Budget
from shardpass.data.team import Team
from shardpass.errors import DivergenceError


def on_ranks(ranks: int, source: Any, path: Path, parts: int, method: str = "random", **options: Any) -> list[Any]:
    options.setdefault("memory_bytes", TINY)
    return sp.spawn(lambda comm: sp.partition(source, path, parts, method, comm=comm, **options), ranks)


def digests(store: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in store.iterdir()}


def tables(folder: Path) -> GraphFiles:
    pytest.importorskip("duckdb")
    table = pytest.importorskip("pyarrow").table
    write = __import__("pyarrow.parquet").parquet.write_table
    rng = np.random.default_rng(0)
    names = [f"node {i}" for i in range(50)]
    write(table({"id": names, "y": rng.integers(0, 3, 50), "a": rng.random(50)}), folder / "nodes.parquet")
    ends = rng.integers(0, 50, (2, 400))
    columns = {"src": [names[i] for i in ends[0]], "dst": [names[i] for i in ends[1]], "weight": rng.random(400)}
    write(table(columns), folder / "edges.parquet")
    return stream_tables(folder / "edges.parquet", folder / "nodes.parquet")


def parquet(folder: Path) -> GraphFiles:
    """Edges in two files, features in lists, and row groups that ranks share."""
    table = pytest.importorskip("pyarrow").table
    write = __import__("pyarrow.parquet").parquet.write_table
    edges, x = random_edges(300, 4000), np.random.default_rng(0).standard_normal((300, 3)).astype(np.float32)
    (folder / "edges").mkdir()
    for number, (start, stop) in enumerate([(0, 900), (900, 4000)]):
        src, dst = edges[:, start:stop]
        columns = {"src": src, "dst": dst, "weight": np.arange(start, stop) / 7}
        write(table(columns), folder / "edges" / f"{number}.parquet", row_group_size=700)
    write(table({"x": x.tolist(), "id": np.arange(300)}), folder / "x.parquet", row_group_size=40)
    write(table({"y": np.arange(300)}), folder / "y.parquet")
    return stream_edge_list(folder / "edges", features=folder / "x.parquet", labels=folder / "y.parquet")


def text(folder: Path, suffix: str = "") -> GraphFiles:
    """Lines of several lengths, a header, a comment and an empty line."""
    src, dst = random_edges(300, 4000)
    lines = [f"{a},{b},{i / 7:.{i % 5}f}" for i, (a, b) in enumerate(zip(src, dst))]
    lines[3000:3000] = ["# a comment", ""]
    words, path = "src,dst,weight\n" + "\n".join(lines), folder / f"edges.csv{suffix}"
    path.write_bytes(gzip.compress(words.encode()) if suffix else words.encode())
    return stream_edge_list(path, num_nodes=300)


@pytest.mark.parametrize("kind", ["random", "metis", "kaminpar", "few", "typed", "named", "parquet", "text", "gz"])
def test_one_process_or_many(tmp_path, kind):
    if kind in ("metis", "kaminpar"):
        pytest.importorskip({"metis": "pymetis"}.get(kind, kind))
    if kind == "typed":
        source = Typed(bipartite())
    elif kind in ("named", "parquet", "text"):
        source = {"named": tables, "parquet": parquet, "text": text}[kind](tmp_path)
    elif kind == "gz":
        source = text(tmp_path, ".gz")
    else:
        num_nodes, num_edges = (7, 9) if kind == "few" else (300, 4000)
        edges = random_edges(num_nodes, num_edges)
        source = stream_edge_list(**files(tmp_path, num_nodes, edges, by_column=kind == "few"))
    method, memory = kind if kind in ("metis", "kaminpar") else "random", 500 if kind == "typed" else TINY
    expected = sp.partition(source, tmp_path / "1", 5, method, memory_bytes=memory)
    for ranks in (2, 4):
        store = tmp_path / str(ranks)
        assert on_ranks(ranks, source, store, 5, method, memory_bytes=memory) == [expected] * ranks
        assert digests(store) == digests(tmp_path / "1")


def test_kaminpar_is_given_the_same_file(tmp_path):
    graph = stream_edge_list(**files(tmp_path, 300, random_edges(300, 4000)))

    def written(comm: Any) -> bytes:
        budget = Budget(tmp_path, TINY, team=Team(comm))
        return write_parhip(Adjacency(graph.open(budget).validate(), budget), 5, budget).read_bytes()

    one, three = written(None), sp.spawn(written, 3)
    assert three == [one, b"", b""] and len(one) > 24


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]


def test_a_wrong_id_is_told_with_its_place(tmp_path):
    edges = random_edges(300, 4000)
    edges[0, 1999], edges[0, 3000] = 300, 400
    source = stream_edge_list(**files(tmp_path, 300, edges))
    with pytest.raises(ValueError, match=r"edges\.npy: source ids .* 300 at position 1999 .* \(found on rank 1\)"):
        on_ranks(4, source, tmp_path / "store", 5)
    assert left_behind(tmp_path) == []
    words = (tmp_path / "edges.csv", "0,1\n" * 3000 + "0,x\n" + "1,0\n" * 1000)
    words[0].write_text(words[1])
    with pytest.raises(ValueError, match=r"edges\.csv .*, in the rows from 2001 on: .*'x' .* at row 999, column 2"):
        on_ranks(2, stream_edge_list(words[0], num_nodes=2), tmp_path / "store", 2)


def test_what_one_rank_cannot_write_ends_all(tmp_path, monkeypatch):
    module = importlib.import_module("shardpass.data.partition")
    source, write = stream_edge_list(**files(tmp_path, 300, random_edges(300, 4000))), module.write_tensors

    def full(path: Path, tensors: Any) -> Any:
        if path.name == "part-00002.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(OSError, match=r"No space left on device \(found on rank 2\)"):
        on_ranks(3, source, tmp_path / "store", 5)
    assert left_behind(tmp_path) == []


def test_ranks_must_agree(tmp_path):
    paths = files(tmp_path, 300, random_edges(300, 4000))
    source = stream_edge_list(**paths)
    with pytest.raises(DivergenceError, match=r"ranks disagree about parts: \d on rank \d, \d on rank \d"):
        sp.spawn(lambda comm: sp.partition(source, tmp_path / "store", 2 + comm.rank, comm=comm), 2)
    with pytest.raises(ValueError, match="a graph in memory is partitioned by one process, and here are 2"):
        on_ranks(2, read_edge_list(**paths), tmp_path / "store", 2)
    on_ranks(1, read_edge_list(**paths), tmp_path / "store", 2)


def test_doubts_of_all_ranks_are_told(tmp_path):
    paths = files(tmp_path, 300, random_edges(300, 4000))
    x = np.load(paths["features"])
    x[::7] = np.nan
    np.save(paths["features"], x)
    with pytest.warns(UserWarning, match=rf"{np.isnan(x).sum()} values of field 'x'"):
        on_ranks(3, stream_edge_list(**paths), tmp_path / "store", 5)


def test_all_ranks_together_read_what_fits_into_the_memory_of_one():
    def most(comm: Any) -> int:
        return Budget(memory_bytes=1 << 20, team=Team(comm)).block_edges

    assert 4 * sp.spawn(most, 4)[0] <= most(None)


def test_ranks_with_other_files(tmp_path):
    (tmp_path / "b").mkdir()
    sources = [stream_edge_list(**files(f, 300, random_edges(300, 4000))) for f in (tmp_path, tmp_path / "b")]
    with pytest.raises(DivergenceError, match="disagree about data"):
        sp.spawn(lambda comm: sp.partition(sources[comm.rank], tmp_path / "store", 2, "random", comm=comm), 2)


def test_filters_of_warnings_stay_as_they_are(tmp_path):
    before = [*warnings.filters]
    on_ranks(4, text(tmp_path), tmp_path / "store", 3)
    assert [*warnings.filters] == before
