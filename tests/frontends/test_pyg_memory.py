"""Activations that are computed again, or kept on disk: the same numbers, fewer bytes."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, models

import shardpass as sp
from shardpass.core.aggregation import choice
from shardpass.testing import LiveBytes, WholeGraph, assignments, awkward_graph, run, shard_in_memory

from .how_much import ONE_TWO_FOUR, one_each, some_by_default
from .on_ranks import on_ranks

Gradients = dict[str, Tensor]
NODES = 320


def graph_with_isolated_nodes() -> WholeGraph:
    """The awkward graph, with many more nodes: activations are then larger than the state of a generator."""
    awkward = awkward_graph(channels=6)
    generator = torch.Generator().manual_seed(1)
    edges = torch.cat([awkward.edge_index, torch.randint(0, NODES, (2, 900), generator=generator)], dim=1)
    return WholeGraph(NODES, edges, {"x": torch.randn(NODES, 6, generator=generator, dtype=torch.float64)})


GRAPH = graph_with_isolated_nodes()


@pytest.fixture(autouse=True)
def _fixed_dropout_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "draw_seed", lambda comm: 5)


@contextmanager
def fixed_dropout(model: nn.Module, comm: sp.Communicator) -> Iterator[None]:
    """Ranks that are threads share a generator: seed it before each dropout, and hold it until it has drawn."""
    lock: Any = comm.random_lock()
    seeds = iter(range(comm.rank * 1000, (comm.rank + 1) * 1000))

    def before(*_: Any) -> None:
        lock.__enter__()
        torch.manual_seed(next(seeds))

    def after(*_: Any) -> None:
        lock.__exit__(None, None, None)

    hooks = [m.register_forward_pre_hook(before) for m in model.modules() if isinstance(m, nn.Dropout)]
    hooks += [m.register_forward_hook(after) for m in model.modules() if isinstance(m, nn.Dropout)]
    yield
    for hook in hooks:
        hook.remove()


def train(
    comm: sp.Communicator, model: nn.Module, checkpoint: Any, owners: Tensor, dtype: torch.dtype, backwards: int = 1
) -> tuple[Gradients, int]:
    """The output, gradients and buffers of one step, and the bytes alive between forward and backward."""
    model = copy.deepcopy(model).to(dtype).train()
    sp.pyg.wrap(model, comm, check=False, checkpoint=checkpoint)
    graph = shard_in_memory(GRAPH, owners, comm, sp.Options())
    x = graph.x.to(dtype).requires_grad_()
    with fixed_dropout(model, comm), LiveBytes() as live:
        out = model(x, graph)
        held = live.count()
        for _ in range(backwards):
            (out.square() * torch.arange(1, out.numel() + 1).view_as(out)).sum().backward(retain_graph=True)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad, **found, **buffers}, held


def same_bits(work: Callable[[sp.Communicator, Any], tuple[Gradients, int]], ranks: int) -> None:
    """`work` gives the same bits with checkpoint=None and "activations", and holds fewer bytes with it."""
    results = run(lambda comm: (work(comm, None), work(comm, "activations")), ranks)
    for (kept, bytes_kept), (again, bytes_again) in results:
        assert kept.keys() == again.keys()
        for name, tensor in kept.items():
            assert torch.equal(tensor, again[name]), (name, (tensor - again[name]).abs().max())
        assert bytes_again < bytes_kept, (bytes_again, bytes_kept)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "activation first": {"act": "elu", "act_first": True},
    "in place": {"act": nn.ReLU(inplace=True)},
    "all layers": {"jk": "cat", "act": "leaky_relu"},
    "the largest of all layers": {"jk": "max", "norm": "layer_norm"},
}
MIX = torch.arange(NODES) % 4


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize("kind", some_by_default([GraphSAGE, GCN, GAT, GIN], GCN, GAT))
def test_the_same_bits_with_fewer_bytes(kind: Any, ranks: int) -> None:
    torch.manual_seed(0)
    model = kind(6, 32, 3, 4, dropout=0.5, norm="batch_norm", act="relu")
    same_bits(lambda comm, checkpoint: train(comm, model, checkpoint, MIX % ranks, torch.float64), ranks)


@pytest.mark.parametrize("name", some_by_default(OPTIONS, "activation first", "in place", "all layers"))
def test_models_of_several_kinds(name: str) -> None:
    torch.manual_seed(0)
    options = {"dropout": 0.3, "norm": "batch_norm", **OPTIONS[name]}
    model = GraphSAGE(6, 32, 3, 4, **options)
    same_bits(lambda comm, checkpoint: train(comm, model, checkpoint, MIX % 2, torch.float32, backwards=2), 2)


def test_a_rank_without_nodes() -> None:
    model = GCN(6, 32, 3, 4, dropout=0.5, norm="batch_norm")

    def work(comm: sp.Communicator) -> Any:
        return [train(comm, model, checkpoint, MIX % 2, torch.float64)[0] for checkpoint in (None, "activations")]

    for kept, again in run(work, 3):
        assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("training", [True, False])
@on_ranks(2)
def test_following_rows_takes_part(comm, training):
    model = sp.pyg.wrap(GraphSAGE(6, 8, 2, 4, norm="batch_norm"), comm, checkpoint="activations").train(training)
    graph = shard_in_memory(GRAPH, MIX % 2, comm, sp.Options())
    model(graph.x.float(), graph).sum().backward()
    assert comm.notes is None


def test_dropout_is_followed_and_draws_the_same() -> None:
    def work(comm: sp.Communicator) -> list[Tensor]:
        graph = shard_in_memory(GRAPH, MIX % comm.size, comm, sp.Options())
        found = []
        for checkpoint in (None, "activations"):
            torch.manual_seed(0)  # ranks that are threads share the generator
            model = sp.pyg.wrap(GraphSAGE(6, 8, 2, 4, dropout=0.5), comm, checkpoint=checkpoint)
            out = model(graph.x.float(), graph)
            out.sum().backward()
            found.append(out.detach())
        return found

    for out, again in run(work, 1):
        assert torch.equal(out, again)
    run(work, 2)


def trained_offloading(comm, kind, options, directory):
    whole = awkward_graph()
    owners = assignments(whole.num_nodes, comm.size, whole.edge_index)["random"]
    graph = shard_in_memory(whole, owners, comm, options)
    with sp.seed(0, comm):
        model = kind(graph.x.size(1), 8, 3, 3, norm="batch_norm", jk="cat").double()
    sp.pyg.wrap(model, comm, check=False)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        folder = directory and directory / str(comm.rank)
        with nullcontext() if folder is None else sp.offload(folder, min_bytes=8):
            loss = sp.mean(model(graph.x, graph).square(), None, comm)
        loss.backward()
        sp.sync_gradients(model, comm)
        optimizer.step()
        losses.append(loss.detach().clone())
    return torch.stack(losses), torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("kind", "mode"), one_each([models.GCN, models.GAT]))
def test_the_same_losses(kind, mode, tmp_path):
    options = sp.Options(mode=mode)
    expected = run(trained_offloading, 3, args=(kind, options, None))
    found = run(trained_offloading, 3, args=(kind, options, tmp_path))
    for one, other in zip(expected, found):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


def test_edge_weights_of_layers_that_are_done_are_not_in_memory(tmp_path, few_objects):
    """Each layer of a GCN makes edge weights of its own; autograd saves them, and nothing else may hold them."""
    whole = awkward_graph()
    owners = assignments(whole.num_nodes, 1, whole.edge_index)["random"]
    graph = shard_in_memory(whole, owners, sp.connect(), sp.Options())
    model = models.GCN(graph.x.size(1), 8, 3, 3).double()
    sp.pyg.wrap(model, graph.comm, check=False)
    before = {id(tensor) for tensor in _vectors()}
    with sp.offload(tmp_path, min_bytes=8):
        out = model(graph.x, graph)
    assert [
        tensor.shape for tensor in _vectors() if tensor.numel() > 2 * graph.num_own_nodes and id(tensor) not in before
    ] == []
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def _vectors():
    found = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return [t for t in found if t.dim() == 1 and t.is_floating_point()]


def test_what_is_written_is_not_taken_for_rows(tmp_path):
    """A weight for each edge is saved as bytes, while the check follows the rows of the model."""
    whole = awkward_graph()
    owners = assignments(whole.num_nodes, 2, whole.edge_index)["random"]

    def work(comm):
        graph = shard_in_memory(whole, owners, comm)
        model = sp.pyg.wrap(models.GCN(graph.x.size(1), 8, 2, 3).double(), comm)
        weight = graph.edge_weight.clone().requires_grad_()
        scale = (graph.x.sum(1) * 2).requires_grad_()
        with sp.offload(tmp_path, min_bytes=1):
            out = model(graph.x * scale.tanh().view(-1, 1), graph, weight.exp())
        out.sum().backward()
        return weight.grad

    assert all(grad.abs().sum() > 0 for grad in run(work, 2))
