"""Mistakes of the first day: arguments that are swapped, left out or of another kind, fields that do not fit.

One sentence tells the name of the argument or field, and what to do; and it tells it at once.
"""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import shardpass as sp
from shardpass.backends import reason_of
from shardpass.cli.console import sentence
from shardpass.errors import RefusedError, advice

NODES = 20


def fields(**others):
    """Twenty nodes in a ring with chords; `None` leaves a field out."""
    nodes = torch.arange(NODES)
    edge_index = torch.stack([nodes.repeat(2), torch.cat([(nodes + 1) % NODES, (nodes + 7) % NODES])])
    found = {"edge_index": edge_index, "x": torch.randn(NODES, 4), "y": nodes % 3, "train_mask": nodes < 12, **others}
    return {name: value for name, value in found.items() if value is not None}


def data(**others):
    return Data(**fields(**others))


def gcn():
    return GCN(4, 8, 2, 3)


class Dataset:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return data()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("arguments") / "parts"
    sp.partition(data(), path, parts=2, method="range")
    return path


@pytest.fixture(scope="module")
def at(store, tmp_path_factory):
    """What a rank has at hand when it passes something wrong: the ranks, its graph, a wrapped model and its output."""
    comm = sp.connect("local")
    graph, model = sp.load(store, comm), sp.pyg.wrap(gcn(), comm)
    out = model(graph.x, graph.edge_index)
    return SimpleNamespace(
        comm=comm, store=store, graph=graph, model=model, out=out, folder=tmp_path_factory.mktemp("a"),
        loss=lambda y, *rest: sp.cross_entropy(out, y, *rest),
    )  # fmt: skip


def partition(at, graph=None, **given):
    sp.partition(data() if graph is None else graph, at.folder / "o", **{"parts": 2, "method": "range", **given})


def lacking(name):
    return {name: fields()[name][:-1]}


def checkpoints(cases):
    """The rows of mistakes that both calls tell, each with its own name."""
    return {
        f"{call.__name__} {name}": (partial(mistake, call), rf"^{call.__name__}\(path, comm, model\): {words}")
        for call in (sp.save_checkpoint, sp.load_checkpoint)
        for name, (mistake, words) in cases.items()
    }


class PartOfParameter(torch.nn.Parameter):
    """Looks like a parameter that FSDP has sharded over processes."""

    full_tensor = None


IN_ITS_PLACE = r"`comm` must be what shardpass\.connect\(\) returned .* but got {} in its place"
WIDE = sp.GraphCounts(100, 100, 4)
TYPES = {
    "load swapped": (lambda at: sp.load(at.comm, at.store), IN_ITS_PLACE.format("PosixPath|WindowsPath")),
    "options as text": (lambda at: sp.load(at.store, at.comm, "halo"), r"Options\(mode='halo'\), but got str"),
    "wrap swapped": (lambda at: sp.pyg.wrap(at.comm, gcn()), r"but got Ranks: write wrap\(model, c"),
    "wrap a class": (lambda at: sp.pyg.wrap(GCN, at.comm), r"the class GCN: write wrap\(GCN\(\.\.\.\), comm\)"),
    "wrap with the graph": (lambda at: sp.pyg.wrap(gcn(), at.graph), IN_ITS_PLACE.format("ShardedGraph")),
    "sync swapped": (lambda at: sp.sync_gradients(at.comm, at.model), IN_ITS_PLACE.format("GCN")),
    **checkpoints({
        "swapped": (lambda call, at: call("a", at.model, at.comm), IN_ITS_PLACE.format("GCN")),
        "of a graph": (lambda call, at: call("a", at.comm, at.graph), "`model` must be a .*, but got ShardedGraph"),
        "with a rate": (
            lambda call, at: call("a", at.comm, at.model, 0.1),
            "`optimizer` must be an optimizer of torch, but got float",
        ),
        "at a number": (lambda call, at: call(3, at.comm, at.model), "`path` must be a path, but got int"),
    }),
    "seed swapped": (lambda at: sp.seed(at.comm, 0), IN_ITS_PLACE.format("int")),
    "spawn swapped": (
        lambda at: sp.spawn(2, gcn), r"spawn\(fn, ranks\): the number of ranks must be an integer, found function"
    ),
    "loss without ranks": (lambda at: at.loss(at.graph.y, None), "missing 1 required .* argument: 'comm'"),
    "loss swapped": (lambda at: at.loss(at.graph.y, at.comm, at.graph.y > 0), IN_ITS_PLACE.format("Tensor")),
    "a table without its graph": (lambda at: sp.NodeEmbedding(NODES, 8), "load or shard returned, but got int"),
    "a table with ids": (
        lambda at: sp.NodeEmbedding(at.graph, 8)(at.graph.node_ids), r"call it without ids, `emb\(\)` in place of"
    ),
    "gather swapped": (lambda at: sp.gather(at.out, at.graph), "shardpass.load or shard returned, but got Tensor"),
    "the graph alone": (
        lambda at: at.model(at.graph), r"GCN\.forward\(\): missing .*: call model\(graph\.x, graph\.edge_in"
    ),
    "the features alone": (lambda at: at.model(at.graph.x), r"GCN\.forward\(\): missing .*'edge_index'"),
    "a list of one": (lambda at: partition(at, [data()]), r"from a list: pass its only item, data\[0\]; expected"),
    "a list": (
        lambda at: partition(at, [data(), data()]),
        "from a list: one graph is expected; .*from_data_list joins several",
    ),
    "a dataset": (
        lambda at: partition(at, Dataset()), r"from a Dataset: of a dataset pass the graph in it, dataset\[0\]"
    ),
    "no graph": (lambda at: partition(at, 3), "cannot read a graph from a int; expected"),
    "a graph of networkx": (
        lambda at: partition(at, pytest.importorskip("networkx").karate_club_graph()),
        r"pass torch_geometric\.utils\.from_networkx\(graph\)",
    ),
    "partition swapped": (
        lambda at: sp.partition(at.folder / "o", data(), 2), r"`path` must name the directory to write, but got Data"
    ),
    "a flag of parts": (lambda at: partition(at, parts=True), "the number of parts must be an integer, found bool"),
    "a seed as text": (lambda at: partition(at, method="random", seed="4"), "`seed` must be an integer, found str"),
    "no function": (lambda at: sp.spawn(None, 2), "`fn` must be a function, but got NoneType"),
    "one argument": (lambda at: sp.spawn(print, 2, args=3), "`args` must be a tuple, but got int"),
    "seconds as text": (lambda at: sp.spawn(print, 2, timeout="4"), "a number of seconds is expected"),
    "a folder as a number": (lambda at: sp.inspect(3), "the folder of a store: `path` must be a path"),
    "a plan of no model": (lambda at: sp.plan(3, WIDE), r"must be a torch\.nn\.Module"),
    "a plan of a number of ranks": (lambda at: sp.plan(gcn(), WIDE, 4), r"must be lists, such as ranks=\[1, 4\]"),
    "nan nodes": (lambda at: sp.GraphCounts(float("nan"), 9, 4), "nodes is an integer, got nan"),
    "a mean without ranks": (lambda at: sp.mean(torch.ones(2), None, None), IN_ITS_PLACE.format("NoneType")),
}  # fmt: skip
BACKENDS = {"gloo": "torch_distributed takes gloo", "nccl": "takes NCCL", "mpi4py": "take mpi$", "threads": "spawn"}
STREAMED, TOGETHER = "stream_structure is for the modes sar and keep", "go together"
OPTIONS = [
    ({"mode": "fast"}, "mode is one of sar, keep, halo or auto, got 'fast'"),
    ({"prefetch": -1}, "prefetch is at least 0, got -1"),
    ({"prefetch": "4"}, "prefetch is an integer, got '4'"),
    ({"block_rows": 0}, "block_rows is at least 1 or None, got 0"),
    ({"chunk_bytes": 0}, "chunk_bytes is at least 1, got 0"),
    ({"wire_dtype": torch.float16}, "bfloat16 or None"),
    ({"backward": "both"}, "backward is one of auto, push, pull, got 'both'"),
    ({"stream_structure": True, "mode": "halo"}, STREAMED),
    ({"stream_structure": True, "mode": "auto", "memory_budget": 1e9}, STREAMED),
    ({"stream_structure": True, "backward": "pull"}, STREAMED),
    ({"mode": "auto"}, TOGETHER),
    ({"memory_budget": "6GiB"}, TOGETHER),
    ({"mode": "auto", "memory_budget": "plenty"}, "expected a number of bytes"),
]
LACKS_PER_NODE = (
    r"'y' of the shape \[20\] is neither per node \(19, the rows of x\), nor per edge \(40\).*"
    r"If there are 20 nodes, the rows of y, train_mask, correct x instead"
)
VALUES = {
    "labels as floats": (lambda at: at.loss(at.graph.y.float(), None, at.comm), r"class ids use y\.long\(\)"),
    "labels in a column": (lambda at: at.loss(at.graph.y[:, None], None, at.comm), r"use y\.squeeze\(1\)"),
    "an output of another kind": (
        lambda at: sp.infer(at.model, at.graph, "out.csv"), r"out\.csv: the output is an \.npy file"
    ),
    "a billion parts": (lambda at: partition(at, parts=10**9), r"1000000000 parts; expect"),
    "a billion threads": (lambda at: partition(at, threads=10**9), "1000000000 threads; expected"),
    "a billion ranks": (lambda at: sp.spawn(print, 10**9), "1000000000 ranks; expected at least 1 and at"),
    "no processes": (lambda at: sp.spawn(print, 0, "processes"), "0 ranks; expected at least 1"),
    "an unknown device": (lambda at: sp.spawn(print, 2, device="gpu"), "must name a device, such as 'cpu'"),
    "a plan on a billion ranks": (lambda at: sp.plan(gcn(), WIDE, [10**9]), "1000000000 ranks; expected"),
    **{
        f"the backend {name}": (
            lambda at, name=name: sp.connect(name), rf"the backend is '{name}', but known are auto, .*{words}"
        )
        for name, words in BACKENDS.items()
    },
    **{f"options, {given}": (lambda at, given=given: sp.Options(**given), words) for given, words in OPTIONS},
    **{
        f"arrays that lack a row of {name}": (lambda at, name=name: partition(at, fields(**lacking(name))), words)
        for name, words in {
            "x": "x has 19, y has 20, train_mask has 20. Give each one row per node",
            "y": "x has 20, y has 19, train_mask has 20. Give each one row per node",
        }.items()
    },
    **{
        f"a Data that lacks a row of {name}": (lambda at, name=name: partition(at, data(**lacking(name))), words)
        for name, words in {
            "x": LACKS_PER_NODE,
            "y": r"'y' of the shape \[19\] is neither per node \(20, the rows of x, train_mask\)",
        }.items()
    },
}  # fmt: skip
REFUSED = {
    "a plan of a wrapped model": (lambda at: sp.plan(at.model, at.store), "plan: GCN is wrapped already"),
    **checkpoints({"of parts": (
        lambda call, at: call("a", at.comm, torch.nn.ParameterList([PartOfParameter(torch.ones(2))])),
        r"parameter '0' is sharded over processes .*: use torch\.distributed\.checkpoint, with the states that",
    )}),
}  # fmt: skip
CASES = {
    f"{kind.__name__}, {name}": (kind, *case)
    for kind, cases in {TypeError: TYPES, ValueError: VALUES, RefusedError: REFUSED}.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_told_at_once(name, at):
    kind, mistake, words = CASES[name]
    began = time.process_time()
    with pytest.raises(kind, match=words) as caught:
        mistake(at)
    assert "\n" not in str(caught.value) and time.process_time() - began < 5  # imports take a second or two


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match=r"the device is cuda, but torch .* finds no GPU here: .* leave `device` away"):
        sp.connect(device="cuda")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=str)
def test_memory_that_ran_out_comes_with_advice(error):
    words = "memory ran out: take more ranks, the mode sar"
    assert words in reason_of(error) and words in sentence(error) and not advice(RuntimeError("boo"))


def narrowed(model, dtype):
    return rf"`x` is {dtype} and the parameters of {model} are float32: convert it by x\.to\(torch\.float32\)"


class Multiplies(torch.nn.Module):
    def forward(self, x, edge_index):
        return x @ torch.zeros(5, 2)


def outside(comm, graph):
    torch.manual_seed(comm.rank)
    model = gcn()
    sp.cross_entropy(model(torch.rand(10, 4), graph.edge_index), graph.y, None, comm).backward()
    sp.sync_gradients(model, comm)


MISTAKES = {
    **{
        f"another dtype, {kind.__name__}, {ranks} ranks": (
            ranks, lambda graph, comm, kind=kind: sp.pyg.wrap(kind(4, 8, 2, 3), comm)(graph.x.double(), graph),
            RuntimeError, narrowed(kind.__name__, "float64"),
        )
        for kind in (GCN, GAT, GraphSAGE) for ranks in (1, 2)
    },
    "integers": (
        1, lambda graph, comm: sp.pyg.wrap(gcn(), comm)(graph.x.long(), graph.edge_index), RuntimeError,
        narrowed("GCN", "int64") + r" \(",
    ),
    "a row too few, GCN": (
        2, lambda graph, comm: sp.pyg.wrap(gcn(), comm)(torch.rand(9, 4), graph), RuntimeError,
        "`x` has 9 rows and this rank has 10 own nodes",
    ),
    "a row too few, GAT": (
        2, lambda graph, comm: sp.pyg.wrap(GAT(4, 8, 2, 3), comm)(torch.rand(9, 4), graph), ValueError,
        "has 9 rows .* expected 10",
    ),
    "a model that is not wrapped": (
        2, lambda graph, comm: sp.cross_entropy(gcn()(graph.x, graph.edge_index), graph.y, None, comm).backward(),
        RefusedError, r"wrap the module that holds the parameter too \(shardpass.pyg.wrap",
    ),
    "such a model on rows of its own": (
        2, lambda graph, comm: outside(comm, graph), RefusedError,
        r"test_refused_arguments\.py.* outside of the wrapped model.* \(shardpass\.pyg\.wrap",
    ),
    "an error of the model itself": (
        1, lambda graph, comm: sp.pyg.wrap(Multiplies(), comm)(graph.x, graph), RuntimeError,
        "^(?!.*rank).*mat1 and mat2",
    ),
    "memory that torch did not get": (
        2, lambda graph, comm: sp.pyg.wrap(gcn(), comm)(graph.x.repeat(1, 10**12), graph), RuntimeError,
        "can't allocate memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name, store):
    ranks, use, kind, words = MISTAKES[name]
    with pytest.raises(kind, match=words) as caught:
        sp.spawn(lambda comm: use(sp.load(store, comm), comm), ranks)
    assert "memory" not in name or "memory ran out: take more ranks" in reason_of(caught.value)


def test_no_features_at_all(tmp_path):
    sp.partition(fields(x=None), tmp_path / "none", parts=2, method="range")
    sp.partition(fields(x=None, feat=torch.randn(20, 4)), tmp_path / "dgl", parts=2, method="range")
    for name, words in {"none": "shardpass.NodeEmbedding", "dgl": r"graph\.node\['feat'\]"}.items():
        own = sp.load(tmp_path / name, sp.connect("local"))
        with pytest.raises(AttributeError, match=words):
            _ = own.x
        with pytest.raises(KeyError, match=words):
            _ = own.num_features


def test_a_folder_that_is_missing_is_made(tmp_path, at):
    sp.save_checkpoint(tmp_path / "no" / "such" / "run.ckpt", at.comm, torch.nn.Linear(2, 2))
    sp.partition(data(), tmp_path / "nor" / "this" / "parts", parts=2, method="range")
    sp.infer(at.model, at.graph, tmp_path / "neither" / "out.npy")
    assert (tmp_path / "no" / "such" / "run.ckpt").exists() and (tmp_path / "neither" / "out.npy").exists()
    sp.load(tmp_path / "nor" / "this" / "parts", at.comm)
