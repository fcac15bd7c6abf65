"""A disk that is full: the error names the file and the size that it needs, and nothing is left behind.

A limit on the size of files stands for the disk.
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import shardpass as sp
from shardpass.data import stream_edge_list, stream_tables

NODES, EDGES = 2000, 12000
ENDS = torch.randint(NODES, (EDGES, 2), generator=torch.Generator().manual_seed(0)).tolist()


def graph(folder: Path) -> None:
    data = {"edge_index": torch.tensor(ENDS).T, "x": torch.zeros(NODES, 20)}
    sp.partition(data, folder / "parts", parts=2, method="range")


def cut_graph(folder: Path) -> None:
    pytest.importorskip("kaminpar")
    sp.partition({"edge_index": torch.tensor(ENDS).T, "num_nodes": NODES}, folder / "parts", parts=2)


def edge_list(folder: Path) -> None:
    files = stream_edge_list(folder.parent / "edges.csv", num_nodes=NODES)
    sp.partition(files, folder / "parts", parts=2, method="range")


def table(folder: Path) -> None:
    pytest.importorskip("duckdb")
    sp.partition(stream_tables(folder.parent / "named.csv"), folder / "parts", parts=2, method="range")


def checkpoint(folder: Path) -> None:
    model = torch.nn.Linear(200, 200)
    sp.spawn(lambda comm: sp.save_checkpoint(folder / "run.ckpt", comm, model), 2)


@contextmanager
def files_of(num_bytes: int) -> Iterator[None]:
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("num_bytes", [5_000, 40_000])
@pytest.mark.parametrize("write", [graph, cut_graph, edge_list, table, checkpoint])
def test_a_full_disk(write: Callable[[Path], None], num_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("".join(f"{src},{dst}\n" for src, dst in ENDS))
    (tmp_path / "named.csv").write_text("src,dst\n" + "".join(f"n{src},n{dst}\n" for src, dst in ENDS))
    folder = tmp_path / "disk"
    folder.mkdir()
    with files_of(num_bytes), pytest.raises((OSError, ValueError)) as caught:
        write(folder)
    text = str(caught.value)
    is_duckdb = "DuckDB could not look up ids" in text
    assert str(folder) in text and "File too large" in text and (is_duckdb or "cannot be written: it needs " in text)
    assert not list(folder.iterdir())
