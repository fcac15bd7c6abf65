"""Sums of which partial sums travel: exact, the same from run to run, and as few rows as the covers have."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from backends.launchers import needs_mpi
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardpass as sp
from benchmarks.jobs import mpirun_command
from shardpass.cli.launch import launcher_environment
from shardpass.core.aggregation import partial_sums
from shardpass.core.exchange import minimum_cover
from shardpass.testing import WholeGraph, awkward_graph, cotangent, evaluate_whole, run, shard_in_memory

from .how_much import one_each, owners_of
from .on_ranks import share

pytest.importorskip("scipy")
WIDTH = 4
SEEDING = threading.Lock()  # ranks that are threads draw from one generator
STEPS = 4


def graph_with_hubs() -> WholeGraph:
    """Ten hubs send to many nodes and take from many, so that covers are far smaller than halos."""
    generator = torch.Generator().manual_seed(3)
    hubs = torch.randint(0, 10, (2, 150), generator=generator)
    others = torch.randint(10, 80, (2, 150), generator=generator)
    edges = torch.cat([torch.stack([hubs[0], others[0]]), torch.stack([others[1], hubs[1]])], 1)
    x = torch.randn(80, WIDTH, dtype=torch.float64, generator=generator)
    return WholeGraph(80, edges, {"x": x}, {"w": torch.rand(300, dtype=torch.float64, generator=generator)})


class Layers(nn.Module):
    def __init__(self, *convs: nn.Module, weighted: bool = False) -> None:
        super().__init__()
        self.convs, self.weighted = nn.ModuleList(convs), weighted

    def forward(self, x: Tensor, edge_index: Any, w: Tensor) -> Tensor:
        for conv in self.convs:
            x = (conv(x, edge_index, w) if self.weighted else conv(x, edge_index)).tanh()
        return x


MODELS = {
    "SAGE": lambda: Layers(gnn.SAGEConv(WIDTH, WIDTH), gnn.SAGEConv(WIDTH, 3)),
    "GIN": lambda: Layers(gnn.GINConv(nn.Linear(WIDTH, 3)), gnn.SimpleConv("sum")),
    "GCN": lambda: Layers(gnn.GCNConv(WIDTH, WIDTH), gnn.GCNConv(WIDTH, 3)),
    "APPNP": lambda: Layers(gnn.APPNP(3, 0.1)),
    "weighted": lambda: Layers(gnn.GraphConv(WIDTH, 3), gnn.GraphConv(3, 3), weighted=True),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The partial sums of all ranks."""
    found: list[Any] = []
    build = partial_sums._build
    monkeypatch.setattr(partial_sums, "_build", lambda *args: found.append(build(*args)) or found[-1])
    return found


def train(
    comm: Any, whole: WholeGraph, name: str, expected: Any, options: sp.Options
) -> tuple[float, list[int], Tensor]:
    """The largest error of all steps, the bytes that each has sent, and the last gradients."""
    graph = share(whole, comm, **vars(options))
    model, errors, sent = sp.pyg.wrap(made_of(name), comm), [0.0], []
    for _ in range(STEPS):
        model.zero_grad()
        x, before = graph.x.detach().clone().requires_grad_(), comm.bytes_sent
        out = model(x, graph.edge_index, graph.w)
        (out * cotangent(expected.output)[graph.node_ids]).sum().backward()
        sent.append(comm.bytes_sent - before)
        pairs = [(out, expected.output[graph.node_ids]), (x.grad, expected.inputs["x"][graph.node_ids])]
        pairs += [(p.grad, expected.parameters[key]) for key, p in model.named_parameters()]
        errors += [float((one - other).detach().abs().max()) for one, other in pairs if other.numel()]
    return max(errors), sent, x.grad


def made_of(name: str) -> nn.Module:
    with SEEDING:
        torch.manual_seed(0)
        return MODELS[name]().double()


def of_whole(whole: WholeGraph, name: str) -> Any:
    return evaluate_whole(made_of(name), whole, lambda m, i, g: m(i["x"], getattr(g, "edge_index", g), i["w"]))


@pytest.mark.parametrize(("name", "mode"), one_each(MODELS))
def test_models_are_exact(name: str, mode: Any, made: list[Any]) -> None:
    whole = graph_with_hubs()
    expected = of_whole(whole, name)
    ranks = {"sar": 3, "keep": 2, "halo": 5}[mode]
    blocks = {"sar": None, "keep": 2, "halo": None}[mode]
    options = sp.Options(mode=mode, share_memory=False, block_rows=blocks, partial_sums=True)
    for error, _, _ in run(lambda comm: train(comm, whole, name, expected, options), ranks):
        assert error < 1e-12
    assert made and all(one.is_worth_it for one in made)


def every_expected() -> dict[str, Any]:
    return {name: of_whole(graph_with_hubs(), name) for name in MODELS}


def are_exact(comm: Any, every: dict[str, Any]) -> None:
    """Every model in every mode. It runs on each rank, under mpirun too."""
    whole, wrong = graph_with_hubs(), {}
    for name, expected in every.items():
        for mode in ("sar", "keep", "halo"):
            options = sp.Options(mode=mode, share_memory=False, partial_sums=True)
            error, *_ = train(comm, whole, name, expected, options)
            if not error < 1e-12:
                wrong[f"{name}, {mode}"] = error
    assert wrong == {}
    print(f"rank {comm.rank} of {comm.size} is exact", flush=True)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_ranks_of_every_number_are_exact(ranks: int, backend: Any) -> None:
    run(are_exact, ranks, backend, args=(every_expected(),))


@pytest.mark.long
@pytest.mark.mpi
@needs_mpi
@pytest.mark.parametrize("ranks", range(1, 9))
def test_ranks_of_mpi_are_exact(ranks: int) -> None:
    program = f"import shardpass as sp; from {__name__} import *; are_exact(sp.connect(), every_expected())"
    env = {**launcher_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*mpirun_command(ranks), sys.executable, "-c", program]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=480)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(f"rank {rank} of {ranks} is exact" in ended.stdout for rank in range(ranks))


@pytest.mark.parametrize("name", ["SAGE", "GCN"])
def test_bytes_are_those_of_the_covers(name: str) -> None:
    """What a step sends beside rows is the same with and without; rows have `WIDTH` or 3 numbers, both ways."""
    whole, ranks = graph_with_hubs(), 3
    expected = of_whole(whole, name)

    def bytes_of(partial: bool) -> int:
        options = sp.Options(share_memory=False, partial_sums=partial, cache_constant_inputs=False, backward="push")
        return sum(sent[-2] for _, sent, _ in run(lambda comm: train(comm, whole, name, expected, options), ranks))

    owners = owners_of(whole, ranks)["random"]
    src, dst = whole.edge_index
    halo = fewer = 0
    for q in range(ranks):
        for p in range(ranks):
            between = (owners[src] == q) & (owners[dst] == p)
            if p != q:
                halo += src[between].unique().numel()
                fewer += sum(int(one.sum()) for one in minimum_cover(src[between], dst[between], 80, 80))
    saved = bytes_of(False) - bytes_of(True)
    assert fewer < 0.7 * halo
    assert saved == (halo - fewer) * (WIDTH + 3) * 2 * 8


def test_with_constant_rows_kept_and_two_bytes_the_fewest_travel() -> None:
    whole = graph_with_hubs()
    whole.node["x"] = whole.node["x"].float()
    torch.manual_seed(0)
    plain = Layers(gnn.SAGEConv(WIDTH, 8), gnn.SAGEConv(8, 8), gnn.SAGEConv(8, 3))
    expected = plain(whole.node["x"], whole.edge_index, whole.edge["w"])

    def work(comm: Any, options: dict[str, Any]) -> int:
        graph = share(whole, comm, share_memory=False, backward="push", **options)
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        for _ in range(4):
            before = comm.bytes_sent
            out = model(graph.x, graph.edge_index, graph.w)
            out.sum().backward()
        torch.testing.assert_close(out, expected[graph.node_ids], rtol=0, atol=0.05)
        return comm.bytes_sent - before

    ways = {"partial_sums": (False, True), "cache_constant_inputs": (False, True), "wire_dtype": (None, torch.bfloat16)}
    sent = {
        switched: sum(run(lambda comm, switched=switched: work(comm, dict(zip(ways, switched))), 3))
        for switched in itertools.product(*ways.values())
    }
    for switched, num_bytes in sent.items():
        for one, (off, on) in enumerate(ways.values()):
            if switched[one] == off:
                assert sent[(*switched[:one], on, *switched[one + 1 :])] < num_bytes


def test_runs_give_the_same_bits() -> None:
    whole = graph_with_hubs()
    expected, options = of_whole(whole, "GCN"), sp.Options(share_memory=False, partial_sums=True)
    first, second = (run(lambda comm: train(comm, whole, "GCN", expected, options), 3) for _ in range(2))
    assert all(torch.equal(one[2], other[2]) for one, other in zip(first, second))


@pytest.mark.parametrize("name", ["SAGE", "GCN", "weighted"])
def test_a_run_that_goes_on_gives_the_same_bits(name: str, tmp_path: Any, made: list[Any]) -> None:
    whole = graph_with_hubs()

    def work(comm: Any, steps: range, file: str) -> Tensor:
        graph = share(whole, comm, share_memory=False, partial_sums=True)
        torch.manual_seed(0)
        model = sp.pyg.wrap(MODELS[name]().double(), comm)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if steps.start:
            sp.load_checkpoint(file, comm, model, optimizer, graph=graph)
        for step in steps:
            out = model(graph.x.clone().requires_grad_(), graph.edge_index, graph.w)
            loss = sp.mean(out.square().sum(1), None, comm)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 2:
                sp.save_checkpoint(file, comm, model, optimizer, epoch=step, graph=graph)
        return out.detach()

    file = str(tmp_path / "run.ckpt")
    whole_run = run(lambda comm: work(comm, range(5), file), 3)
    rest = run(lambda comm: work(comm, range(3, 5), file), 3)
    assert all(torch.equal(one, other) for one, other in zip(whole_run, rest))
    assert len(made) == 3 * 2


@pytest.mark.parametrize("owners", ["random", "one rank has all", "a rank without nodes"])
def test_awkward_graphs(owners: str) -> None:
    whole = awkward_graph(channels=WIDTH)
    whole.edge["w"] = torch.rand(whole.edge_index.size(1), dtype=torch.float64)
    place = torch.arange(whole.num_nodes) % {"random": 4, "one rank has all": 1, "a rank without nodes": 3}[owners]
    for name in ("SAGE", "weighted"):
        expected = of_whole(whole, name)

        def work(comm: Any, name: str = name, expected: Any = expected) -> float:
            graph = shard_in_memory(whole, place, comm, sp.Options(share_memory=False, partial_sums=True))
            torch.manual_seed(0)
            model = sp.pyg.wrap(MODELS[name]().double(), comm)
            for _ in range(4):
                out = model(graph.x.clone().requires_grad_(), graph.edge_index, graph.w)
                out.sum().backward()
            return float((out - expected.output[graph.node_ids]).abs().max()) if len(out) else 0.0

        assert max(run(work, 4)) < 1e-12


@pytest.mark.parametrize("write", ["in place", "data", "another"])
def test_weights_that_change_are_seen(write: str, made: list[Any]) -> None:
    whole = graph_with_hubs()
    torch.manual_seed(0)
    plain = MODELS["weighted"]().double()

    def work(comm: Any) -> list[float]:
        graph = share(whole, comm, share_memory=False, partial_sums=True)
        model, found, w = sp.pyg.wrap(copy.deepcopy(plain), comm), [], graph.w.clone()
        for step in range(8):
            if step == 5:
                changed = w * 0.5 + 1
                if write == "another":
                    w = changed
                else:
                    (w if write == "in place" else w.data).copy_(changed)
            out = model(graph.x.clone().requires_grad_(), graph.edge_index, w)
            out.sum().backward()
            every = torch.empty(whole.edge_index.size(1), dtype=torch.float64)
            parts = comm.all_gather(torch.stack([graph.edge_ids.double(), w.detach()], 1))
            for part in parts:
                every[part[:, 0].long()] = part[:, 1]
            expected = plain(whole.node["x"], whole.edge_index, every)[graph.node_ids]
            found.append(float((out - expected).detach().abs().max()))
        return found

    assert all(max(found) < 1e-12 for found in run(work, 3))
    assert made


@pytest.mark.parametrize("name", ["SAGE", "GCN"])
def test_layers_that_are_computed_again(name: str, made: list[Any]) -> None:
    whole = graph_with_hubs()
    expected = of_whole(whole, name)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = MODELS[name]()

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            for conv in self.layers.convs:
                x = checkpoint(conv, x, edge_index, use_reentrant=False).tanh()
            return x

    def work(comm: Any) -> float:
        graph = share(whole, comm, share_memory=False, partial_sums=True)
        torch.manual_seed(0)
        model, error = sp.pyg.wrap(Checkpointed().double(), comm), 0.0
        for _ in range(STEPS):
            x = graph.x.detach().clone().requires_grad_()
            out = model(x, graph.edge_index)
            (out * cotangent(expected.output)[graph.node_ids]).sum().backward()
            error = max(error, float((x.grad - expected.inputs["x"][graph.node_ids]).abs().max()))
        return error

    assert max(run(work, 3)) < 1e-12
    assert made


def test_gradients_of_gradients() -> None:
    whole = graph_with_hubs()
    expected = of_whole(whole, "GCN")
    torch.manual_seed(0)
    plain = MODELS["GCN"]().double()

    def second(model: nn.Module, x: Tensor, edges: Any, w: Tensor) -> Tensor:
        out = model(x, edges, w)
        (grad,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
        return grad

    x = whole.node["x"].clone().requires_grad_()
    second(plain, x, whole.edge_index, whole.edge["w"]).square().sum().backward()

    def work(comm: Any) -> float:
        graph = share(whole, comm, share_memory=False, partial_sums=True)
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        for _ in range(4):
            mine = graph.x.detach().clone().requires_grad_()
            second(model, mine, graph.edge_index, graph.w).square().sum().backward()
        return float((mine.grad - x.grad[graph.node_ids]).abs().max() / x.grad.abs().max())

    assert max(run(work, 3)) < 1e-12
    assert expected.output.numel()


def test_edges_of_one_step_are_not_covered(made: list[Any]) -> None:
    whole = graph_with_hubs()

    def work(comm: Any) -> float:
        graph, worst = share(whole, comm, share_memory=False, partial_sums=True), 0.0
        model = sp.pyg.wrap(Layers(gnn.SimpleConv("sum")).double(), comm)
        for step in range(3):
            kept = graph.edge_ids % 3 != step
            out = model(graph.x.clone().requires_grad_(), graph.edge_index[:, kept], graph.w)
            edges = whole.edge_index[:, torch.arange(300) % 3 != step]
            expected = torch.zeros_like(whole.node["x"]).index_add_(0, edges[1], whole.node["x"][edges[0]]).tanh()
            worst = max(worst, *(out - expected[graph.node_ids]).abs().flatten().tolist())
        return worst

    assert max(run(work, 3)) < 1e-12
    assert made == []


def test_what_is_not_a_sum_of_rows_goes_as_before(made: list[Any]) -> None:
    whole = graph_with_hubs()

    def work(comm: Any) -> None:
        graph = share(whole, comm, share_memory=False, partial_sums=True)
        convs = (
            gnn.GATConv(WIDTH, WIDTH),
            gnn.SAGEConv(WIDTH, WIDTH, aggr="max"),
            gnn.EdgeConv(nn.Linear(2 * WIDTH, WIDTH)),
        )
        model = sp.pyg.wrap(Layers(*convs).double(), comm)
        for _ in range(4):
            model(graph.x.clone().requires_grad_(), graph.edge_index, graph.w).sum().backward()

    run(work, 2)
    assert made == []
