"""Attention whose scores are scaled cosines of a query and a key, with gradients of query, key and value."""

import pytest
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import shardpass as sp
from shardpass.testing import assert_exact, awkward_graph

GRAPH = awkward_graph(channels=5)


class CosineConv(MessagePassing):
    def __init__(self):
        super().__init__(node_dim=0)
        self.query, self.key, self.value = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(5, 8)

    def forward(self, x, edge_index):
        query, key = (layer(x).view(-1, 2, 3) for layer in (self.query, self.key))
        return self.propagate(edge_index, query=query, key=key, value=self.value(x).view(-1, 2, 4)).flatten(1)

    def message(self, query_i, key_j, value_j, index, size_i):
        score = F.cosine_similarity(query_i, key_j, dim=-1) * 4
        return value_j * softmax(score, index, num_nodes=size_i).unsqueeze(-1)


def call(model, tensors, edge_index):
    return model(tensors["x"], edge_index)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("mode", ["sar", "halo"])
def test_cosine_attention(mode, order):
    options = sp.Options(chunk_bytes=1000)
    assert_exact(
        CosineConv().double(), GRAPH, call, sp.pyg.wrap, ranks=3, modes=[mode], options=options, relative=True,
        order=order,
    )  # fmt: skip
