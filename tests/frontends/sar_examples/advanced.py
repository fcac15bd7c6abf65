"""Message flow graphs and the three training modes, for three kinds of layers."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frontends.sar_examples.data import joined, of, total
from frontends.sar_examples.models import LAYERS, GNNModel
from shardpass.frontends import sar

MODES = ("SAR", "SA", "one_shot_aggregation")


def main(args: argparse.Namespace) -> dict[str, Any]:
    sar.patch_dgl()
    partition_data = joined(args)
    features, labels = of(partition_data, "features"), of(partition_data, "labels")
    start = partition_data.node_ranges[sar.rank()][0]
    train = of(partition_data, "train_mask").nonzero().view(-1)
    train_blocks = sar.construct_mfgs(partition_data, train + start, n_layers=3)
    full_graph = sar.construct_full_graph(partition_data)
    found = {}
    for layer in LAYERS:
        for mode in MODES:
            sar.Config.disable_sr = mode == "SA"
            blocks, graph = train_blocks, full_graph
            if mode == "one_shot_aggregation":
                blocks = [block.get_full_partition_graph() for block in train_blocks]
                graph = full_graph.get_full_partition_graph()
            inputs, outputs = blocks[0].input_nodes, blocks[-1].seeds
            found[layer, mode, "mfgs"] = trained(layer, blocks, features[inputs], labels[outputs], slice(None))
            found[layer, mode, "full"] = trained(layer, graph, features, labels[train], train)
    return found


def trained(layer: str, graphs: Any, features: Tensor, labels: Tensor, rows: Any) -> list[float]:
    """The losses of three steps."""
    torch.manual_seed(1)
    gnn_model = GNNModel(layer)
    sar.sync_params(gnn_model)
    optimizer = torch.optim.SGD(gnn_model.parameters(), lr=0.1)
    n_train, losses = total(labels.numel()), []
    for _ in range(3):
        loss = F.cross_entropy(gnn_model(graphs, features)[rows], labels, reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(gnn_model)
        optimizer.step()
        losses.append(total(loss).item())
    return losses
