"""Damaged files of every format are refused in words, or read as they were. `damage.py` replays them by a seed."""

import importlib.util
import json
import os
import resource
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import damage
import pytest

from shardpass.data import partition

NEEDS = {"parquet": "pyarrow", "dgl": "dgl"}
NEEDS |= dict.fromkeys(["named store", "forged named store", "tables, parquet", "tables, csv"], "duckdb")


def skip_without(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")


@pytest.mark.parametrize("name", damage.FORMATS)
def test_some_damaged_files(name: str, tmp_path: Path) -> None:
    skip_without(name)
    found = damage.campaign(name, range(20), tmp_path)
    assert found.total() == 20 and (found["refused"] or name == "journal")


@pytest.mark.long
@pytest.mark.parametrize("name", damage.FORMATS)
def test_a_thousand_damaged_files(name: str) -> None:
    """In a process of its own, with a limit of its memory."""
    skip_without(name)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "data" / "damage.py"), name, "0", "1000"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = Counter(json.loads(ended.stdout.splitlines()[-1]))
    print(name, dict(found))
    assert found.total() == 1000


def claim_rows(path: Path, shape: str = "(1000000000000,)") -> None:
    """Let the header of an `.npy` file claim another shape."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64))


def npz(folder: Path) -> Path:
    damage.FORMATS["npz"].write(folder)
    claim_rows(folder / "z.npy")
    with zipfile.ZipFile(folder / "graph.npz", "a") as archive:
        archive.write(folder / "z.npy", "z.npy")
    return folder / "graph.npz"


def npy(folder: Path) -> Path:
    damage.FORMATS["npy"].write(folder)
    claim_rows(folder / "x.npy")
    return folder


def dgl(folder: Path) -> Path:
    """A JSON that gives one part a million million nodes, or edges."""
    skip_without("dgl")
    damage.FORMATS["dgl"].write(folder)
    document = json.loads((folder / "g.json").read_text())
    for what in ("node", "edge"):
        (ranges,) = document[f"{what}_map"].values()
        document[f"num_{what}s"] = ranges[1][1] = 10**12
    (folder / "g.json").write_text(json.dumps(document))
    return folder / "g.json"


@contextmanager
def little_memory() -> Iterator[None]:
    """A block in which this process gets at most a GiB more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("write", [npz, npy, dgl])
def test_no_memory_is_taken_for_what_a_header_claims(write: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in")
    with little_memory(), pytest.raises(ValueError, match=str(tmp_path / "in")):
        partition(path, tmp_path / "out", 2, "range")


@pytest.mark.parametrize("name", ["edges.csv", "edges.csv.gz", "edges.npy", "edges.parquet", "graph.npz", "g.json"])
def test_what_is_no_regular_file_is_not_opened(name: str, tmp_path: Path) -> None:
    skip_without("parquet" if name.endswith("parquet") else "")
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(
            ValueError, match=r"no regular file|there is no file|holds no edges|without .parquet|neither"
        ):
            partition(path, tmp_path / "out", 2, "range")
