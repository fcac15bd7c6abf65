"""Mistakes of the first day: arguments that are swapped, left out or of another kind, fields that do not fit.

One sentence tells the name of the argument or field, and what to do.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import shardpass as sp
from shardpass.backends import reason_of
from shardpass.cli.console import sentence
from shardpass.errors import RefusedError, advice

NODES = 20


def graph(**others: Any) -> dict[str, Any]:
    """Twenty nodes in a ring with chords; `None` leaves a field out."""
    nodes = torch.arange(NODES)
    edge_index = torch.stack([nodes.repeat(2), torch.cat([(nodes + 1) % NODES, (nodes + 7) % NODES])])
    fields = {"edge_index": edge_index, "x": torch.randn(NODES, 4), "y": nodes % 3, "train_mask": nodes < 12, **others}
    return {name: value for name, value in fields.items() if value is not None}


def data() -> Data:
    return Data(**graph())


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
        "a table without its graph": (
            lambda at: sp.NodeEmbedding(NODES, 8),
            "shardpass.load or shard returned, but got int",
        ),
        "gather swapped": (lambda at: sp.gather(at.out, at.graph), "shardpass.load or shard returned, but got Tensor"),
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
        ([data(), data()], r"from a list: one graph is expected; .*from_data_list joins several"),
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
    began = process_time()
    with pytest.raises(kind, match=words) as caught:
        mistake(tmp_path)
    assert "\n" not in str(caught.value) and process_time() - began < 5  # imports take a second or two


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


def wrapped(model: Any, comm: sp.Communicator) -> Any:
    return sp.pyg.wrap(model(4, 8, 2, 3), comm)


def narrowed(model: str, dtype: str) -> str:
    return rf"`x` is {dtype} and the parameters of {model} are float32: convert it by x\.to\(torch\.float32\)"


MISTAKES: dict[str, tuple[int, Callable[[Any, sp.Communicator], Any], type[Exception], str]] = {
    **{
        f"another dtype, {model.__name__}, {ranks} ranks": (
            ranks,
            lambda own, comm, model=model: wrapped(model, comm)(own.x.double(), own),
            RuntimeError,
            narrowed(model.__name__, "float64"),
        )
        for model in (GCN, GAT, GraphSAGE)
        for ranks in (1, 2)
    },
    "integers": (
        1, lambda own, comm: wrapped(GCN, comm)(own.x.long(), own.edge_index), RuntimeError,
        narrowed("GCN", "int64") + r" \(",
    ),
    "a row too few, GCN": (
        2, lambda own, comm: wrapped(GCN, comm)(torch.rand(9, 4), own), RuntimeError,
        "`x` has 9 rows and this rank has 10 own nodes",
    ),
    "a row too few, GAT": (
        2, lambda own, comm: wrapped(GAT, comm)(torch.rand(9, 4), own), ValueError, "has 9 rows .* expected 10"
    ),
    "a model that is not wrapped": (
        2, lambda own, comm: sp.cross_entropy(GCN(4, 8, 2, 3)(own.x, own.edge_index), own.y, None, comm).backward(),
        RefusedError, r"wrap the module that holds the parameter too \(shardpass.pyg.wrap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, store: Path) -> None:
    ranks, use, kind, words = MISTAKES[name]
    with pytest.raises(kind, match=words):
        sp.spawn(lambda comm: use(sp.load(store, comm), comm), ranks)


def test_an_error_of_the_model_itself_stays_as_it_is(store: Path) -> None:
    class Wrong(torch.nn.Module):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return x @ torch.zeros(5, 2)

    def run(comm: sp.Communicator) -> None:
        own = sp.load(store, comm)
        sp.pyg.wrap(Wrong(), comm)(own.x, own)

    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        sp.spawn(run, 1)
    assert "rank" not in str(caught.value)


@pytest.mark.parametrize(
    ("short", "words"),
    [
        ("x", "x has 19, y has 20, train_mask has 20. Give each one row per node"),
        ("y", "x has 20, y has 19, train_mask has 20. Give each one row per node"),
    ],
)
def test_a_field_that_lacks_a_row_of_arrays(short: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        sp.partition(graph(**{short: graph()[short][:-1]}), tmp_path / "parts", parts=2, method="range")


@pytest.mark.parametrize(
    ("short", "words"),
    [
        (
            "x",
            r"'y' of the shape \[20\] is neither per node \(19, the rows of x\), nor per edge \(40\).*"
            r"If there are 20 nodes, the rows of y, train_mask, correct x instead",
        ),
        ("y", r"'y' of the shape \[19\] is neither per node \(20, the rows of x, train_mask\)"),
    ],
)
def test_a_field_that_lacks_a_row_of_pyg(short: str, words: str, tmp_path: Path) -> None:
    data = Data(**graph(**{short: graph()[short][:-1]}))
    with pytest.raises(ValueError, match=words):
        sp.partition(data, tmp_path / "parts", parts=2, method="range")


def test_no_features_at_all(tmp_path: Path) -> None:
    sp.partition(graph(x=None), tmp_path / "none", parts=2, method="range")
    sp.partition(graph(x=None, feat=torch.randn(20, 4)), tmp_path / "dgl", parts=2, method="range")
    comm = sp.connect("local")
    for name, words in {"none": "shardpass.NodeEmbedding", "dgl": r"graph\.node\['feat'\]"}.items():
        own = sp.load(tmp_path / name, comm)
        with pytest.raises(AttributeError, match=words):
            _ = own.x
        with pytest.raises(KeyError, match=words):
            _ = own.num_features


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_model_that_is_not_wrapped(store: Path, is_wrapped: bool) -> None:
    def run(comm: sp.Communicator) -> None:
        own = sp.load(store, comm)
        torch.manual_seed(comm.rank)
        model = GCN(4, 8, 2, 3)
        if is_wrapped:
            sp.pyg.wrap(model, comm)
        x = own.x if is_wrapped else torch.rand(10, 4)  # with the graph's own it is refused before
        sp.cross_entropy(model(x, own.edge_index), own.y, None, comm).backward()
        sp.sync_gradients(model, comm)

    words = r"test_wrong_arguments\.py.* outside of the wrapped model.* \(shardpass\.pyg\.wrap"
    with nullcontext() if is_wrapped else pytest.raises(RefusedError, match=words):
        sp.spawn(run, 2)


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    comm = sp.connect("local")
    sp.save_checkpoint(tmp_path / "no" / "such" / "run.ckpt", comm, torch.nn.Linear(2, 2))
    sp.partition(graph(), tmp_path / "nor" / "this" / "parts", parts=2, method="range")
    own = sp.load(tmp_path / "nor" / "this" / "parts", comm)
    sp.infer(sp.pyg.wrap(GCN(4, 8, 2, 3), comm), own, tmp_path / "neither" / "out.npy")
    assert (tmp_path / "no" / "such" / "run.ckpt").exists() and (tmp_path / "neither" / "out.npy").exists()
