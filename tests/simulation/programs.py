"""Small programs over the engine, chosen by a number: a graph, its owners, the ways of the engine, and what is done."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, MessagePassing, SAGEConv

import shardpass as sp
from shardpass.core.aggregation import aggregate
from shardpass.core.ranks import Options, Ranks
from shardpass.core.tracing import Findings, Inputs
from shardpass.core.tracing import Program as Messages
from shardpass.frontends.pyg import NeighborLoader, wrap
from shardpass.testing import WholeGraph, shard_in_memory

CHANNELS = 3
KINDS = (*["call"] * 8, "train", "checkpoint", "infer", "sample")
LAYERS = ("sum", "mean", "max", "gcn", "attention", "own")
CALLS = ("sum", "mean", "amax", "softmax")
GRAPHS = (*["any"] * 5, "hub", "hub", "chain", "self loops", "no edges", "one node")
SPREADS = (*["random"] * 5, "empty rank", "one rank")
Touch = Callable[[], None]


class UserError(Exception):
    """What the user's own code raises."""


@dataclass(frozen=True)
class Program:
    """What the ranks do.

    Attributes:
        number: by which it was chosen.
        spread: who owns the nodes: ``"random"``, ``"empty rank"`` or ``"one rank"``.
        checks: whether the engine follows the rows of the model, and checks that messages treat edges one by one.
    """

    number: int
    kind: str
    ranks: int
    graph: str
    spread: str
    layers: tuple[str, ...]
    options: Options
    checks: bool

    @property
    def has_forces(self) -> bool:
        """Whether its loss has a part that is made of gradients by features."""
        return self.number % 3 == 0

    @property
    def length(self) -> int:
        """How many times as long ranks may wait for each other: the backward of forces sends many messages."""
        return 3 if self.has_forces else 1

    def whole(self) -> WholeGraph:
        """The graph in one piece."""
        return whole_graph(self.graph, self.number)

    def owners(self, num_nodes: int) -> Tensor:
        """The owner of each node."""
        generator = torch.Generator().manual_seed(self.number)
        if self.spread == "one rank":
            return torch.full((num_nodes,), self.ranks - 1)
        top = self.ranks - (self.spread == "empty rank" and self.ranks > 1)
        return torch.randint(0, top, (num_nodes,), generator=generator)


def program_of(number: int) -> Program:
    """The program with this number."""
    draw = random.Random(number)
    ranks = draw.choice((1, 2, 2, 2, 2, 3, 3, 4) if number % 16 == 0 else (2, 2, 2, 3, 3, 4))
    options = Options(
        mode=draw.choice(("sar", "sar", "keep", "halo")),
        prefetch=draw.choice((0, 1, 2)),
        block_rows=draw.choice((None, None, 1, 2)),
        backward=draw.choice(("auto", "push", "pull")),
        chunk_bytes=draw.choice((1 << 20, 64)),
    )
    kind = draw.choice(KINDS)
    return Program(
        number,
        kind,
        ranks,
        draw.choice(GRAPHS),
        draw.choice(SPREADS),
        tuple(draw.choices(CALLS if kind == "call" else LAYERS, k=draw.choice((1, 1, 2)))),
        options,
        draw.random() < 0.15,
    )


def whole_graph(kind: str, seed: int) -> WholeGraph:
    """A small awkward graph."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes = 1 if kind == "one node" else 9
    num_edges = {"no edges": 0, "chain": 8}.get(kind, 24)
    ends = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    if kind == "hub":
        ends[1, 4:] = 0
    elif kind == "self loops":
        ends[1] = ends[0]
    elif kind == "chain":
        ends = torch.stack([torch.arange(8), torch.arange(1, 9)])
    x = torch.randn(num_nodes, CHANNELS, generator=generator, dtype=torch.float64)
    return WholeGraph(num_nodes, ends, {"x": x})


class Own(MessagePassing):
    """A layer of the user's own."""

    def __init__(self, touch: Touch) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(CHANNELS, CHANNELS)
        self.touch = touch

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        self.touch()
        return self.lin(x) + self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.touch()
        return torch.tanh(x_i + x_j) * x_j


def layer(kind: str, touch: Touch) -> nn.Module:
    """A layer by name."""
    if kind == "own":
        return Own(touch)
    if kind == "gcn":
        return GCNConv(CHANNELS, CHANNELS)
    if kind == "attention":
        return GATConv(CHANNELS, CHANNELS)
    return SAGEConv(CHANNELS, CHANNELS, aggr=kind)


class Model(nn.Module):
    """Layers with an activation between them."""

    def __init__(self, kinds: tuple[str, ...], touch: Touch) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(kind, touch) for kind in kinds)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        for each in self.layers:
            x = torch.tanh(each(x, edge_index))
        return x


def model_of(program: Program, touch: Touch) -> nn.Module:
    """The model, the same in every call."""
    torch.manual_seed(program.number)
    return Model(program.layers, touch).double()


def attend(rows: Tensor, inputs: Inputs) -> Tensor:
    """Softmax-weighted sums over in-edges."""
    scores = rows.sum(-1, keepdim=True).tanh().exp()
    total = rows.new_zeros((inputs.num_dst, 1)).index_add(0, inputs.index, scores)
    return scores / total.index_select(0, inputs.index) * rows


@dataclass
class Work:
    """What a rank has to do its program with.

    Attributes:
        folder: for the files of the program.
        touch: called by the user's code, which a fault may make raise.
        strays: called with the name of a call; whether this rank leaves it out.
    """

    program: Program
    folder: Path
    touch: Touch
    strays: Callable[[str], bool]


class Anything(set[str]):
    """All message functions, as if they had been checked before: the check takes a third of a call's time."""

    def __contains__(self, signature: object) -> bool:
        return True


def one_call(kind: str, graph: Any, x: Tensor, work: Work) -> Tensor:
    """The rows of in-neighbours put together in one way."""
    findings = Findings()
    if not work.program.checks:
        findings.passed = Anything()

    def message(inputs: Inputs) -> Tensor:
        work.touch()
        rows = inputs.src["x"] * torch.tanh(inputs.dst["x"])
        return attend(rows, inputs) if kind == "softmax" else rows

    def reduce(messages: Tensor, inputs: Inputs) -> Tensor:
        out = messages.new_zeros((inputs.num_dst, messages.size(1)))
        if kind in ("sum", "softmax"):
            return out.index_add(0, inputs.index, messages)
        return out.scatter_reduce(0, inputs.index.view(-1, 1).expand_as(messages), messages, kind, include_self=False)

    if work.strays("width"):
        x = x[:, :2]
    program = Messages(f"a {kind}", {"x": x}, {"x": x}, {}, message, reduce, findings=findings)
    found: Tensor = aggregate(program, graph.relation.plan, graph.relation.shards)
    return found


def slope_of(out: Tensor, x: Tensor) -> Tensor:
    """The gradient of a sum over `out` by features, which can be differentiated."""
    (found,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.size(1)).double()).sum(), x, create_graph=True)
    return found


def run_call(comm: Ranks, work: Work) -> dict[str, Tensor]:
    """Sharded calls, forward and backward, without a frontend, and a step with the gradient of a shared weight."""
    program = work.program
    whole = program.whole()
    graph = shard_in_memory(whole, program.owners(whole.num_nodes), comm, program.options)
    weight = torch.eye(CHANNELS, dtype=torch.float64, requires_grad=True)
    x = graph.fields_of("node")["x"].clone().requires_grad_()
    work.touch()
    out = x @ weight
    for kind in program.layers:
        found = one_call(kind, graph, out, work)
        out = out + found if found.shape == out.shape else found
    loss = sp.mean(out**2, None, comm)
    if program.has_forces:
        loss = loss + sp.mean(slope_of(out, x) ** 2, None, comm)
    if not work.strays("backward"):
        loss.backward()
        work.touch()
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if work.strays("extra"):
        comm.all_reduce(torch.ones(3, 3).double(), label="more")
    if not work.strays("sync"):
        gradient = comm.all_reduce(gradient, "max" if work.strays("op") else "sum", "gradient")
    found = {"ids": graph.node_ids, "out": out.detach(), "loss": loss.detach(), "gradient": gradient}
    return found if x.grad is None else {**found, "x": x.grad}


def train(comm: Ranks, work: Work, steps: int = 2, model: Any = None, save: Path | None = None) -> dict[str, Tensor]:
    """Train, and return the outputs, losses and parameters of this rank."""
    program = work.program
    whole = program.whole()
    graph = shard_in_memory(whole, program.owners(whole.num_nodes), comm, program.options)
    model = wrap(model_of(program, work.touch), comm, check=program.checks)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = 0
    if save is not None and save.exists():
        first = sp.load_checkpoint(save, comm, model, optimizer)["epoch"] + 1
    found: dict[str, Tensor] = {"ids": graph.node_ids}
    for step in range(first, steps):
        work.touch()
        x = graph.x.clone().requires_grad_(program.has_forces)
        out = model(x, graph.edge_index)
        loss = sp.mean((out - 1) ** 2, None, comm)
        if program.has_forces:
            loss = loss + sp.mean(slope_of(out, x) ** 2, None, comm)
        optimizer.zero_grad()
        if work.strays("extra"):
            comm.barrier("more")
        if not work.strays("backward"):
            loss.backward()
        if not work.strays("sync"):
            sp.sync_gradients(model, comm)
        optimizer.step()
        found |= {f"loss {step}": loss.detach(), "out": out.detach()}
        if save is not None and not work.strays("save"):
            sp.save_checkpoint(save, comm, model, optimizer, epoch=step)
    return found | {name: value.detach().clone() for name, value in model.named_parameters()}


def run_checkpoint(comm: Ranks, work: Work) -> dict[str, Tensor]:
    """Train from the checkpoint, if there is one."""
    return train(comm, work, save=work.folder / "checkpoint")


def run_infer(comm: Ranks, work: Work) -> dict[str, Tensor]:
    """Write the outputs of all nodes."""
    program = work.program
    whole = program.whole()
    graph = shard_in_memory(whole, program.owners(whole.num_nodes), comm, program.options)
    model = wrap(model_of(program, work.touch), comm, check=program.checks)
    work.touch()
    if not work.strays("infer"):
        sp.infer(model, graph, work.folder / "out.npy", graph.x, graph.edge_index, overwrite=True)
    return {}


def run_sample(comm: Ranks, work: Work) -> dict[str, Tensor]:
    """Train on sampled neighbourhoods."""
    program = work.program
    whole = program.whole()
    graph = shard_in_memory(whole, program.owners(whole.num_nodes), comm, program.options)
    model = model_of(program, work.touch)
    sp.sync_parameters(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(NeighborLoader(graph, [2, -1], batch_size=3, shuffle=True, prefetch=0)):
        work.touch()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = sp.mean(out**2, None, comm)
        optimizer.zero_grad()
        loss.backward()
        if not work.strays("sync"):
            sp.sync_gradients(model, comm)
        optimizer.step()
        found[f"ids {number}"], found[f"loss {number}"] = batch.n_id, loss.detach()
    return found | {name: value.detach().clone() for name, value in model.named_parameters()}


RUNS: dict[str, Callable[[Ranks, Work], dict[str, Tensor]]] = {
    "call": run_call,
    "train": train,
    "checkpoint": run_checkpoint,
    "infer": run_infer,
    "sample": run_sample,
}
