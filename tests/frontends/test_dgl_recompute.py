"""``dgl.wrap(..., checkpoint="activations")``: the same bits, fewer bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardpass as sp
from shardpass.testing.graphs import awkward_graph, shard_in_memory
from shardpass.testing.live_bytes import LiveBytes
from shardpass.testing.run import run

dgl_nn = pytest.importorskip("dgl.nn")
GRAPH = awkward_graph(channels=6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dgl_nn.SAGEConv(6, 64, "mean"), dgl_nn.SAGEConv(64, 64, "mean")
        self.last = dgl_nn.GraphConv(64, 3, allow_zero_in_degree=True)
        self.norms = nn.ModuleList([nn.BatchNorm1d(64), nn.BatchNorm1d(64)])

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(graph, x)))
        x = x + F.elu(self.norms[1](self.second(graph, x)))
        return self.last(graph, x)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_bits_with_fewer_bytes(ranks: int) -> None:
    torch.manual_seed(0)
    net = Net().double()

    def train(comm: sp.Communicator, checkpoint: Any) -> tuple[list[Tensor], int]:
        model = sp.dgl.wrap(copy.deepcopy(net), comm, check=False, checkpoint=checkpoint)
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % ranks, comm, sp.Options())
        x = graph.x.clone().requires_grad_()
        with LiveBytes() as live:
            out = model(graph, x)
        held = live.count()
        out.square().sum().backward()
        assert x.grad is not None
        return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], held

    for (kept, bytes_kept), (again, bytes_again) in run(lambda c: (train(c, None), train(c, "activations")), ranks):
        assert len(kept) == len(again) and all(torch.equal(a, b) for a, b in zip(kept, again))
        assert bytes_again < bytes_kept
