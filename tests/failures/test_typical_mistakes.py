"""Mistakes of the first day: each is told with the name of the argument or field, and what to do."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import shardpass as sp
from shardpass.errors import RefusedError


def graph(**others: Any) -> dict[str, Any]:
    """Twenty nodes in a ring with chords; `None` leaves a field out."""
    nodes = torch.arange(20)
    edge_index = torch.stack([nodes.repeat(2), torch.cat([(nodes + 1) % 20, (nodes + 7) % 20])])
    fields = {"edge_index": edge_index, "x": torch.randn(20, 4), "y": nodes % 3, "train_mask": nodes < 12, **others}
    return {name: value for name, value in fields.items() if value is not None}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes") / "parts"
    sp.partition(graph(), path, parts=2, method="range")
    return path


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

    words = r"test_typical_mistakes\.py.* outside of the wrapped model.* \(shardpass\.pyg\.wrap"
    with nullcontext() if is_wrapped else pytest.raises(RefusedError, match=words):
        sp.spawn(run, 2)


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    comm = sp.connect("local")
    sp.save_checkpoint(tmp_path / "no" / "such" / "run.ckpt", comm, torch.nn.Linear(2, 2))
    sp.partition(graph(), tmp_path / "nor" / "this" / "parts", parts=2, method="range")
    own = sp.load(tmp_path / "nor" / "this" / "parts", comm)
    sp.infer(sp.pyg.wrap(GCN(4, 8, 2, 3), comm), own, tmp_path / "neither" / "out.npy")
    assert (tmp_path / "no" / "such" / "run.ckpt").exists() and (tmp_path / "neither" / "out.npy").exists()
