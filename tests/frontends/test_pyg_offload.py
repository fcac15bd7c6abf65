"""Training PyG models with saved tensors on disk: the same numbers, and nothing else holds the tensors in memory."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric.nn import models

import shardpass as sp
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory
from shardpass.testing.run import run

from .how_much import one_each


def train(comm, kind, options, directory):
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
    expected = run(train, 3, args=(kind, options, None))
    found = run(train, 3, args=(kind, options, tmp_path))
    for one, other in zip(expected, found):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


def test_edge_weights_of_layers_that_are_done_are_not_in_memory(tmp_path):
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
