"""Arguments of the first day that are swapped, left out or of another kind: one sentence tells what goes where."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import shardpass as sp
from shardpass.backends import reason_of
from shardpass.cli.console import sentence
from shardpass.errors import RefusedError, advice

NODES = 20


def data(**others: Any) -> Data:
    nodes = torch.arange(NODES)
    edge_index = torch.stack([nodes, (nodes + 1) % NODES])
    return Data(**{"edge_index": edge_index, "x": torch.randn(NODES, 4), "y": nodes % 3, **others})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arguments") / "parts"
    sp.partition(data(), path, parts=2, method="range")
    return path


class Wrong:
    """What a rank has at hand when it passes something wrong: the ranks, its graph, a wrapped model and its output."""

    def __init__(self, store: Path, comm: sp.Communicator) -> None:
        self.comm, self.store = comm, store
        self.graph = sp.load(store, comm)
        self.model = sp.pyg.wrap(GCN(4, 8, 2, 3), comm)
        self.out = self.model(self.graph.x, self.graph.edge_index)

    def loss(self, y: Any, *rest: Any) -> None:
        sp.cross_entropy(self.out, y, *rest)


IN_ITS_PLACE = r"`comm` must be what shardpass\.connect\(\) returned .* but got {} in its place"
CASES: dict[type[Exception], dict[str, tuple[Callable[[Wrong], Any], str]]] = {
    TypeError: {
        "load swapped": (lambda at: sp.load(at.comm, at.store), IN_ITS_PLACE.format("PosixPath|WindowsPath")),
        "options as text": (lambda at: sp.load(at.store, at.comm, "halo"), r"Options\(mode='halo'\), but got str"),
        "wrap swapped": (lambda at: sp.pyg.wrap(at.comm, GCN(4, 8, 2, 3)), r"but got Ranks: write wrap\(model, c"),
        "wrap a class": (lambda at: sp.pyg.wrap(GCN, at.comm), r"the class GCN: write wrap\(GCN\(\.\.\.\), comm\)"),
        "wrap with the graph": (lambda at: sp.pyg.wrap(GCN(4, 8, 2, 3), at.graph), IN_ITS_PLACE.format("ShardedGraph")),
        "sync swapped": (lambda at: sp.sync_gradients(at.comm, at.model), IN_ITS_PLACE.format("GCN")),
        "save swapped": (lambda at: sp.save_checkpoint("a", at.model, at.comm), IN_ITS_PLACE.format("GCN")),
        "restore swapped": (lambda at: sp.load_checkpoint("a", at.model, at.comm), IN_ITS_PLACE.format("GCN")),
        "seed swapped": (lambda at: sp.seed(at.comm, 0), IN_ITS_PLACE.format("int")),
        "loss without ranks": (lambda at: at.loss(at.graph.y, None), "missing 1 required .* argument: 'comm'"),
        "loss swapped": (lambda at: at.loss(at.graph.y, at.comm, at.graph.y > 0), IN_ITS_PLACE.format("Tensor")),
        "a table without its graph": (lambda at: sp.NodeEmbedding(NODES, 8), "shardpass.load returned, but got int"),
        "gather swapped": (lambda at: sp.gather(at.out, at.graph), "shardpass.load returned, but got Tensor"),
        "the graph alone": (
            lambda at: at.model(at.graph),
            r"GCN\.forward\(\): missing .*: call model\(graph\.x, graph\.edge_in",
        ),
        "the features alone": (lambda at: at.model(at.graph.x), r"GCN\.forward\(\): missing .*'edge_index'"),
    },
    ValueError: {
        "labels as floats": (lambda at: at.loss(at.graph.y.float(), None, at.comm), r"class ids use y\.long\(\)"),
        "labels in a column": (lambda at: at.loss(at.graph.y[:, None], None, at.comm), r"use y\.squeeze\(1\)"),
        "an output of another kind": (
            lambda at: sp.infer(at.model, at.graph, "out.csv"),
            r"out\.csv: the output is an \.npy file",
        ),
    },
    RefusedError: {
        "a plan of a wrapped model": (lambda at: sp.plan(at.model, at.store), "plan: GCN is wrapped already"),
    },
}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in CASES for case in CASES[kind]])
def test_a_wrong_argument(kind: type[Exception], case: str, store: Path) -> None:
    mistake, words = CASES[kind][case]
    with pytest.raises(kind, match=words) as caught:
        sp.spawn(lambda comm: mistake(Wrong(store, comm)), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("right", ["pyg", "dgl"])
def test_a_model_of_the_other_library(right: str) -> None:
    pytest.importorskip("dgl")
    from dgl.nn import GraphConv

    model, wrong = (GCN(4, 8, 2, 3), sp.dgl) if right == "pyg" else (GraphConv(4, 3), sp.pyg)
    with pytest.raises(RefusedError, match=rf"is a layer of (PyG|DGL): wrap the model by shardpass\.{right}\.wrap"):
        wrong.wrap(model, sp.connect("local"))


class Dataset:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Data:
        return data()


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        ([data()], r"from a list: pass its only item, data\[0\]; expected"),
        ([data(), data()], r"from a list: a store holds one graph; .*from_data_list joins several"),
        (Dataset(), r"from a Dataset: of a dataset pass the graph in it, dataset\[0\]"),
        (3, "cannot read a graph from a int; expected"),
    ],
)
def test_what_is_no_graph(graph: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=words):
        sp.partition(graph, tmp_path / "parts", parts=2)


def test_a_graph_of_networkx(tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    with pytest.raises(TypeError, match=r"pass torch_geometric\.utils\.from_networkx\(graph\)"):
        sp.partition(networkx.karate_club_graph(), tmp_path / "parts", parts=2)


def test_partition_swapped(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"`path` must name the directory to write, but got Data"):
        sp.partition(tmp_path / "parts", data(), 2)


@pytest.mark.parametrize(
    ("backend", "words"),
    [("gloo", "torch_distributed takes gloo"), ("nccl", "takes NCCL"), ("mpi4py", "take mpi$"), ("threads", "spawn")],
)
def test_a_transport_in_the_place_of_a_backend(backend: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"the backend is '{backend}', but known are auto, .*{words}"):
        sp.connect(backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"the device is cuda, but torch .* finds no GPU here: .* leave `device` away"):
        sp.connect(device="cuda")


HOSTILE: dict[type[Exception], dict[str, tuple[Callable[[Path], Any], str]]] = {
    TypeError: {
        "a flag of parts": (
            lambda at: sp.partition(data(), at / "o", parts=True),
            "the number of parts must be an integer, found bool",
        ),
        "a seed as text": (
            lambda at: sp.partition(data(), at / "o", parts=2, method="random", seed="4"),
            "`seed` must be an integer, found str",
        ),
        "no function": (lambda at: sp.spawn(None, 2), "`fn` must be a function, but got NoneType"),
        "one argument": (lambda at: sp.spawn(print, 2, args=3), "`args` must be a tuple, but got int"),
        "seconds as text": (lambda at: sp.spawn(print, 2, timeout="4"), "a number of seconds is expected"),
        "a folder as a number": (lambda at: sp.inspect(3), "the folder of a store: `path` must be a path"),
        "a plan of no model": (lambda at: sp.plan(3, sp.GraphCounts(9, 9, 4)), r"must be a torch\.nn\.Module"),
        "a plan of a number of ranks": (
            lambda at: sp.plan(GCN(4, 8, 2, 3), sp.GraphCounts(9, 9, 4), 4),
            r"must be lists, such as ranks=\[1, 4\]",
        ),
        "nan nodes": (lambda at: sp.GraphCounts(float("nan"), 9, 4), "nodes is an integer, got nan"),
        "a loss without ranks": (lambda at: sp.mean(torch.ones(2), None, None), IN_ITS_PLACE.format("NoneType")),
    },
    ValueError: {
        "a billion parts": (lambda at: sp.partition(data(), at / "o", parts=10**9), r"1000000000 parts; expect"),
        "a billion threads": (
            lambda at: sp.partition(data(), at / "o", parts=2, threads=10**9),
            "1000000000 threads; expected",
        ),
        "a billion ranks": (lambda at: sp.spawn(print, 10**9), "1000000000 ranks; expected at least 1 and at"),
        "no processes": (lambda at: sp.spawn(print, 0, "processes"), "0 ranks; expected at least 1"),
        "an unknown device": (lambda at: sp.spawn(print, 2, device="gpu"), "must name a device, such as 'cpu'"),
        "a plan on a billion ranks": (
            lambda at: sp.plan(GCN(4, 8, 2, 3), sp.GraphCounts(100, 100, 4), [10**9]),
            "1000000000 ranks; expected",
        ),
        "an option as text": (lambda at: sp.Options(prefetch="4"), "prefetch is an integer, got '4'"),
    },
}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in HOSTILE for case in HOSTILE[kind]])
def test_a_hostile_argument_is_told_at_once(kind: type[Exception], case: str, tmp_path: Path) -> None:
    mistake, words = HOSTILE[kind][case]
    began = monotonic()
    with pytest.raises(kind, match=words) as caught:
        mistake(tmp_path)
    assert "\n" not in str(caught.value) and monotonic() - began < 5  # a second where nothing else runs


def test_spawn_swapped() -> None:
    with pytest.raises(TypeError, match=r"spawn\(fn, ranks\): the number of ranks must be an integer, found function"):
        sp.spawn(2, lambda comm: None)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=str)
def test_memory_that_ran_out_comes_with_advice(error: Exception) -> None:
    words = "memory ran out: take more ranks, the mode sar"
    assert words in reason_of(error) and words in sentence(error) and not advice(RuntimeError("boo"))


def test_memory_that_torch_did_not_get(store: Path) -> None:
    def run(comm: sp.Communicator) -> None:
        own = sp.load(store, comm)
        sp.pyg.wrap(GCN(4, 8, 2, 3), comm)(own.x.repeat(1, 10**12), own)

    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        sp.spawn(run, 2)
    assert "memory ran out: take more ranks" in reason_of(caught.value)
