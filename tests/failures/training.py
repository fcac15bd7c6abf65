"""A small training loop on a partitioned random graph, and what became of every rank when one of them goes wrong."""

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GCNConv

import shardpass as sp
from shardpass.data import verify

LIMIT = 45.0  # seconds from the fault to the end of the last rank: generous, but less than a wait lasts
RANKS, PARTS, FEATURES, CLASSES, NODES = 3, 4, 6, 3, 60
MODELS = {
    "GCN": lambda: GCN(FEATURES, 8, 2, CLASSES),
    "GAT": lambda: GAT(FEATURES, 8, 2, CLASSES, heads=2, dropout=0.0),
}


def random_graph(dtype: torch.dtype = torch.float32) -> Data:
    """60 nodes, 300 edges, 6 features, 3 classes."""
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(NODES, FEATURES, generator=generator, dtype=torch.float64).to(dtype),
        edge_index=torch.randint(0, NODES, (2, 300), generator=generator),
        y=torch.randint(0, CLASSES, (NODES,), generator=generator),
        train_mask=torch.rand(NODES, generator=generator) < 0.5,
    )


@dataclass
class Outcome:
    """What became of the ranks: results and exceptions."""

    results: list[Any]
    errors: list[BaseException | None]
    raised: BaseException | None

    def words(self) -> str:
        return "\n".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in enumerate(self.errors))

    def assert_all_say(self, *causes: str) -> None:
        """Every rank ended in time with an exception that holds these words; no rank's thread is left."""
        assert all(self.errors), f"a rank went on:\n{self.words()}"
        for rank, error in enumerate(self.errors):
            for cause in causes:
                assert cause in str(error), f"rank {rank} does not say {cause!r}:\n{self.words()}"
        self.assert_nobody_timed_out()

    def assert_nobody_timed_out(self) -> None:
        """The ranks ended because they knew of the fault, not because a wait took too long; no thread is left."""
        assert "has waited" not in self.words()
        assert not [thread.name for thread in threading.enumerate() if "shardpass rank" in thread.name]

    def assert_began_on(self, rank: int, kind: type[BaseException], *causes: str) -> None:
        """`rank` raised `kind`; every other rank names it and its words; so does the exception of `spawn`."""
        error = self.errors[rank]
        assert isinstance(error, kind), self.words()
        for cause in causes:
            assert cause in str(error), self.words()
        for other, echo in enumerate(self.errors):
            if other != rank:
                assert f"rank {rank} failed first: {type(error).__name__}: {error}" in str(echo), self.words()
        assert self.raised is error
        notes = getattr(error, "__notes__", [f"(raised on rank {rank})"])
        assert f"(raised on rank {rank})" in notes
        self.assert_nobody_timed_out()


def run_ranks(work: Callable[[Any], Any], ranks: int = RANKS) -> Outcome:
    """``work(comm)`` on ranks that are threads. A wait longer than 60 s ends in an error that says so."""
    errors, ended = [None] * ranks, [False] * ranks

    def rank(comm: Any) -> Any:
        try:
            return work(comm)
        except BaseException as error:
            errors[comm.rank] = error
            raise
        finally:
            ended[comm.rank] = True

    results, raised = [], None
    try:
        results = sp.spawn(rank, ranks, timeout=60)
    except Exception as error:
        raised = error
    deadline = time.monotonic() + LIMIT
    while not all(ended) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(ended), f"ranks without an end: {[r for r, end in enumerate(ended) if not end]}"
    return Outcome(results, errors, raised)


@dataclass
class Turn:
    """Where one rank is in its training; what the twists of a test get."""

    comm: Any
    graph: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: Tensor
    epoch: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def culprit(self) -> bool:
        """Whether the fault is to happen here and now: on rank 1 in the second epoch."""
        return self.comm.rank == 1 and self.epoch == 1

    def forward(self) -> Tensor:
        return self.model(self.x, self.graph)

    def loss(self, logits: Tensor) -> Tensor:
        return sp.cross_entropy(logits, self.graph.y, self.graph.train_mask, self.comm)

    def step(self) -> None:
        """One step as the documentation has it."""
        loss = self.loss(self.forward())
        self.optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(self.model, self.comm)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))


def begin(
    comm: Any,
    store: Path,
    model: nn.Module | str = "GCN",
    mode: str = "sar",
    twist_model: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Turn:
    """A rank about to train. Models of one name are the same on every rank, whatever the shared generator does."""
    graph = sp.load(store, comm, sp.Options(mode=mode))
    with comm.random_lock():
        torch.manual_seed(0)
        model = MODELS[model]() if isinstance(model, str) else copy.deepcopy(model)
        model = twist_model(model.to(graph.x.dtype))
    model = sp.pyg.wrap(model, comm, check=False)  # it has tests of its own
    return Turn(comm, graph, model, torch.optim.Adam(model.parameters()), graph.x)


def train(
    store: Path, step: Callable[[Turn], None] = Turn.step, epochs: int = 3, ranks: int = RANKS, **options: Any
) -> Outcome:
    """Train on ranks that are threads; `step` is called once per epoch."""

    def work(comm: Any) -> list[float]:
        turn = begin(comm, store, **options)
        for turn.epoch in range(epochs):
            step(turn)
        return turn.losses

    outcome = run_ranks(work, ranks)
    verify(store)
    return outcome


def fault(change: Callable[[Turn], Any]) -> Callable[[Turn], None]:
    """A step in which ``change(turn)`` comes first, on the culprit in the second epoch only."""

    def step(turn: Turn) -> None:
        if turn.culprit:
            change(turn)
        turn.step()

    return step


def sharded_gradients(
    store: Path, model: nn.Module, objective: Callable[[nn.Module, Turn], None], ranks: int = RANKS, mode: str = "sar"
) -> dict[str, Tensor]:
    """The summed gradients after `objective` has called backward on every rank."""

    def work(comm: Any) -> dict[str, Tensor]:
        turn = begin(comm, store, model, mode)
        objective(turn.model, turn)
        sp.sync_gradients(turn.model, comm)
        return {name: p.grad.clone() for name, p in turn.model.named_parameters() if p.grad is not None}

    outcome = run_ranks(work, ranks)
    if outcome.raised is not None:
        raise AssertionError(outcome.words()) from outcome.raised
    for other in outcome.results[1:]:
        assert all(torch.equal(other[name], grad) for name, grad in outcome.results[0].items()), "alike on all ranks"
    return outcome.results[0]


def whole_gradients(model: nn.Module, objective: Callable[[nn.Module, Data], Tensor]) -> dict[str, Tensor]:
    """The gradients of `objective` on the whole graph in one process, with plain PyG."""
    model = copy.deepcopy(model).double()
    objective(model, random_graph(torch.float64)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal within 1e-10; gradients that are absent count as zeros."""
    for name in sorted({*found, *expected}):
        pair = [grads.get(name) for grads in (found, expected)]
        present = next(grad for grad in pair if grad is not None)
        a, b = (torch.zeros_like(present) if grad is None else grad for grad in pair)
        assert a.dtype == torch.float64 and float((a - b).abs().max()) < 1e-10, (name, a, b)


class Skips(nn.Module):
    """Three layers, one of which a rank may skip; `shared` uses one and the same layer for all hidden ones."""

    def __init__(self, shared=False):
        super().__init__()
        layers = [GCNConv(FEATURES, 8), GCNConv(8, 8), GCNConv(8, 8), GCNConv(8, CLASSES)]
        if shared:
            layers[2] = layers[1]
        self.convs = nn.ModuleList(layers)
        self.without = -1

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            if i == self.without:
                x = x[:, :CLASSES] if i == 3 else x
            else:
                x = conv(x, edge_index).relu()
        return x
