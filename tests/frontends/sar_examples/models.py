"""The models of the examples: plain DGL, called with a graph or with one for each layer."""

from __future__ import annotations

from typing import Any

import dgl.nn.pytorch as dnn
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = {
    "sage": lambda channels, out: dnn.SAGEConv(channels, out, "mean"),
    "gcn": lambda channels, out: dnn.GraphConv(channels, out, "right", allow_zero_in_degree=True),
    "gat": lambda channels, out: dnn.GATConv(channels, out, 1, allow_zero_in_degree=True),
}


class GNNModel(nn.Module):
    """Three layers of one kind."""

    def __init__(self, layer: str, norm: Any = None) -> None:
        super().__init__()
        self.convs = nn.ModuleList([LAYERS[layer](*sizes) for sizes in ((10, 12), (12, 12), (12, 4))])
        self.norms = nn.ModuleList([norm(12), norm(12)] if norm else [nn.Identity(), nn.Identity()])
        self.double()  # GATConv has float32 parameters whatever the default is

    def forward(self, graphs: Any, features: Tensor) -> Tensor:
        blocks = graphs if isinstance(graphs, list) else [graphs] * 3
        for number, (conv, block) in enumerate(zip(self.convs, blocks)):
            features = conv(block, features).flatten(1)
            if number < 2:
                features = F.relu(self.norms[number](features), inplace=True)
        return features


class RelationalModel(nn.Module):
    """Two layers of R-GCN: a convolution for each relation."""

    def __init__(self, relations: list[str]) -> None:
        super().__init__()
        sizes = ((10, 12), (12, 4))
        self.layers = nn.ModuleList(
            [
                dnn.HeteroGraphConv({name: dnn.GraphConv(*size, norm="right", allow_zero_in_degree=True)
                                     for name in sorted(relations)})
                for size in sizes
            ]
        )  # fmt: skip

    def forward(self, graphs: Any, features: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = graphs if isinstance(graphs, list) else [graphs] * 2
        features = self.layers[0](blocks[0], features)
        return self.layers[1](blocks[1], {kind: F.relu(rows) for kind, rows in features.items()})
