"""Damaged files by a seed: each format that is read or written, what may happen to a file, and what came of it.

``python tests/data/damage.py FORMAT FIRST COUNT`` damages and reads with the seeds FIRST, FIRST + 1, ..., in bounded
memory and time, and prints how often each outcome came. ``replay(FORMAT, seed, folder)`` does it once.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from store_helpers import awkward, bipartite
from torch import nn

from shardpass.core.inference.journal import Journal
from shardpass.core.training import load_checkpoint, save_checkpoint
from shardpass.data import merge_parts, node_names, open_store, partition, read, stream_tables, verify
from shardpass.errors import CheckpointError, StoreError
from shardpass.testing import run
from tests.forged import reseal

SECONDS = 10
MEMORY = 2 << 30
DUCKDB_MAPS = 6 << 30  # addresses that it reserves, most of which take no memory


class Format(NamedTuple):
    """A format of files.

    write: writes files into an empty folder. read: reads them; what was read, in words.
    errors: how it refuses what is damaged. has_checksum: whether nothing else than what was written may be read.
    forge: makes checksums fit again after the damage.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...] = (ValueError, TypeError)
    has_checksum: bool = False
    forge: Callable[[Path], None] | None = None


def _read_store(folder: Path) -> str:
    manifest = verify(folder)
    names = [node_names(folder, node_type=kind).tolist() for kind in manifest.node_types]
    data = merge_parts(open_store(folder), 1, 0)
    fields = [{name: f[name] for name in f} for of in (data.node_fields, data.edge_fields) for f in of.values()]
    edges = {kind: (edges.owners, edges.edge_ids()) for kind, edges in data.edges.items()}
    return repr((manifest, data.node_ids, edges, fields, names))


def _write_named(folder: Path) -> None:
    graph = replace(bipartite(), names={"user/first,__type": ["a", "b", "", "née", "e" * 40], "item": [7, -1, 2**60]})
    partition(graph, folder, 2, "range", overwrite=True)


def _forge(folder: Path) -> None:
    if all(path.is_file() for path in folder.iterdir()):  # a pipe would block here
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # no manifest any more, or no header
            reseal(folder)


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model, torch.optim.Adam(model.parameters())


def _write_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    model, optimizer = _model()
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    run(lambda comm: save_checkpoint(folder / "c", comm, model, optimizer, epoch=7, extra={"a": [1, 2.5]}), 1)


def _read_checkpoint(folder: Path) -> str:
    model, optimizer = _model()
    found = run(lambda comm: load_checkpoint(folder / "c", comm, model, optimizer), 1)
    return repr((found, model.state_dict(), optimizer.state_dict()))


def _pass(folder: Path) -> str:
    """A forward pass of three calls, resumed if `folder` has results of an earlier one."""

    def body(comm: Any) -> list[Any]:
        journal = Journal(folder / "run", comm, "a fingerprint")
        rows = [torch.arange(12.0).view(4, 3) * (call + 1) for call in range(3)]
        return [journal.result(f"call {number}", lambda call=call: call) for number, call in enumerate(rows)]

    return repr(run(body, 1))


def _read_graph(name: str) -> Callable[[Path], str]:
    """Partition a file, or the folder of files, into a store."""

    def read_graph(folder: Path) -> str:
        with tempfile.TemporaryDirectory() as scratch:
            manifest = partition(folder / name, Path(scratch) / "store", 2, "range")
            return repr((manifest.graph_fingerprint, manifest.contents_fingerprint, manifest.node_fields))

    return read_graph


def _arrays() -> dict[str, np.ndarray]:
    graph = awkward()
    ends = torch.stack([graph.edges["node", "to", "node"].src, graph.edges["node", "to", "node"].dst])
    return {"edge_index": ends.numpy(), **{name: f.numpy() for name, f in graph.node_fields["node"].items()}}


def _write_npz(save: Callable[..., None]) -> Callable[[Path], None]:
    sparse = {"s_data": np.ones(3), "s_indices": np.array([0, 2, 1]), "s_indptr": np.array([0, 1, 1, 2, 2, 2, 2, 2, 3])}
    return lambda folder: save(folder / "graph.npz", **_arrays(), **sparse, s_shape=np.array([8, 3]))


def _write_npy(folder: Path) -> None:
    for name, values in _arrays().items():
        np.save(folder / f"{'edges' if name == 'edge_index' else name}.npy", values)


def _write_csv(suffix: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        arrays = _arrays()
        edges = np.column_stack([*arrays["edge_index"], np.arange(12) / 7])
        np.savetxt(folder / f"edges{suffix}", edges, ["%d", "%d", "%.6g"], ",", header="src,dst,weight", comments="")
        np.savetxt(folder / f"x{suffix}", arrays["x"], "%.6g", ",")
        np.savetxt(folder / f"y{suffix}", arrays["y"], "%d", ",")

    return write


def _write_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    arrays = _arrays()
    src, dst = arrays["edge_index"]
    tables = {"edges": {"src": src, "dst": dst, "weight": np.arange(12) / 7}, "x": {"x": list(arrays["x"])}}
    for name, columns in {**tables, "y": {"y": arrays["y"]}}.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet", compression="zstd")


def _write_tables(suffix: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet

        arrays = _arrays()
        names = [f"née {i}" for i in range(8)]
        src, dst = ([names[i] for i in row] for row in arrays["edge_index"])
        nodes = {"id": names, "y": arrays["y"], "a": arrays["x"][:, 0], "split": ["train", "val", "test", None] * 2}
        save = pyarrow.csv.write_csv if suffix == ".csv" else pyarrow.parquet.write_table
        save(pyarrow.table({"src": src, "dst": dst}), folder / f"edges{suffix}")
        save(pyarrow.table(nodes), folder / f"nodes{suffix}")

    return write


def _read_tables(suffix: str) -> Callable[[Path], str]:
    def read_tables(folder: Path) -> str:
        with tempfile.TemporaryDirectory() as scratch:
            tables = stream_tables(folder / f"edges{suffix}", folder / f"nodes{suffix}")
            manifest = partition(tables, Path(scratch) / "store", 2, "range")
            names = node_names(Path(scratch) / "store").tolist()
            return repr((manifest.graph_fingerprint, manifest.contents_fingerprint, manifest.node_fields, names))

    return read_tables


def _write_dgl(folder: Path) -> None:
    from dgl_helpers import dgl

    g = dgl.graph((torch.arange(20) % 7, torch.arange(20) % 6), num_nodes=8)
    g.ndata["feat"], g.edata["w"] = torch.arange(24.0).view(8, 3), torch.arange(20)
    dgl.seed(0)
    dgl.distributed.partition_graph(g, "g", 2, str(folder), part_method="random")
    for path in folder.rglob("graph.dgl"):
        content = path.read_bytes()
        path.write_bytes(content[:40] + bytes(4096 - 40) + content[4096:])  # DGL leaves there what was in memory


FORMATS = {
    "store": Format(
        lambda f: partition(awkward(), f, 2, "range", overwrite=True), _read_store, (StoreError,), has_checksum=True
    ),
    "forged store": Format(
        lambda f: partition(bipartite(), f, 2, "range", overwrite=True), _read_store, (StoreError,), forge=_forge
    ),
    "named store": Format(_write_named, _read_store, (StoreError,), has_checksum=True),
    "forged named store": Format(_write_named, _read_store, (StoreError,), forge=_forge),
    "checkpoint": Format(_write_checkpoint, _read_checkpoint, (CheckpointError,), has_checksum=True),
    "journal": Format(_pass, _pass, (OSError,), has_checksum=True),
    "npz": Format(_write_npz(np.savez), _read_graph("graph.npz")),
    "npz, compressed": Format(_write_npz(np.savez_compressed), _read_graph("graph.npz")),
    "npy": Format(_write_npy, _read_graph("")),
    "csv": Format(_write_csv(".csv"), _read_graph("")),
    "csv.gz": Format(_write_csv(".csv.gz"), _read_graph("")),
    "parquet": Format(_write_parquet, _read_graph("")),
    "tables, parquet": Format(_write_tables(".parquet"), _read_tables(".parquet")),
    "tables, csv": Format(_write_tables(".csv"), _read_tables(".csv")),
    "dgl": Format(_write_dgl, lambda folder: repr(read(folder / "g.json"))),
}

_NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 10**9, 10**12, 2**62, 2**63 - 1, -(2**63))


def damaged(content: bytes, rng: random.Random) -> bytes:
    """`content` after one of the things that happen to files."""
    size = len(content)
    first, second = sorted(rng.randrange(size + 1) for _ in range(2))
    block = content[first : min(second, first + 1 + rng.randrange(4096))]
    way = rng.choice(["bits"] * 4 + ["cut", "longer", "zeros", "splice", "twice", "lost", "swap", "digits", "number"])
    if way == "bits" and size:
        found = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
            found[rng.randrange(size)] ^= 1 << rng.randrange(8)
        return bytes(found)
    if way == "digits":  # of the numbers in a header
        places = [i for i, byte in enumerate(content) if chr(byte).isdigit()] or [0]
        place = rng.choice(places)
        return content[:place] + str(rng.choice(_NUMBERS)).encode() + content[place + rng.randrange(3) :]
    if way == "number":
        place, number = rng.randrange(size + 1), rng.choice(_NUMBERS).to_bytes(8, "little", signed=True)
        return content[:place] + number + content[place + 8 :]
    return {
        "bits": b"\0",
        "cut": content[:first],
        "longer": content + rng.randbytes(1 + rng.randrange(4096)),
        "zeros": content[:first] + bytes(len(block)) + content[first + len(block) :],
        "splice": content[:second] + block + content[second + len(block) :],
        "twice": content[:second] + block + content[second:],
        "lost": content[:first] + content[first + len(block) :],
        "swap": content[second:] + content[first:second] + content[:first],
    }[way]


def damage(folder: Path, rng: random.Random) -> None:
    """Damage one of the files in a folder, now and then two."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, other = rng.choice(files), rng.choice(files)
    way = rng.randrange(60)
    if way == 0:
        path.unlink()
    elif way == 1:
        path.unlink()
        path.mkdir()
    elif way == 2:
        path.unlink()
        os.mkfifo(path)
    elif way == 3:
        path.unlink()
        path.symlink_to("/dev/zero")
    elif way < 7:
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    else:
        for target in {path, other} if way < 12 else {path}:
            target.write_bytes(damaged(target.read_bytes(), rng))


class TooLong(BaseException):
    """A reader did not end in time."""


@contextmanager
def _limited() -> Iterator[None]:
    def stop(signal_number: int, frame: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replay(name: str, seed: int, folder: Path, whole: Path, expected: str) -> str:
    """Damage a copy of the files in `whole` by a seed, read it, and say what came of it.

    Raises:
        AssertionError: something else than the files is read though there is a checksum, or an error is no refusal.
    """
    kind = FORMATS[name]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    damage(folder, random.Random(f"{name} {seed}"))
    if kind.forge:
        kind.forge(folder)
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = kind.read(folder)
    except kind.errors:
        return "refused"
    except BaseException as error:
        raise AssertionError(f"{name}, seed {seed}: {type(error).__name__}: {error}") from error
    if found == expected:
        return "the same"
    assert not kind.has_checksum, f"{name}, seed {seed}: something else is read"
    return "something else"


def campaign(name: str, seeds: range, folder: Path) -> Counter[str]:
    """How often each outcome came."""
    whole = folder / "whole"
    whole.mkdir()
    FORMATS[name].write(whole)
    expected = FORMATS[name].read(whole)
    return Counter(replay(name, seed, folder / "copy", whole, expected) for seed in seeds)


def main(name: str, first: int, count: int) -> None:
    """Run a campaign in bounded memory, and print its outcomes as JSON."""
    torch.set_num_threads(1)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + MEMORY + (DUCKDB_MAPS if name.startswith("tables") else 0)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(campaign(name, range(first, first + count), Path(folder))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
